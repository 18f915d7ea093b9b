"""The options of an observation: one model for each kind.

A new kind is a subclass of `ObservationOptions` in `OBSERVATIONS`: run files of
reconstructions and trainings then have it as `observation.kind`, with its keys, its rules and its
forward model. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
)
from typing_extensions import override

from flowpm_dist.catalogues.options import (
    A_CONCENTRATION,
    A_LOG_MASS,
    HOD,
    MOST_SATELLITES,
    Concentration,
    FinderOptions,
    LogMass,
)
from flowpm_dist.cosmology.options import KEYS
from flowpm_dist.cosmology.parameters import VARIABLE
from flowpm_dist.observables.tracers import (
    A_BIAS,
    A_LINE_OF_SIGHT,
    BIASES,
    BiasValue,
    LineOfSight,
    ObservationError,
    Structure,
    TracerOptions,
)
from flowpm_dist.options import (
    AnyPath,
    Length,
    Options,
    Pair,
    Problem,
    Unit,
    Variants,
    limits,
    listed,
    nearest,
    problems_of,
    table_of,
)

if TYPE_CHECKING:
    from flowpm_dist.observables.universe_model import UniverseModel
    from flowpm_dist.simulation.simulation import Simulation

NUISANCE_AMPLITUDES = ("amplitude", "noise_amplitude")
"""Nuisance parameters that are 1 unless a prior lets them vary."""

AN_AMPLITUDE = "a number above 0, at most 100"

UNEVOLVED = ("linear", "1lpt", "2lpt")
"""Models of structure without time steps: they are known at any time."""

SAME_VALUE = 1e-6
"""Values with a smaller relative difference are equal."""


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
"""Redshifts of the channels of a volume, decreasing to the end of the simulation."""

Amplitude = Annotated[float, Field(gt=0, le=100)]


class ObservationOptions(Options):
    """The observation of a universe by a survey: a forward model and its noise.

    This is the base of all kinds. Run files of all jobs have one of them as [observation].

    Attributes:
        kind: the name of the kind.
        structure: the model of structure formation: "linear" (linear theory on the grid), "1lpt",
            "2lpt" or "pm" (the particle mesh), in the order of their cost; or a custom
            `StructureFormation`.
    """

    kind: str
    structure: Structure = "pm"

    layout: ClassVar[Literal["cells", "maps"]] = "cells"
    """Whether cells of the box are observed, or maps of the sky."""
    likelihood: ClassVar[str] = "Gaussian"
    """The name of the likelihood in `flowpm_dist.reconstruction`."""
    unobserved: ClassVar[float] = 1.0
    """The value where nothing is observed."""
    own_input: ClassVar[str | None] = None
    """The input that a network needs for this kind; None for the input for densities."""
    has_gradient: ClassVar[bool] = True
    """Whether the observed values can be differentiated."""
    tracer_key: ClassVar[str] = "bias"
    """The key that says how tracers follow matter."""

    def value(self, key: str) -> Any:
        """Returns the value of a key; None if this kind does not have it."""
        return getattr(self, key, None)

    @property
    def lpt_order(self) -> Literal[1, 2]:
        """The order of LPT that the simulation must have."""
        return 1 if self.structure == "1lpt" else 2

    @property
    def line_of_sight(self) -> LineOfSight | None:
        """The line of sight; None if all directions are equivalent."""
        axis: LineOfSight | None = self.value("redshift_space")
        return axis

    @property
    def channels(self) -> int:
        """The number of values of a cell."""
        return len(self.scale_factors(1.0))

    def scale_factors(self, end: float) -> list[float]:
        """Returns the scale factors of the observations, increasing to the last, `end`."""
        before = (self.value("redshifts") or ())[:-1]
        return [*(1.0 / (1.0 + z) for z in before), end]

    @property
    def files(self) -> dict[str, Path]:
        """The files in this section, by key."""
        return {key: value for key, value in self if isinstance(value, Path)}

    @property
    def is_noisy(self) -> bool:
        """Whether the observed values have random noise."""
        return True

    @property
    def is_positive(self) -> bool:
        """Whether observed values are never below 0, up to rounding."""
        return False

    @property
    def mean(self) -> float | None:
        """The mean that observed values have on average; None where it is not known before."""
        return self.value("mean_count") or 1.0

    @property
    def network_input(self) -> str:
        """The default of `NetworkOptions.input` for a network on these data."""
        return self.own_input or ("log1p" if self.is_positive else "asinh")

    @property
    def own_values(self) -> dict[str, float]:
        """The values of the nuisance parameters in a mock, or if they have no prior."""
        return dict.fromkeys(NUISANCE_AMPLITUDES, 1.0) | self.tracer_values

    @property
    def tracer_values(self) -> dict[str, Any]:
        """The parameters by which tracers follow matter; empty for matter."""
        return dict(self.value(self.tracer_key) or {})

    def forward_model(self, simulation: Simulation, light_cone: Any = None) -> UniverseModel:
        """Returns the model from white noise to the observed values.

        Args:
            simulation: the simulation of one universe.
            light_cone: the options of the light cone of maps.

        Raises:
            ObservationError: a custom object that cannot be used, or a simulation that does not
                fit the structure.
        """
        raise NotImplementedError

    def lacks(self, name: str) -> str | None:
        """Returns why a nuisance parameter cannot have a prior; None if it can."""
        raise NotImplementedError

    def prior_problems(
        self, priors: Collection[str], likelihood: str | None = None
    ) -> Iterator[Problem]:
        """Yields the problems of nuisance parameters with a prior.

        Args:
            priors: the names in [priors] that are no parameters of the cosmology.
            likelihood: the name of a custom likelihood, which may have more of them.
        """
        for name in priors:
            of_likelihood = likelihood is not None and name not in (*BIASES, "amplitude")
            if not of_likelihood and (message := self.lacks(name)) is not None:
                yield Problem(f"priors.{name}", message)

    def step_problems(
        self, first: float | None, last: float | None, *, uses_lpt: bool
    ) -> Iterator[Problem]:
        """Yields the problems of the observation with the steps of a simulation.

        Args:
            first, last: the first and the last scale factor.
            uses_lpt: whether the integrator follows LPT of order 2.
        """
        if self.structure == "1lpt" and uses_lpt:
            message = "follows LPT of order 2, but structure 1lpt makes no steps: use fastpm"
            yield Problem("evolution.integrator", message)

    def light_cone_problems(self, light_cone: Any) -> Iterator[Problem]:
        """Yields a problem if there is a section [lightcone], which this kind does not use."""
        if light_cone is not None:
            message = f'is given, but observation.kind = "{self.kind}": must be "convergence", or '
            yield Problem("lightcone", f"{message}leave it out")


class VolumeOptions(ObservationOptions):
    """An observation of the box, at one redshift or at several.

    Attributes:
        kind, structure: see `ObservationOptions`.
        redshifts: the redshifts at which a universe is observed; each is a channel of the volume.
            None for the end of the simulation only.
    """

    redshifts: Annotated[Redshifts | None, Unit("redshift")] = Field(
        default=None,
        description="a list of two redshifts or more, of at least 0, decreasing to the end of "
        "the simulation",
    )

    @override
    def step_problems(
        self, first: float | None, last: float | None, *, uses_lpt: bool
    ) -> Iterator[Problem]:
        yield from super().step_problems(first, last, uses_lpt=uses_lpt)
        if self.redshifts is None or last is None:
            return
        key, redshifts, end = "observation.redshifts", list(self.redshifts), 1.0 / last - 1.0
        if abs(redshifts[-1] - end) > SAME_VALUE * (1.0 + end):
            message = f"= {redshifts}: the last must be the redshift at the end of the simulation"
            yield Problem(key, f"{message}, {end:g}")
        if self.structure not in UNEVOLVED and first and 1.0 / (1.0 + redshifts[0]) < first:
            yield Problem(key, f"= {redshifts}: the steps begin at redshift {1.0 / first - 1.0:g}")


class CellOptions(TracerOptions, VolumeOptions):
    """An observation of the cells of the box: a density of matter or of tracers.

    Attributes:
        kind, structure, redshifts: see `VolumeOptions`.
        redshift_space, bias_scheme, bias: see `TracerOptions`.
        mask: the share of each cell that is observed.
    """

    mask: AnyPath | None = Field(
        default=None,
        description="a file shaped as box.grid: from 1 where a cell is observed to 0 where not",
    )

    @override
    def forward_model(self, simulation: Simulation, light_cone: Any = None) -> UniverseModel:
        from flowpm_dist.observables.forward_model import ForwardModel

        how = {key: getattr(self, key) for key in ("redshift_space", "bias", "bias_scheme")}
        try:
            return ForwardModel(simulation, self.structure, **how)
        except ValueError as error:
            raise ObservationError(f"[observation]: {error}") from error

    @override
    def lacks(self, name: str) -> str | None:
        if name == "amplitude" or name in (self.bias or {}):
            return None
        if name == "noise_amplitude":
            return None if self.value("sigma") is not None else lacking("observation", "sigma")
        if name in BIASES or self.bias_scheme is not None:
            return lacking("observation.bias", name)
        return _no_parameter(name, NuisanceRanges.model_fields)


class DensityOptions(CellOptions):
    """A density of mean 1, with Gaussian noise.

    Attributes:
        sigma: the standard deviation of a cell's noise [mean density]; None: there is no noise.
    """

    kind: Literal["density"] = "density"
    sigma: Length | AnyPath | None = Field(
        default=None,
        description="the standard deviation of a cell's noise in mean densities: a number above "
        "0, or a file of them shaped as box.grid",
    )

    @property
    @override
    def is_noisy(self) -> bool:
        return self.sigma is not None

    @property
    @override
    def is_positive(self) -> bool:
        return self.is_positive_without_noise and self.sigma is None


class CountsOptions(CellOptions):
    """Counts of tracers, which are Poisson distributed.

    Attributes:
        mean_count: the mean count of a cell of mean density.
    """

    kind: Literal["counts"] = "counts"
    mean_count: float = Field(gt=0, description="the mean count of a cell of mean density, above 0")

    likelihood = "Poisson"
    unobserved = 0.0
    own_input = "log1p-counts"

    @property
    @override
    def is_positive(self) -> bool:
        return True


class GalaxyOptions(VolumeOptions):
    """Counts of galaxies in the halos of a universe, painted by cloud in cell [galaxies per cell].

    Halos are found and populated in each universe, and its seed draws the galaxies. There is no
    gradient.

    Attributes:
        kind, structure, redshifts: see `VolumeOptions`.
        redshift_space: the line of sight, along which peculiar velocities move the galaxies.
        halos: the options of the halo finder.
        galaxies: the halo occupation. Its seed is added to the seed of each universe.
    """

    kind: Literal["galaxies"] = "galaxies"
    redshift_space: LineOfSight | None = Field(default=None, description=A_LINE_OF_SIGHT)
    halos: Annotated[FinderOptions, table_of(FinderOptions)] = Field(
        default=FinderOptions(), description="a table such as { minimum = 20 }"
    )
    galaxies: Annotated[HOD, table_of(HOD)] = Field(
        default=HOD(), description="a table such as { log_M_min = 12.8 }"
    )

    unobserved = 0.0
    own_input = "log1p-counts"
    has_gradient = False
    tracer_key = "galaxies"

    @override
    def problems(self) -> Iterator[Problem]:
        if self.structure == "linear":
            message = "linear theory on the grid has no particles; take pm, 1lpt or 2lpt"
            yield self.problem("structure", message)
        if self.halos.members:
            yield Problem("halos.members", "= true: galaxies do not use them: leave it out")
        if self.halos.overdensities and "200m" not in self.halos.overdensities:
            message = "galaxies use 200m alone: give it, or leave it out"
            yield Problem("halos.overdensities", f"= {list(self.halos.overdensities)}: {message}")

    @property
    @override
    def is_noisy(self) -> bool:
        return False  # the occupation draws

    @property
    @override
    def is_positive(self) -> bool:
        return True

    @property
    @override
    def mean(self) -> float | None:
        return None

    @property
    @override
    def tracer_values(self) -> dict[str, Any]:
        return self.galaxies.model_dump(exclude={"seed"}, exclude_none=True)

    @override
    def forward_model(self, simulation: Simulation, light_cone: Any = None) -> UniverseModel:
        from flowpm_dist.observables.galaxies import GalaxyModel

        try:
            return GalaxyModel(
                simulation, self.structure, self.halos, self.galaxies, self.redshift_space
            )
        except ValueError as error:
            raise ObservationError(f"[observation]: {error}") from error

    @override
    def lacks(self, name: str) -> str | None:
        value = self.tracer_values.get(name)
        if isinstance(value, float):
            return None
        if value is not None:
            return lacking("observation.galaxies", f"number {name}")
        numbers = [name for name, x in self.tracer_values.items() if isinstance(x, float)]
        return _no_parameter(name, numbers)

    @override
    def prior_problems(
        self, priors: Collection[str], likelihood: str | None = None
    ) -> Iterator[Problem]:
        yield from super().prior_problems(priors, likelihood)
        ranges = priors if isinstance(priors, Mapping) else {}
        least, most = (
            ranges.get(name, (getattr(self.galaxies, name),) * 2)[end]
            for name, end in (("log_M_1", 0), ("alpha", 1))
        )
        if most * (HEAVIEST - least) > math.log10(MOST_SATELLITES):
            name = next((name for name in ("log_M_1", "alpha") if name in ranges), None)
            reason = f"log_M_1 = {least:g} and alpha = {most:g} give a halo of 1e{HEAVIEST} Msun/h"
            key = "observation.galaxies" if name is None else f"priors.{name}"
            yield Problem(key, f"{reason} more than {MOST_SATELLITES} satellites")


class ConvergenceMapOptions(ObservationOptions):
    """Maps of weak lensing on the light cone of the particle mesh, with shape noise."""

    kind: Literal["convergence"] = "convergence"
    layout = "maps"
    likelihood = "GaussianMaps"
    own_input = "convergence"

    @override
    def problems(self) -> Iterator[Problem]:
        if self.structure != "pm":
            message = 'a light cone needs the steps of the particle mesh; must be "pm"'
            yield self.problem("structure", message)

    @property
    @override
    def line_of_sight(self) -> LineOfSight | None:
        return "z"

    @override
    def forward_model(self, simulation: Simulation, light_cone: Any = None) -> UniverseModel:
        from flowpm_dist.observables.convergence_model import ConvergenceModel

        return ConvergenceModel.of(simulation, light_cone)

    @override
    def lacks(self, name: str) -> str | None:
        if name == "noise_amplitude":
            return None
        if name == "amplitude":
            return "is given, but maps have no amplitude of a density"
        if name in BIASES:
            return "is given, but maps of weak lensing have no bias: leave it out"
        return _no_parameter(name, ("noise_amplitude",))

    def light_cone_problems(self, light_cone: Any) -> Iterator[Problem]:
        """Yields a problem unless there is a light cone with the noise of shapes."""
        if light_cone is None:
            message = 'is missing: with kind = "convergence" it describes the maps, as for simulate'
            yield Problem("lightcone", message)
        elif light_cone.shape_noise is None:
            allowed = type(light_cone).model_fields["shape_noise"].description
            yield Problem("lightcone.shape_noise", f"is missing: must be {allowed}")


OBSERVATIONS: dict[str, type[ObservationOptions]] = {
    "density": DensityOptions,
    "counts": CountsOptions,
    "galaxies": GalaxyOptions,
    "convergence": ConvergenceMapOptions,
}
"""The kinds of observations by name."""

Observation = Annotated[
    SerializeAsAny[ObservationOptions], Variants("kind", OBSERVATIONS, default="density")
]
"""The section [observation]; its kind determines its keys."""


def lacking(section: str, name: str, instead_of: str | None = None) -> str:
    """Returns the problem of a prior whose parameter has no value in its section."""
    how = f"in the place of {instead_of}" if instead_of else "too"
    message = f"is given, but {section} has no {name}: give it there, {how}: the mock's value, or "
    return f"{message}the expected one"


def _no_parameter(name: str, nuisances: Iterable[str]) -> str:
    """Returns the problem of a prior with an unknown name."""
    known = [*VARIABLE, *nuisances]
    of_cosmology = name in (*KEYS, "transfer")
    hint = "; it belongs in [cosmology]" if of_cosmology else nearest(name, known)
    return f"is not a parameter{hint} (parameters: {', '.join(known)})"


class ObservationSection(Options):
    """A table with only the section [observation]."""

    observation: Observation


def observation_of(keys: Mapping[str, Any]) -> ObservationOptions:
    """Returns the observation with the keys of a section [observation].

    Raises:
        ValueError: there is no such observation; the message says what is wrong with each key.
    """
    table = {"observation": dict(keys)}
    try:
        return ObservationSection.model_validate(table).observation
    except ValidationError as error:
        problems = problems_of(ObservationSection, table, error)
        raise ValueError("; ".join(map(str, problems))) from None


class NuisanceRanges(Options):
    """Uniform priors of the nuisance parameters of an observation.

    Parameters of a custom `bias_scheme` have priors under their own names.

    Attributes:
        b, b1, b2, bs2: bias.
        amplitude: factor of the observed density, before the noise is added.
        noise_amplitude: factor of the standard deviation of the noise of a density, or of the shape
            noise of maps.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Pair[BiasValue]]

    b: Pair[BiasValue] | None = limits(A_BIAS)
    b1: Pair[BiasValue] | None = limits(A_BIAS)
    b2: Pair[BiasValue] | None = limits(A_BIAS)
    bs2: Pair[BiasValue] | None = limits(A_BIAS)
    amplitude: Pair[Amplitude] | None = limits(AN_AMPLITUDE)
    noise_amplitude: Pair[Amplitude] | None = limits(AN_AMPLITUDE)


HEAVIEST = 16
"""log of a mass that halos hardly reach [Msun/h]."""
Slope = Annotated[float, Field(ge=0, le=10)]
A_SLOPE = "a number from 0 to 10"


class OccupationRanges(Options):
    """Uniform priors of the halo occupation of galaxies, see `HOD`."""

    log_M_min: Pair[LogMass] | None = limits(A_LOG_MASS)
    sigma_log_M: Pair[Length] | None = limits("a number above 0")
    log_M_0: Pair[LogMass] | None = limits(A_LOG_MASS)
    log_M_1: Pair[LogMass] | None = limits(A_LOG_MASS)
    alpha: Pair[Slope] | None = limits(A_SLOPE)
    concentration: Pair[Concentration] | None = limits(A_CONCENTRATION)
