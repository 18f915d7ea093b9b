"""The flat sky: layers of the particle lattice, one behind the other, on square maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.observers import Measured, Moment
from flowpm_dist.grid.box import Box
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.light_cone.geometry import (
    AmountsOf,
    Geometry,
    Painting,
    Particles,
    pieces,
    placed,
    reaching,
)
from flowpm_dist.observables.light_cone.options import FlatField, plane_of_layers
from flowpm_dist.particle_mesh.kernels import Slabs
from flowpm_dist.simulation.run import Inputs


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
        layers: numbers of the layers, in order; the last number stands for all that are farther.
    """

    universes: np.ndarray
    layers: np.ndarray


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

    times: np.ndarray
    distances: np.ndarray
    places: np.ndarray
    directions: np.ndarray


class FlatGeometry(Geometry):
    """Copies of the box one behind the other, each turned in its own way, on the flat sky.

    A particle crosses the light cone at the time of its layer of the lattice.

    Args:
        sky: the field.
        inputs: the run's inputs.

    Raises:
        ValueError: as `Geometry`; or no particle is as near as z_max.
    """

    sky: FlatField

    def __init__(self, sky: FlatField, inputs: Inputs) -> None:
        super().__init__(sky, inputs)
        self.layers = layers = Layers.of(self.box, self.end, sky.tiles)
        if not len(layers.distances):
            axis = layers.tiles[0].axes[2]
            nearest = 0.5 * self.box.size[axis] / self.box.grid[axis]
            raise ValueError(
                f"z_max = {sky.z_max:g} is at {self.end:.4g} Mpc/h, and the nearest particles at "
                f"{nearest:.4g}: increase z_max, or use a finer grid"
            )
        self.check_latest(layers.distances[0])
        self.step = self.depth = float(layers.depths[0])

    def _times(self, theory: Theory) -> tf.Tensor:
        """Returns the scale factors at which light leaves layers, then farther ones [layer + 1]."""
        chi = np.append(self.layers.distances, self.end)
        a = theory.distances.scale_factor(chi)
        return tf.maximum(a, self.sky.earliest)

    def slab_edges(self, width: np.ndarray) -> np.ndarray:
        """Returns the edges of slabs, each with the whole number of layers nearest to the width."""
        layers = self.layers
        numbers = plane_of_layers(len(layers.distances), float(layers.depths[0]), float(width))
        ends = np.append(np.flatnonzero(np.diff(numbers)), len(numbers) - 1)
        return np.append(0.0, layers.edges[ends + 1])

    def slabs(self, edges: np.ndarray) -> tuple[LensPlanes, np.ndarray]:
        """Returns the slabs as lens planes; each particle counts 1 / f_K^2."""
        return LensPlanes(edges), self.particles_in_pixel * np.diff(edges)

    @override
    def widening(self, theory: Theory) -> tf.Tensor:
        """Returns f_K / chi at `nodes` [node]: a particle is seen at its place across over f_K."""
        chi = self.nodes().chi
        return theory.distances.transverse(chi) / chi

    @override
    def painting(self, edges: np.ndarray | None, amounts_of: AmountsOf | None) -> Painting:
        self.paint_between(edges, 2 if amounts_of is None else 1)
        theories = self.inputs.cosmologies.theories
        self._curved = not all(theory.background.is_flat for theory in theories)
        one = tf.ones([2, 1], tf.float64)

        def of_theory(theory: Theory) -> tuple[tuple[int, ...], tf.Tensor, tf.Tensor]:
            a = self._times(theory)
            with reaching(a[-1]):
                kicks, factors = self.integrator.since_kick(theory.growth, self.steps, a)
            if not self._curved:
                return kicks, factors, one if amounts_of is None else amounts_of(theory)
            wide = self.widening(theory)[:, tf.newaxis]
            amounts = wide**-2 if amounts_of is None else amounts_of(theory)
            return kicks, factors, tf.concat([amounts, wide], 1)

        of_universes = self.inputs.cosmologies.of_growths(of_theory)
        inputs = (
            tf.stack([f for _, f, _ in of_universes]),
            tf.stack([w for _, _, w in of_universes]),
        )
        return inputs, _crossings([kicks for kicks, _, _ in of_universes])

    @override
    def paint(
        self, crossing: LayerCrossing, moment: Moment, inputs: Sequence[tf.Tensor]
    ) -> Measured:
        factors, amounts = (tf.gather(x, crossing.universes) for x in inputs)
        factors = factors[..., 1 : 2 + len(moment.lpt)]
        factors = tf.concat([tf.ones_like(factors[..., :1]), factors], -1)
        largest = np.abs(factors.numpy()[:, crossing.layers]).max((0, 1))
        reach = self.reach(moment.moving, largest)
        layers = self._rank_layers(crossing, reach)
        near, far = (crossing.layers[[0, -1]] + 0.5) * self.step
        first, shells = self.shells(near, far, reach)
        slabs = Slabs(
            places=layers.places,
            directions=layers.directions,
            distances=layers.distances,
            pixel=self.sky.fov / self.sky.pixels,
            pixels=self.sky.pixels,
            curved=self._curved,
            **shells,
        )
        moved = tf.gather(factors, layers.times, axis=1)
        others = (tf.cast(x, self.box.dtype) for x in (moved, amounts))
        return self.painted("paint_sky", slabs, moment, crossing.universes, others, first)

    def _rank_layers(self, crossing: LayerCrossing, reach: float) -> RankLayers:
        """Returns this rank's layers of a crossing, and layers whose particles may enter a copy.

        A copy of the box holds the matter of the periodic box between its ends. So particles that
        are displaced out of it are left out, and particles of the layers before and behind that are
        displaced into it are included.

        Args:
            crossing: the crossing.
            reach: displacement along an axis that no particle exceeds [Mpc/h].
        """
        box, step, count = self.box, self.step, len(self.layers.distances)
        more = math.ceil(reach / step) + 3
        first, last = int(crossing.layers[0]), int(crossing.layers[-1])
        first -= more if first == 0 else 0
        last += more if last == count else 0
        numbers: list[int] = []
        places, directions = [], []
        stop = max(self.end, self._edges[-1])
        for tile in tiles(box, stop, self.sky.tiles):
            axes, senses, axis = tile.axes, tile.senses, tile.axes[2]
            n, begin, end = box.grid[axis], tile.begin, tile.begin + box.size[axis]
            origins = [
                tile.shifts[i] + senses[i] * box.offset[axes[i]] * box.cell[axes[i]] for i in (0, 1)
            ]
            layers = np.arange(-more, n + more)
            index = (tile.first_layer + senses[2] * layers) % n - box.offset[axis]
            layers += round(begin / step)
            here = (index >= 0) & (index < box.block[axis]) & (layers >= first) & (layers <= last)
            layers, index = layers[here], index[here]
            # Layers that follow one another on this rank.
            apart = np.flatnonzero(np.diff(index - senses[2] * layers)) + 1
            for run in filter(len, np.split(np.arange(len(layers)), apart)):
                run = run[:: senses[2]]
                places.append([axes[1], axes[0], axis, index[run[0]], len(run), len(numbers)])
                ends = begin or -np.inf, end  # all that is in front of us is in the first copy
                directions.append([origins[1], senses[1], origins[0], senses[0], senses[2], *ends])
                numbers += layers[run].tolist()
        times = np.array(numbers, int)
        return RankLayers(
            np.clip(times, 0, count),
            (times + 0.5) * step,
            np.array(places, np.int32).reshape(-1, 6),
            np.array(directions, float).reshape(-1, 7),
        )

    @override
    def recording(self) -> dict[int, list[LayerCrossing]]:
        theory = self._theory = self.inputs.cosmologies.theories[0]
        self._a = a = self._times(theory).numpy()
        with reaching(a[-1]):
            interpolation = self.integrator.interpolation(theory.growth, self.steps, a.tolist())
        # Factors of the velocities before and after the kick, and of the LPT fields.
        self._moved, velocities = np.moveaxis(interpolation.factors.numpy(), 1, 0)
        # a dx/dt is the canonical velocity over a.
        self._speed = velocities * (HUBBLE / a)[:, np.newaxis]
        self.paint_between(np.array([0.0, self.end]), 0)
        return _crossings([interpolation.kicks])

    @override
    def record(
        self, crossing: LayerCrossing, displacement: np.ndarray, fields: list[np.ndarray]
    ) -> Iterator[Particles]:
        largest = np.abs(self._moved[crossing.layers, : len(fields)]).max(0)
        slabs = self._rank_layers(
            crossing, self.reach([displacement, *fields], np.append(1.0, largest))
        )
        for place, directions in zip(slabs.places, slabs.directions, strict=True):
            for i in range(place[4]):
                of_layer = (*(slice(None),) * int(place[2]), place[3] + i)
                planes = [field[of_layer] for field in (displacement, *fields)]
                layer, distance = slabs.times[place[5] + i], slabs.distances[place[5] + i]
                for piece in pieces((*planes[0].shape[:2], 1)):
                    parts = [plane[piece] for plane in planes]
                    yield from self._piece(layer, distance, place, directions, piece, parts)

    def _piece(
        self,
        layer: int,
        undisplaced: float,
        place: np.ndarray,
        directions: np.ndarray,
        piece: tuple[slice, slice],
        planes: list[np.ndarray],
    ) -> Iterator[Particles]:
        """Yields the observed particles of a piece of a plane, image by image.

        Args:
            layer: number of the layer at whose time the piece crosses the light cone.
            undisplaced: its distance [Mpc/h].
            place, directions: place and directions of its slab, see `RankLayers`.
            piece: its place in the plane, whose axes are in the order of the box.
            planes: its displacements, velocities and LPT fields [., ., 3].
        """
        # Columns of maps are y and rows x: so are the first two of a slab's axes.
        axes = int(place[1]), int(place[0]), int(place[2])
        senses = directions[3], directions[1], directions[4]
        origins = directions[2], directions[0]
        displacement, *others = planes
        moved, speed = (
            sum(c * plane for c, plane in zip(factors[layer], others, strict=False))
            for factors in (self._moved, self._speed)
        )
        moved = placed(displacement + moved, self.box.size)
        distance = undisplaced + senses[2] * moved[..., axes[2]]
        across = []
        for axis, sense, origin in zip(axes, senses, origins, strict=False):
            first = axis == min(axes[:2])
            begin, count = piece[0 if first else 1].start, displacement.shape[0 if first else 1]
            lattice = (begin + np.arange(count)) * self.box.cell[axis]
            lattice = lattice[:, np.newaxis] if first else lattice[np.newaxis]
            length = self.box.size[axis]
            x = origin + sense * (lattice + moved[..., axis])
            across.append((x - length * np.rint(x / length), length))
        lost = ~np.isfinite(distance + across[0][0] + across[1][0])
        length = self._theory.distances.transverse(np.where(lost, 0.0, distance))
        reach = 0.5 * self.sky.fov * length.numpy()
        velocity = np.stack([s * speed[..., a] for a, s in zip(axes, senses, strict=True)], -1)
        shifts = [
            range(-n, n + 1)
            for n in (int(np.ceil(max(reach.max() / length - 0.5, 0))) for _, length in across)
        ]
        for j, k in itertools.product(*shifts):
            x, y = (c + m * length for (c, length), m in zip(across, (j, k), strict=True))
            near, far = max(directions[5], 0.0), min(directions[6], self.end)
            in_range = (distance >= near) & (distance < far) & (distance > 0)
            inside = (np.abs(x) <= reach) & (np.abs(y) <= reach) & in_range | lost
            positions = np.stack([x, y, distance], axis=-1)[inside]
            yield positions, velocity[inside], np.full(len(positions), self._a[layer])


def _crossings(kicks: Sequence[tuple[int, ...]]) -> dict[int, list[LayerCrossing]]:
    """Returns, for each kick, the layers that cross the light cone after it.

    Args:
        kicks: the kick before each layer's time, for each universe of this rank.
    """
    crossings: dict[int, list[LayerCrossing]] = {}
    for each in dict.fromkeys(kicks):
        same = np.flatnonzero([each == others for others in kicks])
        for kick in sorted(set(each)):
            crossing = LayerCrossing(same, np.flatnonzero(np.array(each) == kick))
            crossings.setdefault(kick, []).append(crossing)
    return crossings
