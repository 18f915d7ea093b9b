"""The particle lattice about an observer who sees the whole sky."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DEGREE = 3
"""Of the polynomials that factors are, along the distance."""


@dataclass(frozen=True, eq=False)
class Ball:
    """Copies of this rank's particles about an observer, and maps of the whole sky.

    Distances are comoving [Mpc/h]. A copy of a particle is seen if its undisplaced place lies
    between the first and the last of the edges.

    Attributes:
        copies: of the box: by how many boxes each lies away along the axes, int32 [copies, 3].
        edges: between which the segments of the distance lie, increasing, float64 [segments + 1].
        first_map: the number of the map of each segment's first weight, int32 [segments].
        first: the numbers of this rank's first particle along the axes of the whole lattice.
        spacing, lengths: of the particles, and of the box, along its axes.
        observer: place in the box.
        step: distance between the nodes at which the amounts are given, from 0 on.
        per_distance: whether an amount is divided by the distance of the particle.
        nside: of the maps, in HEALPix's order of rings.
        maps: their number.
    """

    copies: np.ndarray
    edges: np.ndarray
    first_map: np.ndarray
    first: tuple[int, int, int]
    spacing: tuple[float, float, float]
    lengths: tuple[float, float, float]
    observer: tuple[float, float, float]
    step: float
    per_distance: bool
    nside: int
    maps: int

    @property
    def numbers(self) -> np.ndarray:
        """Spacing, lengths, observer and step, float64 [10]."""
        return np.array([*self.spacing, *self.lengths, *self.observer, self.step])
