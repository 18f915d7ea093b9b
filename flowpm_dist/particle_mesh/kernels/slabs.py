"""Layers of the particle lattice that are seen on the sky."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Slabs:
    """Slabs of this rank's particles, each of several layers one behind the other, and the maps.

    A slab has an axis of the box along the line of sight; the other two are x and y of the maps.
    Distances are comoving [Mpc/h], angles small, the sky flat. Images of a particle in the
    periodic box are seen wherever they lie on a map.

    Attributes:
        places: int32 [slabs, 6]: the axes of x, of y and of the distance; the first of this rank's
            layers along the latter, and their number; the number of the first one among `layers`.
        directions: float64 [slabs, 5]: where this rank's first particle lies in x, seen from the
            line of sight [Mpc/h], and 1 or -1 for the sense of the axis; likewise in y; the sense
            of the distance.
        distances: of each layer, float64 [layers].
        first_map: the number of the map of each layer's first weight, int32 [layers].
        spacing, lengths: of the particles, and of the box, along its axes [Mpc/h].
        pixel: side of a pixel [rad].
        pixels: of a map along each side.
        maps: their number.
    """

    places: np.ndarray
    directions: np.ndarray
    distances: np.ndarray
    first_map: np.ndarray
    spacing: tuple[float, float, float]
    lengths: tuple[float, float, float]
    pixel: float
    pixels: int
    maps: int
