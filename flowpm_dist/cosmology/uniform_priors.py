"""Uniform priors of parameters that are to be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


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
