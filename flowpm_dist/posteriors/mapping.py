"""Parameters of uniform priors, mapped to the whole line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from flowpm_dist.cosmology.uniform_priors import UniformPriors

EDGE = 1e-7
"""Share of a prior's width within which a value counts as that far from the edge: z = +-5.2."""


@dataclass(frozen=True)
class PriorMap:
    """The map of parameters t to z = Phi^-1((t - low) / (high - low)), with the normal Phi.

    The prior is a unit normal in z. No density in z has any probability outside the prior, and a
    parameter that the data say nothing about has the unit normal as its posterior.

    Attributes:
        priors: of the p parameters.
    """

    priors: UniformPriors

    def to_line(self, parameters: np.ndarray) -> np.ndarray:
        """Returns z, float64 [..., p].

        Args:
            parameters: [..., p] [physical units].

        Raises:
            ValueError: a value that is outside its prior, by more than float32 rounds it.
        """
        values, low, high = np.asarray(parameters, np.float64), self.priors.low, self.priors.high
        rounding = 1e-6 * np.maximum(np.abs(low), np.abs(high))
        outside = (values < low - rounding) | (values > high + rounding)
        if outside.any():
            place = int(np.argwhere(outside)[0][-1])
            name, worst = self.priors.names[place], values[outside][0]
            raise ValueError(
                f"{name} = {worst:g} is outside its prior, {low[place]:g} to {high[place]:g}"
            )
        return ndtri(np.clip((values - low) / (high - low), EDGE, 1 - EDGE))

    def from_line(self, z: np.ndarray) -> np.ndarray:
        """Returns the parameters of z, float64 [..., p] [physical units]."""
        return self.priors.low + (self.priors.high - self.priors.low) * ndtr(z)

    def log_jacobian(self, parameters: np.ndarray) -> np.ndarray:
        """Returns ln |dz / dt|, float64 [...]; added to ln q(z) it gives ln q(t)."""
        z = self.to_line(parameters)
        log_normal = -0.5 * z**2 - 0.5 * np.log(2 * np.pi)
        return -np.sum(log_normal + np.log(self.priors.high - self.priors.low), axis=-1)
