"""The sphere in HEALPix pixels, in the order of their rings, and bilinear weights between them.

Gorski and others 2005 (astro-ph/0409513); weights as in `healpy.get_interp_weights`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = 8192
"""nside whose pixels have numbers of 32 bits."""


@dataclass(frozen=True)
class Corners:
    """The four pixels around each direction, and the angles that determine their weights.

    They are two neighbours in the ring above, towards the north, and two in that below. A pole is
    a ring of its own, whose value is the mean of the four pixels next to it.

    Attributes:
        pixels: above, then below, int64 [4, ...].
        theta: colatitudes of the two rings [2, ...] [rad].
        per_angle: pixels for each angle along the two rings [2, ...] [1/rad]; 0 of a pole.
        first: where their first pixels lie along them [2, ...] [pixels].
        poles: 1 where the ring above, or the one below, is a pole, otherwise 0 [2, ...].
    """

    pixels: np.ndarray
    theta: np.ndarray
    per_angle: np.ndarray
    first: np.ndarray
    poles: np.ndarray

    def weights(self, theta: Any, phi: Any) -> list[Any]:
        """Returns the weights of the four pixels, arrays or tensors [...] like the angles.

        Args:
            theta, phi: colatitudes and longitudes of the directions [rad].
        """
        lower = (theta - self.theta[0]) / (self.theta[1] - self.theta[0])
        above, below = (phi * self.per_angle[i] - self.first[i] for i in (0, 1))
        north, south = self.poles
        polar = 0.25 * ((1.0 - lower) * north + lower * south)
        upper, lower = (1.0 - lower) * (1.0 - north), lower * (1.0 - south)
        return [
            upper * (1.0 - above) + polar,
            upper * above + polar,
            lower * (1.0 - below) + polar,
            lower * below + polar,
        ]


@dataclass(frozen=True)
class Healpix:
    """The pixels of a sphere.

    Attributes:
        nside: resolution, a power of two.

    Raises:
        ValueError: it is none.
    """

    nside: int

    def __post_init__(self) -> None:
        if not 1 <= self.nside <= LARGEST or self.nside & (self.nside - 1):
            raise ValueError(f"a power of two up to {LARGEST} is needed")

    @property
    def pixels(self) -> int:
        """The number of pixels."""
        return 12 * self.nside**2

    @property
    def pixel_area(self) -> float:
        """The solid angle of a pixel [sr]."""
        return 4 * math.pi / self.pixels

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The number of pixels in each ring, int64 [4 nside + 1]; poles are the first and last."""
        ring = np.arange(4 * self.nside + 1)
        return 4 * np.minimum(np.minimum(ring, 4 * self.nside - ring), self.nside)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The number of the first pixel of each ring, int64 [4 nside + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]])

    @functools.cached_property
    def theta(self) -> np.ndarray:
        """The colatitude of each ring, from 0 to pi [4 nside + 1] [rad]."""
        n = self.nside
        ring = np.arange(2 * n + 1)
        cap = 2 * np.arcsin(np.minimum(ring, n) / (n * math.sqrt(6)))
        belt = np.arccos((2 * n - np.maximum(ring, n)) / (1.5 * n))
        north = np.where(ring < n, cap, belt)
        return np.concatenate([north, math.pi - north[-2::-1]])

    @functools.cached_property
    def shifts(self) -> np.ndarray:
        """Where the first pixel of each ring lies along it [4 nside + 1] [pixels]: 0 or 1/2."""
        n = self.nside
        ring = np.arange(4 * n + 1)
        from_pole = np.minimum(ring, 4 * n - ring)
        return np.where((from_pole < n) | ((from_pole - n) % 2 == 0), 0.5, 0.0)

    @functools.cached_property
    def painted_areas(self) -> np.ndarray:
        """The integral of each pixel's bilinear weight over the sphere, [pixels] [sr].

        They are the solid angles in which bilinear painting counts particles. Most are within
        1 / (4 nside) of `pixel_area`; the eight pixels at the poles have a sixth more.
        """
        theta = self.theta
        width = np.diff(theta)
        # Of the linear weight of the lower, and of the upper, of two rings between them.
        cosine, slope = np.cos(theta), np.diff(np.sin(theta)) / width
        to_lower, to_upper = slope - cosine[1:], cosine[:-1] - slope
        bands = to_lower[:-1] + to_upper[1:]  # of the rings without the poles
        bands[0] += to_upper[0]
        bands[-1] += to_lower[-1]
        inner = self.counts[1:-1]
        return np.repeat(2 * math.pi * bands / inner, inner)

    def corners(self, theta: np.ndarray, phi: np.ndarray) -> Corners:
        """Returns the pixels between which directions lie.

        Args:
            theta, phi: colatitudes from 0 to pi and longitudes [...] [rad], float64.
        """
        last = 4 * self.nside
        upper = np.clip(np.searchsorted(self.theta, theta, side="right") - 1, 0, last - 1)
        rings = np.stack([upper, upper + 1])
        poles = np.stack([upper == 0, upper + 1 == last])
        counts = self.counts[rings]
        per_angle = counts / (2 * math.pi)
        along = np.floor(phi * per_angle - self.shifts[rings]).astype(np.int64)
        first = np.where(poles, 0.0, along + self.shifts[rings])
        pairs = self.starts[rings] + np.stack([along, along + 1]) % np.maximum(counts, 1)
        # [of a pair, above or below, ...]; at a pole the two that lie opposite the others.
        (a0, b0), (a1, b1) = pairs
        south = self.pixels - 4
        a0, a1 = (np.where(poles[0], (b + 2) % 4, a) for a, b in ((a0, b0), (a1, b1)))
        b0, b1 = (np.where(poles[1], (a + 2) % 4 + south, b) for a, b in ((a0, b0), (a1, b1)))
        return Corners(
            np.stack([a0, a1, b0, b1]), self.theta[rings], per_angle, first, poles.astype(float)
        )

    def interpolated(self, values: np.ndarray, theta: np.ndarray, phi: np.ndarray) -> np.ndarray:
        """Returns a map [pixels] at directions [...] [rad], bilinearly."""
        corners = self.corners(theta, phi)
        weights = corners.weights(theta, phi)
        return sum(w * values[p] for w, p in zip(weights, corners.pixels, strict=True))
