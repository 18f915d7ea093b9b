"""The options of a network and of its training; no TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from flowpm_dist.cosmoflow.planning.declarations import DECLARATIONS
from flowpm_dist.cosmology.options import ParameterRanges
from flowpm_dist.cosmology.ranges import VARIABLE
from flowpm_dist.observables.options import NuisanceRanges
from flowpm_dist.options import (
    A_SEED,
    AnyPath,
    Names,
    Options,
    Seed,
    checked_python_name,
    count,
    either,
    is_python_name,
    known,
    rows,
)

DERIVED = -1
"""Default of an option that follows from others: the run file puts a number in its place."""


def _rising(milestones: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    for (before, _), (after, _) in itertools.pairwise(milestones):
        if after <= before:
            raise ValueError(f"step {before} is followed by step {after}")
    return milestones


def _seed() -> Any:
    return Field(0, description=A_SEED)


Milestones = Annotated[
    tuple[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]], ...],
    Field(min_length=1),
    BeforeValidator(rows),
    AfterValidator(_rising),
]


class PriorOptions(ParameterRanges, NuisanceRanges):
    """The parameters that vary from universe to universe.

    Attributes:
        sampling: how they are drawn.
        targets: those that the network is to find; by default all of the cosmology. The others are
            nuisances: universes differ in them, and the network does not learn their values.
    """

    sampling: Literal["sobol", "uniform"] = Field(
        default="sobol", description='"sobol" (even) or "uniform" (independent)'
    )
    targets: Names | None = Field(
        default=None, description='a list of different names in [priors], such as ["sigma8"]'
    )
    _order: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, keys: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        options = handler(keys)
        if isinstance(keys, Mapping):
            options._order = tuple(key for key in keys if key not in ("sampling", "targets"))
        return options

    @model_serializer(mode="wrap")
    def _dump_in_order(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = handler(self)
        return {name: table[name] for name in self._order} | table

    @property
    def drawn(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of all parameters that vary, in the order of the file."""
        return {name: getattr(self, name) for name in self._order}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each parameter that the network is to find."""
        targets = VARIABLE if self.targets is None else self.targets
        return {name: ends for name, ends in self.drawn.items() if name in targets}

    @property
    def nuisances(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of the other parameters that vary."""
        return {name: ends for name, ends in self.drawn.items() if name not in self.ranges}


_known_network = known(DECLARATIONS, "network")


def _network(name: str) -> str:
    return checked_python_name(name) if is_python_name(name) else _known_network(name)


class NetworkOptions(Options):
    """The network, see `flowpm_dist.cosmoflow.network.network.Network`."""

    name: Annotated[str, AfterValidator(_network)] = Field(
        default="sc18-periodic",
        description=f'{either(DECLARATIONS)}, or "package.module:function" of a Keras model',
    )
    loss: Literal["likelihood", "l1", "l2"] = Field(
        default="likelihood", description='"likelihood" (with error bars), "l1" or "l2"'
    )
    input: Literal["log1p", "log1p-counts", "asinh", "density", "convergence"] | None = Field(
        default=None,
        description='"log1p", ln((1 + density) / 2), "log1p-counts", ln(1 + counts), "asinh", '
        'arsinh(density - 1), "density", or "convergence", of maps, over 0.02',
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description='"float32", "bfloat16" or "float64"'
    )
    gather_below: int = count(4)
    dropout: float = Field(default=0.0, ge=0, lt=1, description="a share from 0 to below 1")


SC18_TRUST = 0.002
"""LARC's trust coefficient in SC18 CosmoFlow (arXiv:1808.04728)."""

SMALLEST_CENTRED = 4
"""Volumes of a batch from which on the mean of their features is taken off."""


class TrainingOptions(Options):
    """The options of the training of a network."""

    preset: Literal["mlperf"] | None = Field(default=None, description='"mlperf"')
    batch: int = count(4)
    optimiser: Literal["adam", "sgd"] = Field(default="adam", description='"adam" or "sgd"')
    learning_rate: float = Field(default=1e-4, gt=0, description="a number above 0")
    end_rate: float = Field(default=0.0, ge=0, description="a number of at least 0")
    warmup: int = count(DERIVED, least=0)
    decay: Literal["polynomial", "cosine", "steps", "epochs", "none"] = Field(
        default="polynomial", description='"polynomial", "cosine", "steps", "epochs" or "none"'
    )
    power: float = Field(default=1.0, gt=0, description="a number above 0")
    milestones: Milestones | None = Field(
        default=None,
        description="a list of [step, factor], steps increasing, factors of the learning rate",
    )
    rate_rule: Literal["none", "sqrt", "linear"] = Field(
        default="none",
        description='how the learning rate grows with the batch: "none", "sqrt" or "linear"',
    )
    reference_batch: int = count(1)
    larc: bool | Annotated[float, Field(gt=0)] = Field(
        default=False, description="true, false, or a trust coefficient above 0"
    )
    clip_norm: float = Field(default=1.0, ge=0, description="a number above 0, or 0 for none")
    weight_decay: float = Field(default=0.0, ge=0, description="a number of at least 0")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="a number from 0 to below 1")
    calibrate: int = count(DERIVED, least=0)
    centre: bool = Field(default=True, description="true or false")
    seed: Seed = _seed()
    start_from: AnyPath | None = Field(default=None, description="the folder of a training")
    steps: int = count(DERIVED)
    epochs: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    validate_every: int = count(200)
    patience: int | None = Field(
        default=None, ge=1, description="a whole number of validations, at least 1"
    )
    checkpoint_every: int = count(200)
    keep: int = count(3)

    @property
    def trust(self) -> float | None:
        """LARC's trust coefficient; None where it is off."""
        return SC18_TRUST if self.larc is True else self.larc or None

    @property
    def longest(self) -> float | None:
        """The norm that longer gradients are shortened to; None where they stay as they are."""
        return self.clip_norm or None

    @property
    def centres(self) -> bool:
        """Whether features are centred: in batches whose mean says something of all universes."""
        return self.centre and self.calibrate > 0 and self.batch >= SMALLEST_CENTRED


TRAINING_DEFAULTS = TrainingOptions()
"""The defaults, also of optimisers made from Python."""


class DataOptions(Options):
    """The source and the number of the volumes."""

    source: Literal["simulate", "files", "arrays", "dummy"] = Field(
        default="simulate", description='"simulate", "files", "arrays" or "dummy"'
    )
    simulations: int = count(2000)
    reuse: int = count(10)
    buffer: int = count(DERIVED)
    fill: int = count(DERIVED)
    balanced: bool = Field(default=True, description="true or false")
    validation: int = count(128)
    test: int = count(256)
    seed: Seed = _seed()
    augment: bool | Literal["symmetries"] | None = Field(
        default=None, description='true (shifts and symmetries), "symmetries" or false'
    )
    folder: AnyPath | None = Field(default=None, description="the folder of a dataset")
    staging: AnyPath | None = Field(default=None, description="a folder on fast local storage")
    parameters: Names | None = Field(
        default=None, description='a list of different names, such as ["Omega_m", "sigma8"]'
    )
    volumes: AnyPath | None = Field(
        default=None,
        description='a .npy file, a data set as in "file.h5:name", or a .npy file for each volume, '
        'as in "{}/density.npy"',
    )
    dtype: Literal["float16", "float32", "float64", "int16", "uint16", "int32"] | None = Field(
        default=None,
        description='"float16", "float32", "float64", "int16", "uint16" or "int32"',
    )
    unit: Literal["density", "overdensity", "mass"] | None = Field(
        default=None,
        description='"density" (mean 1), "overdensity" (mean 0) or "mass" (over its own mean)',
    )
    table: AnyPath | None = Field(default=None, description="a text file, a row for each volume")
    columns: Names | None = Field(default=None, description="a list of different names")
