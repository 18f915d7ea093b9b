"""Cosmological parameters: their ranges, the options of a run file, and uniform priors.

Nothing here imports TensorFlow, so that run files are checked quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from flowpm_dist.options import Options, Pair, Problem, limits


@dataclass(frozen=True)
class ParameterRange:
    """The values that a parameter may have.

    Attributes:
        what: the range in words, as in "must be ...".
        above, least, below, most: limits; `above` and `below` are not themselves allowed.
    """

    what: str
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None

    @property
    def field(self) -> Any:
        """The same limits for a pydantic field."""
        return Field(gt=self.above, ge=self.least, lt=self.below, le=self.most)

    def holds(self, value: float) -> bool:
        """Returns whether a value lies in the range."""
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )


RANGES = {
    "Omega_m": ParameterRange("a number from 0.005 to 1", least=0.005, most=1),
    "Omega_b": ParameterRange("a number of at least 0, below Omega_m", least=0, below=1),
    "h": ParameterRange("H0 / (100 km/s/Mpc), above 0.1, below 3", above=0.1, below=3),
    "n_s": ParameterRange("a number above 0, below 3", above=0, below=3),
    "A_s": ParameterRange("a number above 0, below 1e-6, such as 2.1e-9", above=0, below=1e-6),
    "sigma8": ParameterRange("a number above 0, below 10", above=0, below=10),
    "w0": ParameterRange("a number from -3 to below 0", least=-3, below=0),
    "wa": ParameterRange("a number from -5 to below 5", least=-5, below=5),
    "T_cmb": ParameterRange("a temperature in kelvin, above 0 and below 100", above=0, below=100),
    "k_pivot": ParameterRange("a wavenumber in 1/Mpc, above 0", above=0, below=math.inf),
}
"""The range of each parameter by its name, see `Cosmology`.

The ranges of Omega_m, w0 and wa are such that growth functions are resolved (`growth.Growth`).
"""

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


OmegaM = Annotated[float, RANGES["Omega_m"].field]
OmegaB = Annotated[float, RANGES["Omega_b"].field]
Hubble = Annotated[float, RANGES["h"].field]
Tilt = Annotated[float, RANGES["n_s"].field]
PrimordialAmplitude = Annotated[float, RANGES["A_s"].field]
Sigma8 = Annotated[float, RANGES["sigma8"].field]
W0 = Annotated[float, RANGES["w0"].field]
Wa = Annotated[float, RANGES["wa"].field]


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
