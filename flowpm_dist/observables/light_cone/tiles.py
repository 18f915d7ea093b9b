"""The boxes that a light cone goes through, one behind the other, each turned in its own way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowpm_dist.grid.box import Box


@dataclass(frozen=True)
class Tile:
    """A copy of the periodic box: shifted, flipped, and with its axes in another order.

    Attributes:
        axes: axes of the box along x and y of the map and along the line of sight.
        senses: 1 or -1 for each of them, where it runs the other way.
        shifts: shifts of the box in x and y [Mpc/h].
        first_layer: number of the lattice layer that is nearest to the observer.
        begin: where it begins [Mpc/h].
    """

    axes: tuple[int, int, int]
    senses: tuple[int, int, int]
    shifts: tuple[float, float]
    first_layer: int
    begin: float


def tiles(box: Box, end: float, seed: int) -> Iterator[Tile]:
    """Yields the boxes from the observer to a distance, the same on every rank.

    The axes are put in any order that leaves the box unchanged: all six for a cube.

    Args:
        box: grid and size.
        end: comoving distance [Mpc/h].
        seed: seed of the shifts, flips and orders, not below 0.
    """
    kinds = [(n, float(size)) for n, size in zip(box.grid, box.size, strict=True)]
    orders = [p for p in itertools.permutations(range(3)) if [kinds[i] for i in p] == kinds]
    begin = 0.0
    for number in itertools.count():
        if begin >= end:
            return
        generator = np.random.Generator(np.random.Philox(key=[seed, number]))
        axes = orders[generator.integers(len(orders))]
        senses = 2 * generator.integers(2, size=3) - 1
        shifts = generator.random(2) * [box.size[axes[0]], box.size[axes[1]]]
        yield Tile(
            axes=(axes[0], axes[1], axes[2]),
            senses=(int(senses[0]), int(senses[1]), int(senses[2])),
            shifts=(float(shifts[0]), float(shifts[1])),
            first_layer=int(generator.integers(box.grid[axes[2]])),
            begin=begin,
        )
        begin += box.size[axes[2]]


@dataclass(frozen=True)
class Layers:
    """All layers of particles on a light cone, from the observer on.

    Attributes:
        tiles: the tiles of the cone.
        tile, index: the number of each layer's tile, and its own number along the box's axis.
        distances: of their undisplaced particles, float64 [layers] [Mpc/h].
        depths: their depths, float64 [layers] [Mpc/h].
    """

    tiles: tuple[Tile, ...]
    tile: np.ndarray
    index: np.ndarray
    distances: np.ndarray
    depths: np.ndarray

    @classmethod
    def of(cls, box: Box, end: float, seed: int) -> Layers:
        """Returns the layers up to a distance; arguments as for `tiles`."""
        found = tuple(tiles(box, end, seed))
        tile, index, distances, depths = [], [], [], []
        for number, each in enumerate(found):
            axis, sense = each.axes[2], each.senses[2]
            n, depth = box.grid[axis], cls.depth_of(box, each)
            distance = each.begin + (np.arange(n) + 0.5) * depth
            near = distance < end
            tile.append(np.full(near.sum(), number))
            index.append(((each.first_layer + sense * np.arange(n)) % n)[near])
            distances.append(distance[near])
            depths.append(np.full(near.sum(), depth))
        return cls(found, *map(np.concatenate, (tile, index, distances, depths)))

    @staticmethod
    def depth_of(box: Box, tile: Tile) -> float:
        """Returns the depth of a layer of a tile [Mpc/h]."""
        return box.size[tile.axes[2]] / box.grid[tile.axes[2]]

    @property
    def edges(self) -> np.ndarray:
        """The distances between which the layers lie, float64 [layers + 1] [Mpc/h]."""
        return np.concatenate([[0.0], self.distances + 0.5 * self.depths])
