"""The sections of a training's run file; [data] is in `data_options`.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from flowpm_dist.cosmoflow.planning.declarations import DECLARATIONS
from flowpm_dist.cosmoflow.volumes.draws import Sampling
from flowpm_dist.cosmology.options import ParameterRanges
from flowpm_dist.cosmology.parameters import VARIABLE
from flowpm_dist.observables.options import NuisanceRanges, OccupationRanges
from flowpm_dist.options import (
    A_SEED,
    AnyPath,
    Names,
    Options,
    Problem,
    Seed,
    Variants,
    checked_python_name,
    count,
    either,
    is_python_name,
    known,
    rows,
)

DERIVED = -1
"""Default of an option that follows from others: a complete plan has a value in its place."""


def _rising(milestones: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    for (before, _), (after, _) in itertools.pairwise(milestones):
        if after <= before:
            raise ValueError(f"step {before} is followed by step {after}")
    return milestones


Milestones = Annotated[
    tuple[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]], ...],
    Field(min_length=1),
    BeforeValidator(rows),
    AfterValidator(_rising),
]


class PriorOptions(ParameterRanges, OccupationRanges, NuisanceRanges):
    """The parameters that vary from universe to universe.

    Attributes:
        sampling: how the parameters are drawn.
        targets: the parameters that the network infers; by default all that vary in the cosmology.
            The others are nuisance parameters: they vary, but the network does not learn them.
    """

    sampling: Sampling = Field(
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

    def problems(self) -> Iterator[Problem]:
        """Yields a problem for each target without a range."""
        for name in self.targets or ():
            if name not in self.model_fields_set - {"sampling", "targets"}:
                yield self.problem("targets", f"[priors] has no {name}: give its range there")

    def to_table(self) -> dict[str, Any]:
        """Returns the section; the parameters stay in the order of the file."""
        table = super().to_table()
        return {name: table[name] for name in self._order} | table

    @property
    def drawn(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each parameter that varies, in the order of the file."""
        return {name: getattr(self, name) for name in self._order}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each parameter that the network infers."""
        targets = VARIABLE if self.targets is None else self.targets
        return {name: ends for name, ends in self.drawn.items() if name in targets}

    @property
    def nuisances(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of the other parameters that vary."""
        return {name: ends for name, ends in self.drawn.items() if name not in self.ranges}


def _network(name: str) -> str:
    check = checked_python_name if is_python_name(name) else known(DECLARATIONS, "network")
    return str(check(name))


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

    def outputs_of(self, parameters: int) -> int:
        """Returns the number of outputs: a likelihood adds an error bar for each parameter."""
        return parameters * (2 if self.loss == "likelihood" else 1)

    def idle(self) -> dict[str, str]:
        """Returns the keys that a Keras model does not have."""
        keys = ("gather_below", "dropout") if is_python_name(self.name) else ()
        return dict.fromkeys(keys, f"a declared network, not with the Keras model {self.name}")


class AdamOptions(Options):
    """The optimiser "adam", which has no options."""


class MomentumOptions(Options):
    """The options of the optimiser "sgd"."""

    momentum: float = Field(default=0.9, ge=0, lt=1, description="a number from 0 to below 1")


OPTIMISERS = {"adam": AdamOptions, "sgd": MomentumOptions}


class ConstantDecay(Options):
    """A learning rate that is constant after the warm-up."""


class CosineDecay(Options):
    """A learning rate that falls to `end_rate` along half a period of a cosine."""

    end_rate: float = Field(default=0.0, ge=0, description="a number of at least 0")


class PolynomialDecay(CosineDecay):
    """A learning rate that falls to `end_rate` as a power of the number of remaining steps."""

    power: float = Field(default=1.0, gt=0, description="a number above 0")


class MilestoneDecay(Options):
    """From the step of each milestone on, the learning rate is the base rate times its factor."""

    milestones: Milestones = Field(
        description="a list of [step, factor], steps increasing, factors of the learning rate"
    )


class EpochDecay(MilestoneDecay):
    """The same, with milestones and warm-up in epochs."""


DECAYS = {
    "polynomial": PolynomialDecay,
    "cosine": CosineDecay,
    "steps": MilestoneDecay,
    "epochs": EpochDecay,
    "none": ConstantDecay,
}


class FixedRate(Options):
    """A learning rate that does not depend on the batch."""

    reference_batch: ClassVar[int] = 1
    power: ClassVar[float] = 0.0


class LinearRate(Options):
    """A learning rate proportional to the batch (Goyal and others, arXiv:1706.02677)."""

    reference_batch: int = count(1)
    power: ClassVar[float] = 1.0


class SquareRootRate(LinearRate):
    """A rate proportional to the square root of the batch (Krizhevsky, arXiv:1404.5997)."""

    power = 0.5


RATE_RULES = {"none": FixedRate, "sqrt": SquareRootRate, "linear": LinearRate}

SC18_TRUST = 0.002
"""LARC's trust coefficient in SC18 CosmoFlow (arXiv:1808.04728)."""

SMALLEST_CENTRED = 4
"""Smallest batch in which the mean of the features is subtracted."""


class TrainingOptions(Options):
    """The options of the training of a network.

    If warmup, calibrate and steps are not given, they follow from other options. They are then
    `DERIVED` until the plan is complete.
    """

    preset: Literal["mlperf"] | None = Field(default=None, description='"mlperf"')
    batch: int = count(4)
    optimiser: Annotated[
        AdamOptions | MomentumOptions, Variants("optimiser", OPTIMISERS, "adam", flat=True)
    ] = AdamOptions()
    learning_rate: float = Field(default=1e-4, gt=0, description="a number above 0")
    warmup: int = count(DERIVED, least=0)
    decay: Annotated[
        PolynomialDecay | CosineDecay | EpochDecay | MilestoneDecay | ConstantDecay,
        Variants("decay", DECAYS, "polynomial", flat=True),
    ] = PolynomialDecay()
    rate_rule: Annotated[
        FixedRate | LinearRate | SquareRootRate,
        Variants("rate_rule", RATE_RULES, "none", flat=True),
    ] = FixedRate()
    larc: bool | Annotated[float, Field(gt=0)] = Field(
        default=False, description="true, false, or a trust coefficient above 0"
    )
    clip_norm: float = Field(default=1.0, ge=0, description="a number above 0, or 0 for none")
    weight_decay: float = Field(default=0.0, ge=0, description="a number of at least 0")
    calibrate: int = count(DERIVED, least=0)
    centre: bool = Field(default=True, description="true or false")
    seed: Seed = Field(default=0, description=A_SEED)
    start_from: AnyPath | None = Field(default=None, description="the folder of a training")
    steps: int = count(DERIVED)
    epochs: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    validate_every: int = count(200)
    patience: int | None = Field(
        default=None, ge=1, description="a whole number of validations, at least 1"
    )
    checkpoint_every: int = count(200)
    keep: int = count(3)

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of the schedule of the learning rate."""
        if self.by_epochs and self.epochs is None:
            missing = 'is missing: with decay = "epochs" it must be a whole number of at least 1'
            yield Problem("epochs", missing)
        if self.end_rate > self.base_rate:
            most = f"must be at most the rate before the decay, {self.base_rate:g}"
            yield Problem("end_rate", f"= {self.end_rate}: {most}")

    @property
    def by_epochs(self) -> bool:
        """Whether the schedule of the learning rate is in epochs."""
        return isinstance(self.decay, EpochDecay)

    @property
    def end_rate(self) -> float:
        """The learning rate at the end of a decay that has one, else 0."""
        return self.decay.end_rate if isinstance(self.decay, CosineDecay) else 0.0

    @property
    def base_rate(self) -> float:
        """The learning rate for this batch, after the warm-up."""
        rule = self.rate_rule
        return self.learning_rate * (self.batch / rule.reference_batch) ** rule.power

    @property
    def trust(self) -> float | None:
        """LARC's trust coefficient; None if LARC is off."""
        return SC18_TRUST if self.larc is True else self.larc or None

    @property
    def max_gradient_norm(self) -> float | None:
        """The norm to which longer gradients are scaled down; None if gradients are not scaled."""
        return self.clip_norm or None

    @property
    def centres(self) -> bool:
        """Whether the batch's mean is subtracted from the features; false for small batches."""
        return self.centre and self.calibrate > 0 and self.batch >= SMALLEST_CENTRED


TRAINING_DEFAULTS = TrainingOptions()
"""The defaults, which optimisers made in Python use as well."""
