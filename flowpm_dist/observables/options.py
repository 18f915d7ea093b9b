"""The options of a forward model. Nothing here imports TensorFlow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from flowpm_dist.io.errors import UserError
from flowpm_dist.options import (
    AnyPath,
    Length,
    Options,
    Pair,
    checked_name,
    checked_python_name,
    limits,
    listed,
    nearest,
)

EULERIAN = ("b",)
"""Bias of the evolved density."""

LAGRANGIAN = ("b1", "b2", "bs2")
"""Bias of second order in the initial density."""

BIASES = (*EULERIAN, *LAGRANGIAN)

NUISANCE_AMPLITUDES = ("amplitude", "noise_amplitude")
"""Nuisance parameters that are 1 unless a prior lets them vary."""

A_BIAS = "a number from -20 to 20"

AN_AMPLITUDE = "a number above 0, at most 100"

StructureName = Literal["linear", "1lpt", "2lpt", "pm"]
STRUCTURE_NAMES: tuple[str, ...] = get_args(StructureName)
"""What forms structure, by cost."""


class ObservationError(UserError):
    """What is observed cannot be made as asked, or is not what something else is made for."""


def _structure(name: str) -> str:
    return checked_name(name, STRUCTURE_NAMES, "structure")


Structure = Annotated[str, AfterValidator(_structure)]
"""One of `STRUCTURE_NAMES`, or "package.module:object" of a `StructureFormation`."""


def _decreasing(redshifts: tuple[float, ...]) -> tuple[float, ...]:
    for before, after in itertools.pairwise(redshifts):
        if before <= after:
            raise ValueError(f"{after:g} follows {before:g}, which is not above it")
    return redshifts


Redshifts = Annotated[
    tuple[Annotated[float, Field(ge=0)], ...],
    Field(min_length=2),
    BeforeValidator(listed),
    AfterValidator(_decreasing),
]
"""Those of the channels of a volume, decreasing to that of the end of the simulation."""

LineOfSight = Literal["x", "y", "z"]
BiasValue = Annotated[float, Field(ge=-20, le=20)]
Amplitude = Annotated[float, Field(gt=0, le=100)]


class ForwardModelOptions(Options):
    """The options of the model from white noise to what is observed.

    Attributes:
        structure: what forms structure, by cost: "linear" (linear theory on the grid), "1lpt",
            "2lpt" or "pm" (the particle mesh); or a `StructureFormation` of a user's own.
        redshift_space: the line of sight, along which peculiar velocities move the particles.
        bias_scheme: the `Bias` of a user's own; by default that of the names in `bias`.
        bias: the value of each bias parameter; None for matter.
    """

    structure: Structure = Field(
        default="pm", description='"linear", "1lpt", "2lpt", "pm" or "package.module:object"'
    )
    redshift_space: LineOfSight | None = Field(
        default=None, description='the line of sight of redshift space: "x", "y" or "z"'
    )
    bias_scheme: Annotated[str, AfterValidator(checked_python_name)] | None = Field(
        default=None, description='"package.module:object" of a bias of your own'
    )
    bias: dict[str, BiasValue] | None = Field(
        default=None,
        description="a table such as {b = 1.5} or {b1 = 0.5, b2 = 0.1, bs2 = 0.0}, each "
        f"{A_BIAS}",
    )

    @field_validator("bias")
    @classmethod
    def _one_scheme(
        cls, bias: dict[str, float] | None, info: ValidationInfo
    ) -> dict[str, float] | None:
        if bias is None or info.data.get("bias_scheme") is not None:
            return bias
        for name in bias:
            if name not in BIASES:
                raise ValueError(f"there is no bias {name!r}{nearest(name, BIASES)}")
        if not bias or ("b" in bias and len(bias) > 1):
            raise ValueError("either b alone, or some of b1, b2, bs2")
        if "b" in bias and info.data.get("redshift_space") is not None:
            raise ValueError(
                "b multiplies the density that is seen, so in redshift space also the distortions "
                "by velocities, which tracers share with matter; give b1, which weighs particles, "
                f"with b1 = b - 1 = {bias['b'] - 1:g} for the same bias of large scales"
            )
        return bias

    @property
    def lpt_order(self) -> Literal[1, 2]:
        """The order of LPT that the simulation must have."""
        return 1 if self.structure == "1lpt" else 2


class ObservationOptions(ForwardModelOptions):
    """What a survey sees of a universe: the forward model, and the noise of what is observed.

    Run files of all jobs have them as their section [observation].

    Attributes:
        kind: a "density" with Gaussian noise, "counts", which are Poisson distributed, or
            "convergence", maps of weak lensing with the noise of shapes.
        sigma: the standard deviation of a cell's noise [mean density]; None: there is no noise.
        mean_count: the mean count of a cell of mean density.
        mask: the share of each cell that is observed.
        redshifts: at which one universe is seen, each as a channel of the volume; None: at the end
            of the simulation alone.
    """

    kind: Literal["density", "counts", "convergence"] = Field(
        default="density", description='"density", "counts" or "convergence"'
    )
    sigma: Length | AnyPath | None = Field(
        default=None,
        description="the standard deviation of a cell's noise in mean densities: a number above "
        "0, or a file of them shaped as box.grid",
    )
    mean_count: float | None = Field(
        default=None, gt=0, description="the mean count of a cell of mean density, above 0"
    )
    mask: AnyPath | None = Field(
        default=None,
        description="a file shaped as box.grid: from 1 where a cell is observed to 0 where not",
    )
    redshifts: Redshifts | None = Field(
        default=None,
        description="a list of two redshifts or more, decreasing to that of the end of the "
        "simulation, of at least 0",
    )

    @property
    def line_of_sight(self) -> LineOfSight | None:
        """The direction in which the survey looks; None where all are alike."""
        return "z" if self.kind == "convergence" else self.redshift_space

    @property
    def channels(self) -> int:
        """The number of values of a cell."""
        return 1 if self.redshifts is None else len(self.redshifts)

    def scale_factors(self, end: float) -> list[float]:
        """Returns those at which a universe is seen, increasing.

        Args:
            end: that at which its simulation ends, the last of them.
        """
        before = (self.redshifts or ())[:-1]
        return [*(1.0 / (1.0 + z) for z in before), end]

    @property
    def files(self) -> dict[str, Path]:
        """The files that are named, by key."""
        named = {key: getattr(self, key) for key in ("sigma", "mask")}
        return {key: path for key, path in named.items() if isinstance(path, Path)}

    @property
    def unobserved(self) -> float:
        """The value of a cell in which nothing is observed: a density of 1, or no count."""
        return 0.0 if self.kind == "counts" else 1.0

    @property
    def is_noisy(self) -> bool:
        """Whether what is seen differs from the density by chance."""
        return self.kind in ("counts", "convergence") or self.sigma is not None

    @property
    def is_positive(self) -> bool:
        """Whether what is seen is never below 0, up to rounding."""
        return self.kind == "counts" or (self.is_positive_without_noise and self.sigma is None)

    @property
    def is_positive_without_noise(self) -> bool:
        """Whether the density that is seen is never below 0 before noise is added."""
        of_particles = self.structure in ("1lpt", "2lpt", "pm") and self.bias is None
        return of_particles and self.kind != "convergence"

    @property
    def own_values(self) -> dict[str, float]:
        """The values of all nuisance parameters that have no prior, and of a mock's."""
        return {**dict.fromkeys(NUISANCE_AMPLITUDES, 1.0), **(self.bias or {})}


class NuisanceRanges(Options):
    """Uniform priors of what an observation depends on besides the cosmology.

    Parameters of a user's own `bias_scheme` have theirs under their own names.

    Attributes:
        b, b1, b2, bs2: bias.
        amplitude: what the density that is seen is multiplied by, before the noise.
        noise_amplitude: what the standard deviation of the noise of a density, or of the shapes
            in maps, is multiplied by.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Pair[BiasValue]]

    b: Pair[BiasValue] | None = limits(A_BIAS)
    b1: Pair[BiasValue] | None = limits(A_BIAS)
    b2: Pair[BiasValue] | None = limits(A_BIAS)
    bs2: Pair[BiasValue] | None = limits(A_BIAS)
    amplitude: Pair[Amplitude] | None = limits(AN_AMPLITUDE)
    noise_amplitude: Pair[Amplitude] | None = limits(AN_AMPLITUDE)
