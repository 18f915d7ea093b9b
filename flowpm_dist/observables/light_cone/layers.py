"""Copies of a box one behind the other on the flat sky, and the layers of their particles."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box


@dataclass(frozen=True)
class Tile:
    """A copy of the periodic box: shifted, flipped, and with its axes in another order.

    Attributes:
        axes: axes of the box along x and y of the map and along the line of sight.
        senses: 1 or -1 for each of them, where it runs the other way.
        shifts: shifts of the box in x and y [Mpc/h].
        first_layer: number of the lattice layer that is nearest to the observer.
        begin: the distance at which it begins [Mpc/h].
    """

    axes: tuple[int, ...]
    senses: tuple[int, ...]
    shifts: tuple[float, ...]
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
        first_layer = int(generator.integers(box.grid[axes[2]]))
        yield Tile(axes, tuple(senses.tolist()), tuple(shifts.tolist()), first_layer, begin)
        begin += box.size[axes[2]]


@dataclass(frozen=True)
class Layers:
    """All layers of particles on a light cone, from the observer on.

    Attributes:
        tiles: the tiles of the cone.
        tile, index: the number of each layer's tile, and its own number along the box's axis.
        distances: the distances of their undisplaced particles, float64 [layers] [Mpc/h].
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
        copies = tuple(tiles(box, end, seed))
        tile, index, distances, depths = [], [], [], []
        for number, each in enumerate(copies):
            axis, sense = each.axes[2], each.senses[2]
            n, depth = box.grid[axis], box.size[axis] / box.grid[axis]
            distance = each.begin + (np.arange(n) + 0.5) * depth
            near = distance < end
            tile.append(np.full(near.sum(), number))
            index.append(((each.first_layer + sense * np.arange(n)) % n)[near])
            distances.append(distance[near])
            depths.append(np.full(near.sum(), depth))
        return cls(copies, *map(np.concatenate, (tile, index, distances, depths)))

    @property
    def edges(self) -> np.ndarray:
        """The distances between which the layers lie, float64 [layers + 1] [Mpc/h]."""
        return np.concatenate([[0.0], self.distances + 0.5 * self.depths])


@dataclass(frozen=True)
class LayerCrossing:
    """Layers that cross the light cone after one kick, the same layers in several universes.

    Attributes:
        universes: numbers of the universes on this rank.
        layers: whether each layer is among them, bool [layers + 1]; the last one stands for all
            that are farther. A tensor where a graph has yet to compute it.
    """

    universes: np.ndarray
    layers: np.ndarray | tf.Tensor


@dataclass(frozen=True)
class RankLayers:
    """Layers of this rank's particles, and where they are on the sky.

    Attributes:
        times: numbers of the layers, in the order of `places`, at whose times the particles cross
            the light cone: the first number for particles behind the observer, and the last one for
            farther particles.
        distances: distances of their undisplaced places, float64 [layers] [Mpc/h].
        places, directions: see `Slabs`; x are the rows of a map.
    """

    times: Any
    distances: Any
    places: Any
    directions: Any


class LayersInView:
    """Chooses this rank's layers of a crossing, and layers whose particles may enter a copy.

    A copy of the box holds the matter of the periodic box between its ends. So particles that are
    displaced out of it are left out, and particles of the layers before and behind that are
    displaced into it are included.

    Args:
        layers: the layers of the light cone.
        box: the box.
        end: comoving distance of z_max [Mpc/h], a number or a tensor.
        stop: a distance beyond which no copy begins [Mpc/h].
        seed: see `tiles`.
    """

    def __init__(self, layers: Layers, box: Box, end: Any, stop: float, seed: int) -> None:
        self._layers, self._box, self._end, self._stop, self._seed = layers, box, end, stop, seed
        self._count, self._step = len(layers.distances), float(layers.depths[0])
        self._most = 2 * max(box.grid) + 3

    def of(self, crossing: LayerCrossing, reach: float) -> RankLayers:
        """Returns the layers of a crossing; those that follow one another are one slab.

        Args:
            crossing: the crossing.
            reach: displacement along an axis that no particle exceeds [Mpc/h].
        """
        count, more = self._count, math.ceil(reach / self._step) + 3
        numbers: list[int] = []
        places, directions = [], []
        for tile, layers, index in self._tiles(more):
            here = crossing.layers[np.clip(layers, 0, count)] & (layers <= count + more)
            layers, index, sense = layers[here], index[here], tile.senses[2]
            # Layers that follow one another on this rank.
            apart = np.flatnonzero(np.diff(index - sense * layers)) + 1
            for run in filter(len, np.split(np.arange(len(layers)), apart)):
                run = run[::sense]
                places.append([*_axes(tile), index[run[0]], len(run), len(numbers)])
                directions.append(self._directions(tile))
                numbers += layers[run].tolist()
        times = np.array(numbers, int)
        return RankLayers(
            np.clip(times, 0, count),
            (times + 0.5) * self._step,
            np.array(places, np.int32).reshape(-1, 6),
            np.array(directions, float).reshape(-1, 7),
        )

    def in_graph(self, crossing: LayerCrossing, reach: tf.Tensor) -> RankLayers:
        """Returns the same layers, each as a slab, chosen when a graph runs."""
        every, first, sides = self._every
        count, more = self._count, tf.cast(tf.math.ceil(reach / self._step), tf.int32) + 3
        far = "light cone: particles may be displaced by more than two boxes; call run eagerly"
        tf.debugging.Assert(more <= self._most, [far])
        near = tf.reduce_sum(tf.cast(self._layers.distances < self._end, tf.int32))
        numbers, inside = every.times, every.times - first
        times = tf.where(numbers >= near, count, tf.maximum(numbers, 0))
        # The others cannot be seen: it saves the time to look.
        here = tf.gather(crossing.layers, times) & (numbers <= near + more)
        here &= (inside >= -more) & (inside < sides + more)
        rows = tf.where(here)[:, 0]
        in_order = tf.range(tf.shape(rows)[0])[:, tf.newaxis]
        return RankLayers(
            tf.gather(times, rows),
            tf.gather(every.distances, rows),
            tf.concat([tf.gather(every.places[:, :5], rows), in_order], 1),
            tf.gather(every.directions, rows),
        )

    @functools.cached_property
    def _every(self) -> tuple[RankLayers, np.ndarray, np.ndarray]:
        """All layers of this rank whose particles may enter a copy, each as a slab.

        Their times are their numbers. Also the number of the first layer of the copy of each, and
        the number of the copy's layers.
        """
        numbers, places, directions, first, sides = [], [], [], [], []
        for tile, layers, index in self._tiles(self._most):
            numbers += layers.tolist()
            places += [[*_axes(tile), at, 1, 0] for at in index]
            directions += [self._directions(tile)] * len(layers)
            first += [round(tile.begin / self._step)] * len(layers)
            sides += [self._box.grid[tile.axes[2]]] * len(layers)
        times = np.array(numbers, np.int32)
        distances = (times + 0.5) * self._step
        every = RankLayers(times, distances, np.array(places, np.int32), np.array(directions))
        return every, np.array(first, np.int32), np.array(sides, np.int32)

    def _tiles(self, more: int) -> Iterator[tuple[Tile, np.ndarray, np.ndarray]]:
        """Yields the copies of the box with this rank's layers of them, and more around them.

        Args:
            more: the number of layers before and behind.

        Yields:
            A copy; the numbers of layers; and their places among this rank's along the axis.
        """
        box = self._box
        for tile in tiles(box, self._stop, self._seed):
            axis = tile.axes[2]
            layers = np.arange(-more, box.grid[axis] + more)
            index = (tile.first_layer + tile.senses[2] * layers) % box.grid[axis] - box.offset[axis]
            here = (index >= 0) & (index < box.block[axis])
            yield tile, layers[here] + round(tile.begin / self._step), index[here]

    def _directions(self, tile: Tile) -> list[float]:
        """Returns a row of `Slabs.directions`."""
        box, senses = self._box, tile.senses
        x, y = (
            tile.shifts[i] + senses[i] * box.offset[axis] * box.cell[axis]
            for i, axis in enumerate(tile.axes[:2])
        )
        # All that is in front of us is in the first copy.
        ends = tile.begin or -np.inf, tile.begin + box.size[tile.axes[2]]
        return [y, senses[1], x, senses[0], senses[2], *ends]


def _axes(tile: Tile) -> tuple[int, int, int]:
    """Returns the axes of the box along y and x of the maps, and along the distance."""
    return tile.axes[1], tile.axes[0], tile.axes[2]
