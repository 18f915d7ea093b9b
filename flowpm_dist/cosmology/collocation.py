"""Chebyshev series of a logarithm, and linear differential equations solved at their nodes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from flowpm_dist.cosmology.arrays import arccos, clip, cos, known, largest, log, solve, total

Solution = tuple[Any, Any, Any]
"""A function of the logarithm and its first two derivatives at the nodes, each [..., nodes]."""

_TAIL = 8  # coefficients


@dataclass(frozen=True)
class Collocation:
    """The constants of collocation at Chebyshev nodes in x, the logarithm of a number.

    Attributes:
        start: the smallest x.
        half: half the length of the interval of x.
        x: the nodes [nodes].
        integrate: [nodes, nodes], from values to values of the integral from the start.
        integrate_twice: [nodes, nodes], likewise.
        to_coefficients: [nodes, nodes], from values to coefficients of the series.
    """

    start: float
    half: float
    x: np.ndarray
    integrate: np.ndarray
    integrate_twice: np.ndarray
    to_coefficients: np.ndarray

    def angle(self, value: Any) -> Any:
        """Returns the angle whose cosines times whole numbers are the series' functions.

        Args:
            value: numbers, any shape; those outside the interval are taken to its ends.
        """
        t = (log(value) - self.start) / self.half - 1.0
        # Slightly inside the ends, where the derivative of arccos is infinite.
        return arccos(clip(t, -1.0 + 1e-15, 1.0 - 1e-15))

    def functions(self, value: Any) -> Any:
        """Returns the functions of the series at numbers [...], as [..., nodes]."""
        return cos(self.angle(value)[..., np.newaxis] * np.arange(len(self.x)))

    def solved(self, p: Any, q: Any, source: Any, start: Any, slope: Any) -> Solution:
        """Solves g'' + p g' + q g = source from g and g' at the start.

        Args:
            p: [nodes].
            q, source: [..., nodes].
            start, slope: g and g' at the start, numbers or [..., 1].
        """
        once, twice = self.integrate, self.integrate_twice
        line = start + slope * (self.x - self.start)
        matrix = np.eye(len(self.x)) + p[:, np.newaxis] * once + q[..., np.newaxis] * twice
        right = source - p * slope - q * line
        curvature = solve(matrix, right[..., np.newaxis])[..., 0]
        along = curvature[..., np.newaxis, :]
        return line + total(twice * along), slope + total(once * along), curvature


@functools.cache
def collocation(nodes: int, first: float, last: float) -> Collocation:
    """Returns the constants for logarithms of numbers from `first` to `last`."""
    start, stop = np.log(first), np.log(last)
    half = (stop - start) / 2
    t = -np.cos(np.pi * np.arange(nodes) / (nodes - 1))
    to_coefficients = np.linalg.inv(chebyshev.chebvander(t, nodes - 1))
    antiderivatives = chebyshev.chebint(np.eye(nodes), lbnd=-1)
    integrate = half * chebyshev.chebval(t, antiderivatives).T @ to_coefficients
    return Collocation(
        start=start,
        half=half,
        x=start + half * (t + 1),
        integrate=integrate,
        integrate_twice=integrate @ integrate,
        to_coefficients=to_coefficients,
    )


def tail(coefficients: Any) -> Any:
    """Returns the last coefficients over the largest one: a number, or a tensor in a graph.

    Args:
        coefficients: the coefficients of several series, [nodes, series].
    """
    numbers = known(coefficients)
    if numbers is None:
        return largest(largest(abs(coefficients[-_TAIL:]), 0) / largest(abs(coefficients), 0), 0)
    sizes = np.abs(numbers)
    return float((sizes[-_TAIL:].max(axis=0) / sizes.max(axis=0)).max())
