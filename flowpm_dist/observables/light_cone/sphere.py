"""The whole sky: copies of the box all around an observer, on HEALPix maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.light_cone.geometry import (
    AmountsOf,
    Geometry,
    Nodes,
    Painting,
    Particles,
    pieces,
    placed,
    reaching,
    slab_of,
)
from flowpm_dist.observables.light_cone.options import FullSky
from flowpm_dist.particle_mesh.kernels import Ball
from flowpm_dist.particle_mesh.kernels.base import DEGREE
from flowpm_dist.simulation.inputs import Inputs
from meshimpl.graph_guards import not_recorded

NODES = 512
"""Nodes between which weights are linear in the distance, at least: at most twice as many."""
FIELDS = 4
"""Fields that a recorded place or velocity is made of: before and after the kick, psi1 and psi2."""

WIDEST = 32.0
"""Width of a segment in which factors are one polynomial [Mpc/h]."""
SAME_EDGE = 1e-6
"""Distance within which two edges are one [Mpc/h]."""

_POINTS = np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))  # of Chebyshev
_PARTS = np.arange(64) / 64
_TO_COEFFICIENTS = np.linalg.inv(np.vander(_POINTS, increasing=True))

OfTimes = Callable[[tf.Tensor], tuple[np.ndarray, tf.Tensor]]
"""From scale factors [n] to numbers [n] that grow with them, and values [n, functions]."""


Recorded = tuple[Ball, np.ndarray]
"""A look at the particles that cross after one kick, to record them: this rank's particles, and
coefficients [segments, functions, 4] for the factors of places and of velocities, each with four
fields, and for the scale factor."""


@dataclass(frozen=True)
class SphereLook:
    """A look at the particles that cross after one kick, to paint them.

    Attributes:
        ball: this rank's particles, with copies and segments.
        group: number of the growth on this rank.
        universes: numbers of the universes that have it.
        segments: the segments that belong to the kick.
        first: number of the first of the ball's maps.
    """

    ball: Ball
    group: int
    universes: np.ndarray
    segments: slice
    first: int


class SphereGeometry(Geometry):
    """The periodic box repeated in all directions, on the whole sky.

    A particle crosses the light cone at the time of its own undisplaced distance.

    Args:
        sky: the sky.
        inputs: the run's inputs.

    Raises:
        ValueError: as `Geometry`; or the observer is not in the box.
    """

    sky: FullSky

    def __init__(self, sky: FullSky, inputs: Inputs) -> None:
        super().__init__(sky, inputs)
        self.check_latest(0.0)
        # Steps of a power of two stay the same when the cosmology changes a little.
        self._step = 2.0 ** math.floor(math.log2(self.end / NODES))
        box = self.box
        self._ball = Ball(
            copies=np.zeros([0, 3], np.int32),
            edges=np.zeros(1),
            first_map=np.zeros(0, np.int32),
            first=box.offset,
            spacing=box.cell,
            lengths=box.size,
            observer=sky.place(box.size, box.grid),
            step=1.0,
            per_distance=False,
            nside=sky.nside,
            maps=0,
        )

    def slab_edges(self, given: np.ndarray) -> np.ndarray:
        """See `Geometry.slab_edges`: the nearest whole number of shells for a width."""
        end = self.end
        if not given.ndim:
            return np.linspace(0.0, end, self.sky.shell_count(float(given), end) + 1)
        if given[-1] > end * (1 + 1e-9):
            raise ValueError(
                f"shells up to {given[-1]:g} Mpc/h: z_max = {self.sky.z_max:g} is at {end:.6g} "
                "Mpc/h"
            )
        return given

    def slabs(self, edges: np.ndarray) -> tuple[LensPlanes, np.ndarray]:
        """See `Geometry.slabs`: particles count 1."""
        return LensPlanes.of_shells(edges), self.particles_in_pixel * np.diff(edges**3) / 3

    def nodes(self, distances: Distances) -> Nodes:
        """See `Geometry.nodes`."""
        step = self._step
        chi = step * np.arange(math.ceil(self.end / step) + 1)
        edges = np.concatenate([chi[:1], 0.5 * (chi[1:] + chi[:-1]), chi[-1:]])
        # Integrals of chi times what is 1 at one node and 0 at the others, linear in between.
        moments = step * chi
        moments[0], moments[-1] = step**2 / 6, step * chi[-1] / 2 - step**2 / 6
        chi[0] = 1e-9 * step
        return Nodes(chi, moments / chi, edges)

    def amounts(
        self, nodes: Nodes, lensing: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Returns W / chi, which is nearly linear, at the nodes [node, source]."""
        return tf.stack([weight / nodes.chi for weight in weights], axis=-1)

    def painting(self, edges: np.ndarray | None, amounts_of: AmountsOf | None) -> Painting:
        """See `Geometry.painting`."""
        shells, weighing = edges, {}
        if shells is None:
            shells = np.array([0.0, self._step * math.ceil(self.end / self._step)])
        if amounts_of is not None:
            weighing = {"step": self._step, "per_distance": True}
        one = tf.ones([2, 1], tf.float64)

        def crossing(growth: Growth) -> tuple[np.ndarray, np.ndarray, tf.Tensor, tf.Tensor]:
            bounds, kicks, factors = self._segments(growth, shells)
            return bounds, kicks, factors, one if amounts_of is None else amounts_of(growth)

        found = self.inputs.cosmologies.of_growths(crossing)
        groups: dict[int, list[int]] = {}
        for universe, each in enumerate(found):
            groups.setdefault(id(each), []).append(universe)
        inputs: list[tf.Tensor] = []
        looks: dict[int, list[SphereLook]] = {}
        for group, same in enumerate(groups.values()):
            bounds, kicks, factors, amounts = found[same[0]]
            inputs += [factors, amounts]
            slabs = slab_of(0.5 * (bounds[1:] + bounds[:-1]), shells)
            for kick, own in _by_kick(kicks):
                first = slabs[own]
                maps = int(first.max() - first.min()) + amounts.shape[1]
                ball = self._near(bounds, own, first_map=first - first.min(), maps=maps, **weighing)
                if len(ball.copies):
                    look = SphereLook(ball, group, np.array(same), own, int(first.min()))
                    looks.setdefault(kick, []).append(look)
        return tuple(inputs), looks, int(found[0][1][0])

    def _segments(
        self, growth: Growth, shells: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
        """Returns the distance in segments, in each of which light leaves after one kick.

        Args:
            growth: growth of a universe.
            shells: edges of shells, which are edges of segments, too [Mpc/h].

        Returns:
            Edges of the segments, float64 [segments + 1] [Mpc/h]; the number of the kick before, of
            each segment; and polynomials of the places' factors, see `Kernels.paint_ball`, of
            displacement, velocity and LPT fields, float64 [segments, 4, 4].

        Raises:
            ValueError: light leaves before the first kick, or the integrator has no places then.
        """

        def since_kick(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
            with reaching(tf.reduce_min(a)):
                kicks, factors = self.integrator.since_kick(growth, self.steps, a)
            return np.array(kicks), factors

        distances = Distances(growth.background.cosmology)
        edges, kicks, found = polynomials(since_kick, distances, shells, self.sky.earliest)
        own = tf.constant(np.eye(1, DEGREE + 1)[np.newaxis].repeat(len(kicks), 0))
        return edges, kicks, tf.concat([own, found[:, 1:]], 1)

    def _near(self, bounds: np.ndarray, own: slice, **how: Any) -> Ball:
        """Returns this rank's particles in some of the segments between bounds [Mpc/h]."""
        near = bounds[own.start : own.stop + 1]
        copies = copies_between(self.box, self._ball, near[0], near[-1])
        return replace(self._ball, copies=copies, edges=near, **how)

    def paint(self, look: SphereLook, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `Geometry.paint`."""
        factors, amounts = inputs[2 * look.group : 2 * look.group + 2]
        of_all = [
            tf.repeat(tf.cast(x, self.box.dtype)[tf.newaxis], len(look.universes), axis=0)
            for x in (factors[look.segments, : 2 + len(moment.lpt)], amounts)
        ]
        return self.painted("paint_ball", look.ball, moment, look.universes, of_all, look.first)

    def normalised(self, maps: tf.Tensor) -> tf.Tensor:
        """See `Geometry.normalised`.

        Bilinear weights integrate to other solid angles than the pixels', see
        `Healpix.painted_areas`: without this a uniform universe would not have uniform maps.
        """
        sphere = Healpix(self.sky.nside)
        return maps * tf.constant(sphere.pixel_area / sphere.painted_areas, maps.dtype)

    def recording(self) -> dict[int, list[Recorded]]:
        """See `Geometry.recording`."""
        growth = self.inputs.cosmologies.growths[0]

        def states(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
            """Places are smooth between these kicks, and between those that change velocities."""
            with reaching(tf.reduce_min(a)):
                found = self.integrator.interpolation(growth, self.steps, a.numpy().tolist())
                since, _ = self.integrator.since_kick(growth, self.steps, a)
            columns = tf.reshape(found.factors, [len(found.kicks), -1])
            numbers = np.array(found.kicks) + np.array(since)
            kicks = tf.constant(found.kicks, tf.float64)
            return numbers, tf.concat([columns, a[:, tf.newaxis], kicks[:, tf.newaxis]], axis=1)

        distances, reach = Distances(growth.background.cosmology), np.array([0.0, self.end])
        bounds, _, found = polynomials(states, distances, reach, self.sky.earliest)
        coefficients, looks = found.numpy(), {}
        for kick, own in _by_kick(np.rint(coefficients[:, -1, 0]).astype(int)):
            ball = self._near(bounds, own)
            looks[kick] = [(ball, coefficients[own, :-1])]
        return looks

    def record(
        self, look: Recorded, displacement: np.ndarray, fields: list[np.ndarray]
    ) -> Iterator[Particles]:
        """See `Geometry.record`."""
        ball, shape = look[0], displacement.shape[:3]
        for copy in ball.copies:
            x, y, z = (
                (first + np.arange(n)) * spacing + boxes * length - observer
                for first, n, spacing, boxes, length, observer in zip(
                    ball.first, shape, ball.spacing, copy, ball.lengths, ball.observer, strict=True
                )
            )
            for rows, columns in pieces(shape):
                own, other = x[rows], y[columns]
                across = np.square(own)[:, np.newaxis] + np.square(other)
                squares = across[..., np.newaxis] + np.square(z)
                inside = (squares >= ball.edges[0] ** 2) & (squares < ball.edges[-1] ** 2)
                i, j, k = np.nonzero(inside)
                if len(i):
                    lattice = np.stack([own[i], other[j], z[k]], axis=-1)
                    seen = [f[rows, columns][i, j, k] for f in (displacement, *fields)]
                    yield self._chosen(look, lattice, np.sqrt(squares[inside]), seen)

    def _chosen(
        self, look: Recorded, lattice: np.ndarray, chi: np.ndarray, fields: list[np.ndarray]
    ) -> Particles:
        """Returns the particles of undisplaced places [n, 3] at distances [n], of fields [n, 3]."""
        ball, coefficients = look
        edges = ball.edges
        segment = np.clip(np.searchsorted(edges, chi, side="right") - 1, 0, len(edges) - 2)
        lower, upper = edges[segment], edges[segment + 1]
        u = (2 * chi - lower - upper) / (upper - lower)
        values = np.zeros((coefficients.shape[1], len(u)))
        for power in range(DEGREE, -1, -1):
            values = values * u + coefficients[:, :, power].T[:, segment]
        own, *others = fields
        moved, speed = (
            sum(c[:, np.newaxis] * field for c, field in zip(values[begin:], others, strict=False))
            for begin in (0, FIELDS)
        )
        a = values[-1]
        # a dx/dt is the canonical velocity over a.
        return (
            lattice + placed(own + moved, ball.lengths),
            speed * (HUBBLE / a)[:, np.newaxis],
            a,
        )


def _by_kick(kicks: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yields each kick and the slice of the segments, which follow one another, that have it."""
    for kick in sorted(set(kicks.tolist())):
        own = np.flatnonzero(kicks == kick)
        yield kick, slice(int(own[0]), int(own[-1]) + 1)


def copies_between(box: Box, ball: Ball, near: float, far: float) -> np.ndarray:
    """Returns the copies of this rank's particles with some between two distances [Mpc/h].

    Args:
        box: the box of the particles.
        ball: with the place of the observer.
        near, far: the distances.

    Returns:
        int32 [copies, 3], see `Ball`.
    """
    reach = [int(np.ceil(far / length)) + 1 for length in ball.lengths]
    nearest, farthest = [], []
    for axis, n in enumerate(reach):
        begin = box.offset[axis] * box.cell[axis] - ball.observer[axis]
        low = begin + np.arange(-n, n + 1) * ball.lengths[axis]
        high = low + (box.block[axis] - 1) * box.cell[axis]
        nearest.append(np.square(np.maximum(np.maximum(low, -high), 0)))
        farthest.append(np.square(np.maximum(np.abs(low), np.abs(high))))

    def sums(parts: list[np.ndarray]) -> np.ndarray:
        x, y, z = parts
        return x[:, np.newaxis, np.newaxis] + y[:, np.newaxis] + z

    margin = 1 + 1e-9  # for rounding
    inside = (sums(nearest) <= (far * margin) ** 2) & (sums(farthest) * margin**2 >= near**2)
    return (np.argwhere(inside) - np.array(reach)).astype(np.int32)


def polynomials(
    of_times: OfTimes, distances: Distances, shells: np.ndarray, earliest: float
) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
    """Returns functions of the time at which light leaves as polynomials in the distance.

    Args:
        of_times: the functions, which are smooth where their number is the same.
        distances: distances of the cosmology.
        shells: edges of shells [Mpc/h].
        earliest: scale factor before which nothing is seen.

    Returns:
        Edges of segments [segments + 1], which include the shells'; the number in each
        [segments]; and coefficients [segments, functions, 4] of u^0 to u^3, with u from -1 to 1 in
        each.
    """

    def times(chi: np.ndarray) -> tf.Tensor:
        return tf.maximum(distances.scale_factor(chi), earliest)

    with not_recorded():
        late, early = times(shells[[0, -1]]).numpy()
        borders = _borders(lambda a: of_times(tf.constant(a))[0], early, late)
        borders = distances.comoving(borders).numpy()
    edges = _refined(np.concatenate([shells, borders]), shells)
    middle, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * np.diff(edges)
    points = middle[:, np.newaxis] + half[:, np.newaxis] * _POINTS
    numbers, found = of_times(times(points.ravel()))
    values = tf.reshape(found, [len(middle), DEGREE + 1, -1])
    coefficients = tf.einsum("pq,nqf->nfp", _TO_COEFFICIENTS, values)
    return edges, numbers.reshape(len(middle), -1)[:, 0], coefficients


def _borders(kicks_of: Callable[[np.ndarray], np.ndarray], early: float, late: float) -> np.ndarray:
    """Returns the scale factors from which on light leaves after another kick, by bisection.

    Args:
        kicks_of: from scale factors to the numbers of the last kicks before.
        early, late: the first and the last scale factor.
    """
    first, last = kicks_of(np.array([early, late]))
    numbers = np.arange(first + 1, last + 1)[:, np.newaxis]
    lower, upper = np.full(numbers.shape, early), np.full(numbers.shape, late)
    row = np.arange(len(numbers))[:, np.newaxis]
    while len(numbers) and (upper - lower).max() > 1e-13:
        grid = np.concatenate([lower + (upper - lower) * _PARTS, upper], axis=1)
        made = kicks_of(grid.ravel()).reshape(grid.shape) >= numbers
        at = np.argmax(made, axis=1)[:, np.newaxis]
        lower, upper = grid[row, np.maximum(at - 1, 0)], grid[row, at]
    return upper[:, 0]


def _refined(edges: np.ndarray, shells: np.ndarray) -> np.ndarray:
    """Returns edges of segments that are not too wide; they include all edges of shells."""
    kept = list(np.sort(shells))
    for edge in edges:
        if np.abs(np.array(kept) - edge).min() > SAME_EDGE:
            kept.append(edge)
    kept.sort()
    parts = [
        np.linspace(low, high, max(1, int(np.ceil((high - low) / WIDEST))), endpoint=False)
        for low, high in itertools.pairwise(kept)
    ]
    return np.concatenate([*parts, kept[-1:]])
