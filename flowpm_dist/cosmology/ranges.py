"""The range of each cosmological parameter, defined here only.

Nothing here imports TensorFlow, so that run files can be checked quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field


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

Within those of Omega_m, w0 and wa growth functions are resolved, see `growth.Growth`.
"""

Transfer = Literal["eisenstein-hu", "camb"]
"""Where the transfer function comes from."""

VARIABLE = ("Omega_m", "Omega_b", "h", "n_s", "sigma8", "w0", "wa")
"""Parameters that may differ from universe to universe of a training."""

T_CMB, K_PIVOT = 2.7255, 0.05
"""Temperature of the microwave background today [K], and pivot wavenumber [1/Mpc], unless given."""

A_MAX = 2.0
"""Largest scale factor [1] of growth functions and steps."""

LATEST_DARK_ENERGY = -0.2
"""Upper limit of w0 + wa: dark energy must be negligible early for the normalisation D1 -> a."""


def dark_energy_fades(w0: float, wa: float) -> bool:
    """Returns whether w0 + wa is low enough, up to rounding of the sum."""
    return w0 + wa <= LATEST_DARK_ENERGY + 1e-12
