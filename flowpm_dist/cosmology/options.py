"""Cosmological parameters and time steps as options of a run file: their ranges, uniform priors.

TensorFlow is imported only when steps are equal in the growth factor, so that run files are checked
quickly.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.options import Options, Pair, Problem, constructed, in_unit, limits, listed

if TYPE_CHECKING:
    from flowpm_dist.cosmology.parameters import Cosmology


@dataclass(frozen=True)
class ParameterRange:
    """The values that a parameter may have.

    Attributes:
        what: the range in words, as in "must be ...".
        limits: the limits by the names of their comparisons: gt, ge, lt or le.
    """

    what: str
    limits: dict[str, Any]

    def holds(self, value: float) -> bool:
        """Returns whether a value lies in the range."""
        return all(getattr(operator, name)(value, end) for name, end in self.limits.items())


RANGES = {
    "Omega_m": ParameterRange("a number from 0.005 to 1", dict(ge=0.005, le=1)),
    "Omega_b": ParameterRange("a number of at least 0, below Omega_m", dict(ge=0, lt=1)),
    "h": ParameterRange("H0 / (100 km/s/Mpc), above 0.1, below 3", dict(gt=0.1, lt=3)),
    "n_s": ParameterRange("a number above 0, below 3", dict(gt=0, lt=3)),
    "A_s": ParameterRange("a number above 0, below 1e-6, such as 2.1e-9", dict(gt=0, lt=1e-6)),
    "sigma8": ParameterRange("a number above 0, below 10", dict(gt=0, lt=10)),
    "w0": ParameterRange("a number from -3 to below 0", dict(ge=-3, lt=0)),
    "wa": ParameterRange("a number from -5 to below 5", dict(ge=-5, lt=5)),
    "T_cmb": ParameterRange("a temperature in kelvin, above 0 and below 100", dict(gt=0, lt=100)),
    "k_pivot": ParameterRange("a wavenumber in 1/Mpc, above 0", dict(gt=0, lt=math.inf)),
}
"""The range of each parameter by its name, see `Cosmology`.

The ranges of Omega_m, w0 and wa are such that growth functions are resolved (`growth.Growth`).
"""

PARAMETER_UNITS = {"T_cmb": "K", "k_pivot": "1/Mpc"}
"""The units of the parameters that have one, see `options.UNITS`."""

Transfer = Literal["eisenstein-hu", "camb"]
"""Where the transfer function comes from."""

SHAPE = ("Omega_m", "Omega_b", "h", "n_s", "w0", "wa", "T_cmb", "k_pivot")
"""The parameters that determine the shape of the spectrum: all but the amplitude."""

VARIABLE = ("Omega_m", "Omega_b", "h", "n_s", "sigma8", "w0", "wa")
"""Parameters that may vary between the universes of a training."""

T_CMB, K_PIVOT = 2.7255, 0.05
"""Temperature of the microwave background today [K], and pivot wavenumber [1/Mpc], unless given."""

A_MAX = 2.0
"""Largest scale factor [1] of growth functions and steps."""

LATEST_DARK_ENERGY = -0.2
"""Upper limit of w0 + wa: dark energy must be negligible early for the normalisation D1 -> a."""


def _shown(values: tuple[float, ...]) -> str:
    return str(list(values) if len(values) > 1 else values[0])


def universe_problems(
    cosmology: PartialCosmologyOptions, priors: ParameterRanges | None = None
) -> Iterator[Problem]:
    """Yields problems between the parameters of a run file, fixed or anywhere in their priors.

    Args:
        cosmology: the section [cosmology].
        priors: the section [priors], if there is one.
    """

    def given(name: str) -> tuple[str, tuple[float, ...]]:
        if (ends := getattr(priors, name, None)) is not None:
            return f"priors.{name}", ends
        value = getattr(cosmology, name)
        return f"cosmology.{name}", () if value is None else (value,)

    (_, matter), (where, baryons) = given("Omega_m"), given("Omega_b")
    if matter and baryons and max(baryons) >= min(matter):
        what = f"= {_shown(baryons)}: must be below Omega_m = {_shown(matter)}"
        yield Problem(where, what)
    if baryons and min(baryons) == 0 and cosmology.transfer == "camb":
        what = f'= {_shown(baryons)}: transfer = "camb" needs baryons, above 0'
        yield Problem(where, f'{what}; or use transfer = "eisenstein-hu"')
    (_, w0), (where, wa) = given("w0"), given("wa")
    if w0 and wa and not dark_energy_fades(max(w0), max(wa)):
        what = f"= {_shown(wa)}: w0 + wa must be at most {LATEST_DARK_ENERGY}, or dark energy would"
        yield Problem(where, f"{what} matter early")


def dark_energy_fades(w0: float, wa: float) -> bool:
    """Returns whether w0 + wa is low enough, up to rounding of the sum."""
    return w0 + wa <= LATEST_DARK_ENERGY + 1e-12


OmegaM = Annotated[float, Field(**RANGES["Omega_m"].limits)]
OmegaB = Annotated[float, Field(**RANGES["Omega_b"].limits)]
Hubble = Annotated[float, Field(**RANGES["h"].limits)]
Tilt = Annotated[float, Field(**RANGES["n_s"].limits)]
PrimordialAmplitude = Annotated[float, Field(**RANGES["A_s"].limits)]
Sigma8 = Annotated[float, Field(**RANGES["sigma8"].limits)]
W0 = Annotated[float, Field(**RANGES["w0"].limits)]
Wa = Annotated[float, Field(**RANGES["wa"].limits)]


def _value(name: str, *default: Any) -> Any:
    return Field(*default, description=RANGES[name].what)


class PartialCosmologyOptions(Options):
    """Parameters that the flat universes of a training share, with dark energy w0 + wa (1 - a)."""

    Omega_m: OmegaM | None = _value("Omega_m", None)
    Omega_b: OmegaB | None = _value("Omega_b", None)
    h: Hubble | None = _value("h", None)
    n_s: Tilt | None = _value("n_s", None)
    A_s: PrimordialAmplitude | None = _value("A_s", None)
    sigma8: Sigma8 | None = _value("sigma8", None)
    w0: W0 = _value("w0", -1.0)
    wa: Wa = _value("wa", 0.0)
    transfer: Transfer = Field(default="eisenstein-hu", description='"eisenstein-hu" or "camb"')


class CosmologyOptions(PartialCosmologyOptions):
    """A flat universe of cold dark matter, baryons and dark energy w0 + wa (1 - a)."""

    Omega_m: OmegaM = _value("Omega_m")
    Omega_b: OmegaB = _value("Omega_b")
    h: Hubble = _value("h")
    n_s: Tilt = _value("n_s")

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        yield from self.exactly_one("A_s", "sigma8")


class ParameterRanges(Options):
    """The lowest and the highest value of each parameter that varies or is fitted."""

    Omega_m: Pair[OmegaM] | None = limits(RANGES["Omega_m"].what)
    Omega_b: Pair[OmegaB] | None = limits(RANGES["Omega_b"].what)
    h: Pair[Hubble] | None = limits(RANGES["h"].what)
    n_s: Pair[Tilt] | None = limits(RANGES["n_s"].what)
    sigma8: Pair[Sigma8] | None = limits(RANGES["sigma8"].what)
    w0: Pair[W0] | None = limits(RANGES["w0"].what)
    wa: Pair[Wa] | None = limits(RANGES["wa"].what)


@dataclass(frozen=True)
class UniformPriors:
    """Uniform priors of some parameters.

    Attributes:
        ranges: name of a parameter -> (low, high), in the order of the parameters.

    Raises:
        ValueError: the ends of a range are not in order.
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        units = PARAMETER_UNITS
        plain = {n: in_unit(n, ends, units.get(n, "")) for n, ends in self.ranges.items()}
        object.__setattr__(self, "ranges", plain)
        for name, (low, high) in self.ranges.items():
            if not low < high:
                raise ValueError(f"the prior of {name} from {low} to {high}: low must be below")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self.ranges)

    @property
    def low(self) -> np.ndarray:
        """The lower ends of the ranges, float64 [parameter]."""
        return np.array([low for low, _ in self.ranges.values()], np.float64)

    @property
    def high(self) -> np.ndarray:
        """The upper ends of the ranges, float64 [parameter]."""
        return np.array([high for _, high in self.ranges.values()], np.float64)

    @property
    def centre(self) -> np.ndarray:
        """The means of the priors, float64 [parameter]."""
        return 0.5 * (self.low + self.high)


SAME = 1e-9
"""Relative difference below which two scale factors are the same."""


def _increasing(edges: tuple[float, ...]) -> tuple[float, ...]:
    for before, after in itertools.pairwise(edges):
        if after <= before:
            raise ValueError(f"{before:g} is followed by {after:g}")
    return edges


ScaleFactor = Annotated[float, Field(ge=0, le=A_MAX)]
Edges = Annotated[
    tuple[ScaleFactor, ...],
    Field(min_length=2),
    BeforeValidator(listed),
    AfterValidator(_increasing),
]


MOST_STEPS = 100_000


class StepOptions(Options):
    """The steps of a run: `steps` of them between two scale factors, or their `edges`.

    Attributes:
        a_start, a_stop: the scale factors at which the first step begins and the last one ends [1].
        steps: the number of steps.
        spacing: the quantity in which steps are equal: "a", "log a" or "D" (the growth factor).
        edges: the scale factors at which steps begin and end [1]; they replace all other options.
    """

    a_start: float = Field(
        default=0.1, ge=0, lt=A_MAX, description="a scale factor from 0, below 2"
    )
    a_stop: float = Field(
        default=1.0, gt=0, le=A_MAX, description="a scale factor above 0, at most 2"
    )
    steps: int = Field(default=10, ge=1, description="a whole number of at least 1")
    spacing: Literal["a", "log a", "D"] = Field(
        default="a", description='what the steps are equal in: "a", "log a" or "D"'
    )
    edges: Edges | None = Field(
        default=None, description="a list of two or more increasing scale factors from 0 to 2"
    )

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        if self.steps > MOST_STEPS:
            yield self.problem("steps", f"must be at most {MOST_STEPS}")
        if self.edges is None and self.a_start >= self.a_stop:
            yield self.problem("a_start", f"must be below a_stop = {self.a_stop}")
        elif self.edges is None and self.a_start == 0 and self.spacing == "log a":
            yield self.problem("spacing", "must start later than a_start = 0")

    def idle(self) -> dict[str, str]:
        """See `Options.idle`."""
        equal = ("a_start", "a_stop", "steps", "spacing")
        return dict.fromkeys(equal if self.edges else (), "equal steps, not with edges")

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return self.steps if self.edges is None else len(self.edges) - 1

    @property
    def first(self) -> float:
        """The scale factor of the start [1]."""
        return self.edges[0] if self.edges else self.a_start

    @property
    def last(self) -> float:
        """The scale factor of the end [1]."""
        return self.edges[-1] if self.edges else self.a_stop

    def edges_of(self, cosmology: Cosmology) -> np.ndarray:
        """Returns the scale factors at which steps begin and end, float64 [step_count + 1].

        Args:
            cosmology: the cosmology whose growth factor is used by steps equal in "D".
        """
        if self.edges is not None:
            return np.asarray(self.edges, dtype=np.float64)
        if self.spacing == "a":
            return scale_factor_steps(self.a_start, self.a_stop, self.steps)
        if self.spacing == "log a":
            return logarithmic_steps(self.a_start, self.a_stop, self.steps)
        return growth_steps(cosmology, self.a_start, self.a_stop, self.steps)


def _checked(a_start: float, a_stop: float, steps: int, spacing: str) -> StepOptions:
    given = {"a_start": a_start, "a_stop": a_stop, "steps": steps, "spacing": spacing}
    return constructed(StepOptions, given)


def scale_factor_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Returns the edges of `steps` steps equal in the scale factor [1], float64 [steps + 1].

    Raises:
        ValueError: `StepOptions` does not allow these values.
    """
    given = _checked(a_start, a_stop, steps, "a")
    return np.linspace(given.a_start, given.a_stop, given.steps + 1)


def logarithmic_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Returns the edges of `steps` steps equal in log a [1], float64 [steps + 1].

    Raises:
        ValueError: `StepOptions` does not allow these values.
    """
    given = _checked(a_start, a_stop, steps, "log a")
    edges = np.geomspace(given.a_start, given.a_stop, given.steps + 1)
    edges[[0, -1]] = given.a_start, given.a_stop
    return edges


def growth_steps(cosmology: Cosmology, a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Returns the edges of `steps` steps equal in a cosmology's D1(a) [1], float64 [steps + 1].

    The edges are scale factors. They are constants for gradients with respect to the cosmology.

    Raises:
        ValueError: `StepOptions` does not allow these values.
    """
    from flowpm_dist.cosmology.growth import Growth

    given = _checked(a_start, a_stop, steps, "D")
    a_start, a_stop, steps = given.a_start, given.a_stop, given.steps
    growth = Growth(cosmology)
    first, last = (float(growth.d1(a)) for a in (a_start, a_stop))
    wanted = np.linspace(first, last, steps + 1)[1:-1]
    low, high = np.full(steps - 1, a_start), np.full(steps - 1, a_stop)
    for _ in range(60 if steps > 1 else 0):
        middle = 0.5 * (low + high)
        below = growth.d1(middle).numpy() < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.concatenate([[a_start], 0.5 * (low + high), [a_stop]])
