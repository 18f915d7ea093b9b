"""The flat sky: layers of the particle lattice, one behind the other, on square maps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.arrays import joined, known, minimum, reshape
from flowpm_dist.cosmology.background import HUBBLE_DISTANCE
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.observers import Measured, Moment
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.light_cone.geometry import (
    BEHIND,
    AmountsOf,
    Geometry,
    Painting,
    Particles,
    check_that,
    pieces,
    placed,
    reaching,
)
from flowpm_dist.observables.light_cone.layers import LayerCrossing, Layers, LayersInView
from flowpm_dist.observables.light_cone.options import FlatField, plane_of_layers
from flowpm_dist.options import Problem
from flowpm_dist.particle_mesh.kernels import Slabs
from flowpm_dist.simulation.run import Inputs

FARTHEST = 1.5 * HUBBLE_DISTANCE
"""Distance of light [Mpc/h] over its redshift that a graph expects at most: c / H0 if E > 1."""


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
        self.layers = layers = Layers.of(self.box, self.most, sky.tiles)
        axis = layers.tiles[0].axes[2]
        self.step = self.depth = self.box.size[axis] / self.box.grid[axis]
        nearest = (
            f"the nearest particles at {0.5 * self.step:.4g}: increase z_max, or use a finer grid"
        )
        if 0.5 * self.step >= self.most:
            raise ValueError(f"z_max = {sky.z_max:g} is at {self.most:.4g} Mpc/h, and {nearest}")
        check_that(0.5 * self.step < self.end, f"z_max = {sky.z_max:g} is not behind {nearest}")
        self.check_latest(layers.distances[0])

    @override
    def _measured(self) -> tuple[Any, float, Iterable[Problem]]:
        theories, most = self.inputs.cosmologies.theories, FARTHEST * self.sky.z_max
        chi = [theory.distances.comoving(self.sky.earliest) for theory in theories]
        if all(known(each) is not None for each in chi):
            return super()._measured()
        end = tf.stop_gradient(tf.reduce_max(tf.stack(chi)))
        across = [each.distances.transverse(x) for each, x in zip(theories, chi, strict=True)]
        z = f"z_max = {self.sky.z_max:g}"
        check_that(end <= most, f"{z} is farther than {most:.4g} Mpc/h; call run eagerly")
        fits = tf.reduce_max(across) <= self.sky.most_across(self.box.size)
        check_that(fits, f"{z}: the field is wider than the box there")
        return end, most, ()

    def _times(self, theory: Theory) -> tf.Tensor:
        """Returns the scale factors at which light leaves layers, then farther ones [layer + 1]."""
        chi = joined([self.layers.distances, reshape(self.end, [1])], axis=0)
        chi = minimum(chi, BEHIND * self.end_of(theory))
        a = theory.distances.scale_factor(chi)
        return tf.maximum(a, self.sky.earliest)

    @functools.cached_property
    def _in_view(self) -> LayersInView:
        stop = max(self.most, self._edges[-1])
        return LayersInView(self.layers, self.box, self.end, stop, self.sky.tiles)

    def slab_edges(self, width: np.ndarray) -> np.ndarray:
        """Returns the edges of slabs, each with the whole number of layers nearest to the width."""
        layers, _ = self.layers, self.known_end
        numbers = plane_of_layers(len(layers.distances), float(layers.depths[0]), float(width))
        ends = np.append(np.flatnonzero(np.diff(numbers)), len(numbers) - 1)
        return np.append(0.0, layers.edges[ends + 1])

    def slabs(self, edges: np.ndarray) -> tuple[LensPlanes, np.ndarray]:
        """Returns the slabs as lens planes; each particle counts 1 / f_K^2."""
        return LensPlanes(edges), self.particles_in_pixel * np.diff(edges)

    @override
    def widening(self, theory: Theory) -> tf.Tensor:
        """Returns f_K / chi at `nodes` [node]: a particle is seen at its place across over f_K."""
        chi = self.nodes(theory).chi
        return theory.distances.transverse(chi) / chi

    @override
    def painting(self, edges: np.ndarray | None, amounts_of: AmountsOf | None) -> Painting:
        self.paint_between(edges, 2 if amounts_of is None else 1)
        theories = self.inputs.cosmologies.theories
        self._curved = not all(theory.background.is_flat for theory in theories)
        one = tf.ones([2, 1], tf.float64)

        def of_theory(theory: Theory) -> tuple[Any, tf.Tensor, tf.Tensor]:
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
        of_all = [kicks for kicks, _, _ in of_universes]
        return inputs, _crossings(of_all) if tf.executing_eagerly() else self._in_graph(of_all)

    def _in_graph(self, kicks: Sequence[Any]) -> dict[int, list[LayerCrossing]]:
        """Returns, for each kick that any layer may cross after, those that do in a graph.

        Args:
            kicks: the kick before each layer's time, for each universe: one object for those that
                are alike.
        """
        edges, theory = self.steps, self.inputs.cosmologies.theories[0]
        operations = self.integrator.schedule(theory.growth, edges).operations
        steps = [operation.step for operation in operations if operation.kind == "kick"]
        ends = [edges[min(step + 1, len(edges) - 1)] for step in steps]  # of the next kick, at most
        first = next(kick for kick, end in enumerate(ends) if end > self.sky.earliest)
        alike = {id(each): each for each in kicks}
        near = tf.concat([self.layers.distances < self.end, [True]], 0)
        crossings: dict[int, list[LayerCrossing]] = {}
        for key, each in alike.items():
            universes = np.array([n for n, other in enumerate(kicks) if id(other) == key])
            check_that(tf.reduce_all(each >= first), "a step of the integrator has no kick")
            for kick in range(first, len(steps)):
                crossing = LayerCrossing(universes, tf.equal(each, kick) & near)
                crossings.setdefault(kick, []).append(crossing)
        return crossings

    @override
    def paint(
        self, crossing: LayerCrossing, moment: Moment, inputs: Sequence[tf.Tensor]
    ) -> Measured:
        factors, amounts = (tf.gather(x, crossing.universes) for x in inputs)
        factors = factors[..., 1 : 2 + len(moment.lpt)]
        factors = tf.concat([tf.ones_like(factors[..., :1]), factors], -1)
        among = tf.where(tf.convert_to_tensor(crossing.layers)[:, tf.newaxis], tf.abs(factors), 0.0)
        reach = self.reach(moment.moving, tf.reduce_max(among, (0, 1)))
        if tf.executing_eagerly():
            layers, numbers = self._in_view.of(crossing, reach), np.flatnonzero(crossing.layers)
            near, far = (numbers[[0, -1]] + 0.5) * self.step
            first, shells = self.shells(near, far, reach)
        else:
            layers = self._in_view.in_graph(crossing, reach)
            first, shells = self.shells(0.0, 0.0, np.inf)
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
        self,
        crossing: LayerCrossing,
        displacement: np.ndarray,
        boost: np.ndarray,
        fields: list[np.ndarray],
    ) -> Iterator[Particles]:
        largest = np.abs(self._moved[np.asarray(crossing.layers), : len(fields)]).max(0)
        slabs = self._in_view.of(
            crossing, self.reach([displacement, *fields], np.append(1.0, largest))
        )
        for place, directions in zip(slabs.places, slabs.directions, strict=True):
            for i in range(place[4]):
                of_layer = (*(slice(None),) * int(place[2]), place[3] + i)
                planes = [field[of_layer] for field in (displacement, boost, *fields)]
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
            planes: its displacements, boosts, velocities and LPT fields [., ., 3].
        """
        # Columns of maps are y and rows x: so are the first two of a slab's axes.
        axes = int(place[1]), int(place[0]), int(place[2])
        senses = directions[3], directions[1], directions[4]
        origins = directions[2], directions[0]
        displacement, boost, *others = planes
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
        speed += HUBBLE / self._a[layer] * boost
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


def _crossings(kicks: Sequence[Any]) -> dict[int, list[LayerCrossing]]:
    """Returns, for each kick, the layers that cross the light cone after it.

    Args:
        kicks: the kick before each layer's time, for each universe of this rank.
    """
    crossings: dict[int, list[LayerCrossing]] = {}
    of_universes = [tuple(np.asarray(each).tolist()) for each in kicks]
    for each in dict.fromkeys(of_universes):
        same = np.flatnonzero([each == others for others in of_universes])
        for kick in sorted(set(each)):
            crossing = LayerCrossing(same, np.array(each) == kick)
            crossings.setdefault(kick, []).append(crossing)
    return crossings
