"""Numberings of the sites of a lattice by other codes. Nothing here imports TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Grid = tuple[int, int, int]
UNORDERED = 0.2
"""If the standard deviation of displacements is above this part of the box, or of the tile, the
particles do not number the lattice in this order. A random order gives 0.29 of the box."""


@dataclass(frozen=True)
class Numbering:
    """A numbering of the sites of a lattice: tile by tile, and in each tile site by site.

    The last axis of the tiles varies fastest. N-GenIC and 2LPTic repeat a small lattice, their
    glass file, in tiles; other codes have a single tile, or tiles of one site.

    Attributes:
        grid: sites along each side.
        tile: sites along each side of a tile.
        columns: whether the first axis varies fastest in a tile, and not the last one.
    """

    grid: Grid
    tile: Grid
    columns: bool

    def sites(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the sites of numbers from 0, [n, 3], from their numbers, [n]."""
        tiles = tuple(n // t for n, t in zip(self.grid, self.tile, strict=True))
        place, inner = np.divmod(numbers, math.prod(self.tile))
        shape = self.tile[::-1] if self.columns else self.tile
        within = np.unravel_index(inner, shape)
        within = within[::-1] if self.columns else within
        corners = np.unravel_index(place, tiles)
        return np.stack(
            [c * t + w for c, t, w in zip(corners, self.tile, within, strict=True)], axis=-1
        )


def numberings(grid: Grid) -> Iterator[Numbering]:
    """Yields the numberings that are known: by rows, by columns, and in cubic tiles of both."""
    yield Numbering(grid, (1, 1, 1), False)
    yield Numbering(grid, grid, True)
    smallest = min(grid)
    for side in range(2, smallest + 1):
        tile = (side, side, side)
        if not any(n % side for n in grid) and tile != grid:
            yield Numbering(grid, tile, False)
            yield Numbering(grid, tile, True)


def spreads(
    numbers: np.ndarray, positions: np.ndarray, box_size: tuple[float, float, float], grid: Grid
) -> np.ndarray:
    """Returns sums of displacements by each of `numberings`, [numbering, 7].

    Their sum over all ranks finds the right one, see `best_numbering`.

    Args:
        numbers: numbers of particles from 0, [n].
        positions: comoving positions [Mpc/h], [n, 3]. Those that are not finite do not count.
        box_size: sides of the box [Mpc/h].
        grid: sites along each side.

    Returns:
        The number of particles, the sums of their displacements from their sites along each axis
        [Mpc/h], and the sums of the squares, float64.
    """
    finite = np.isfinite(positions).all(axis=-1)
    numbers, x, side = numbers[finite], positions[finite].astype(np.float64), np.array(box_size)
    sums = []
    for numbering in numberings(grid):
        moved = x - numbering.sites(numbers) * (side / grid)
        moved -= side * np.rint(moved / side)  # to the nearest image
        sums.append([len(x), *moved.sum(axis=0), *(moved**2).sum(axis=0)])
    return np.array(sums, np.float64)


def best_numbering(
    sums: np.ndarray, box_size: tuple[float, float, float], grid: Grid
) -> tuple[Numbering | None, float]:
    """Returns the numbering with the smallest displacements, and their standard deviation [Mpc/h].

    It is None if these are not small compared with the box; or with the tile where there are
    several, because in a file whose particles are sorted into cells, most are near the tile of
    their number, and not near the site. A shift that all particles have in common does not count.

    Args:
        sums: see `spreads`, for all particles of which there are sums.
        box_size: sides of the box [Mpc/h].
        grid: sites along each side.
    """
    count = np.maximum(sums[:, :1], 1)
    mean, squares = sums[:, 1:4] / count, sums[:, 4:] / count
    part = np.sqrt(np.maximum(squares - mean**2, 0)) / box_size
    best = int(np.argmin(part.max(axis=-1)))
    numbering = [*numberings(grid)][best]
    tile = np.divide(numbering.tile, grid) if max(numbering.tile) > 1 else np.ones(3)
    fits = bool((part[best] <= UNORDERED * tile).all())
    return numbering if fits else None, float((part[best] * box_size).max())
