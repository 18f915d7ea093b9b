"""The whole sky: copies of the box all around an observer, on HEALPix maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.observers import Measured, Moment
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.light_cone.geometry import (
    BEHIND,
    AmountsOf,
    Geometry,
    Painting,
    Particles,
    pieces,
    placed,
    reaching,
)
from flowpm_dist.observables.light_cone.options import FullSky
from flowpm_dist.particle_mesh.kernels import Ball
from flowpm_dist.particle_mesh.kernels.base import DEGREE
from flowpm_dist.simulation.run import Inputs
from meshimpl.graph_guards import check_eager
from meshimpl.tapes import not_recorded

NODES = 512
"""Nodes between which weights are linear in the distance, at least: at most twice as many."""
FIELDS = 4
"""Fields that a recorded place or velocity is made of: before and after the kick, psi1 and psi2."""

WIDEST = 32.0
"""Width of a segment in which factors are one polynomial [Mpc/h]."""
MARGIN = 64.0
"""Distance on either side of the shells up to which particles have their own times [Mpc/h]."""
SAME_EDGE = 1e-6
"""Distance within which two edges are one [Mpc/h]."""

_POINTS = np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))  # of Chebyshev
_PARTS = np.arange(64) / 64
_TO_COEFFICIENTS = np.linalg.inv(np.vander(_POINTS, increasing=True))

OfTimes = Callable[[tf.Tensor], tuple[np.ndarray, tf.Tensor]]
"""From scale factors [n] to numbers [n] that grow with them, and values [n, functions]."""


@dataclass(frozen=True)
class SphereCrossing:
    """Particles that cross the light cone after one kick.

    Attributes:
        bounds: edges of all segments [segments + 1] [Mpc/h].
        group: number of the theory on this rank.
        universes: numbers of the universes that have it.
        segments: the segments that belong to the kick.
        recorded: to record particles, coefficients [segments, functions, 4] for the factors of
            places and of velocities, each with four fields, and for the scale factor.
    """

    bounds: np.ndarray
    group: int
    universes: np.ndarray
    segments: slice
    recorded: np.ndarray | None = None


class SphereGeometry(Geometry):
    """The periodic box repeated in all directions, on the whole sky.

    A particle crosses the light cone at the time of its own undisplaced distance.

    Args:
        sky: the sky.
        inputs: the run's inputs.

    Raises:
        ValueError: as `Geometry`; or the observer is not in the box.
        RuntimeError: inside a `tf.function`.
    """

    sky: FullSky

    def __init__(self, sky: FullSky, inputs: Inputs) -> None:
        check_eager("a light cone of the full sky")
        super().__init__(sky, inputs)
        self.check_latest(0.0)
        # Steps of a power of two stay the same when the cosmology changes a little.
        self.step = 2.0 ** math.floor(math.log2(self.end / NODES))
        self.depth = float(np.cbrt(np.prod(self.box.cell)))
        self._observer = sky.place(self.box.size, self.box.grid)

    def slab_edges(self, width: np.ndarray) -> np.ndarray:
        """Returns the edges of shells, in the whole number that is nearest to the width."""
        end = self.end
        if not width.ndim:
            return np.linspace(0.0, end, self.sky.shell_count(float(width), end) + 1)
        if width[-1] > end * (1 + 1e-9):
            raise ValueError(
                f"shells up to {width[-1]:g} Mpc/h: must end at z_max = {self.sky.z_max:g} or "
                f"before, at most {end:.6g} Mpc/h"
            )
        return width

    def slabs(self, edges: np.ndarray) -> tuple[LensPlanes, np.ndarray]:
        """Returns the shells as lens planes; each particle counts 1."""
        return LensPlanes.of_shells(edges), self.particles_in_pixel * np.diff(edges**3) / 3

    @override
    def painting(self, edges: np.ndarray | None, amounts_of: AmountsOf | None) -> Painting:
        self.paint_between(edges, 0 if amounts_of is None else 1)
        one = tf.ones([2, 1], tf.float64)
        # Light that leaves undisplaced places outside of these leaves them as at these.
        near = max(self._edges[0] - MARGIN, 0.0)
        far = max(self._edges[-1], min(self._edges[-1] + MARGIN, self.end))

        def of_theory(theory: Theory) -> tuple[np.ndarray, np.ndarray, tf.Tensor, tf.Tensor]:
            bounds, kicks, factors = self._segments(theory, np.array([near, far]))
            return bounds, kicks, factors, one if amounts_of is None else amounts_of(theory)

        of_universes = self.inputs.cosmologies.of_growths(of_theory)
        groups: dict[int, list[int]] = {}
        for universe, each in enumerate(of_universes):
            groups.setdefault(id(each), []).append(universe)
        inputs: list[tf.Tensor] = []
        crossings: dict[int, list[SphereCrossing]] = {}
        for group, same in enumerate(groups.values()):
            bounds, kicks, factors, amounts = of_universes[same[0]]
            inputs += [factors, amounts]
            for kick, segments in _by_kick(kicks):
                crossing = SphereCrossing(bounds, group, np.array(same), segments)
                crossings.setdefault(kick, []).append(crossing)
        return tuple(inputs), crossings

    def _segments(
        self, theory: Theory, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
        """Returns segments of the distance; the light of each leaves after one and the same kick.

        Args:
            theory: the theory of a universe.
            ends: the distances at which the first begins and the last ends [Mpc/h].

        Returns:
            Edges of the segments, float64 [segments + 1] [Mpc/h]. For each segment, the number of
            the kick before it. For each segment, polynomials of the factors of displacement,
            velocity and LPT fields, float64 [segments, 4, 4]; see `Kernels.paint_ball`.

        Raises:
            ValueError: light leaves before the first kick, or the integrator has no places then.
        """

        def since_kick(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
            with reaching(tf.reduce_min(a)):
                kicks, factors = self.integrator.since_kick(theory.growth, self.steps, a)
            return np.asarray(kicks), factors

        distances = theory.distances
        edges, kicks, polynomial = polynomials(since_kick, distances, ends, self.sky.earliest)
        of_displacement = tf.constant(np.eye(1, DEGREE + 1)[np.newaxis].repeat(len(kicks), 0))
        return edges, kicks, tf.concat([of_displacement, polynomial[:, 1:]], 1)

    def _ball(self, crossing: SphereCrossing, reach: float) -> tuple[int, Ball]:
        """Returns this rank's particles of a crossing, and the number of the first of their shells.

        Args:
            crossing: the crossing.
            reach: displacement along an axis that no particle exceeds [Mpc/h].
        """
        box, segments, bounds = self.box, crossing.segments, crossing.bounds
        depth, reach = self.depth, math.sqrt(3.0) * reach
        near, far = bounds[segments.start], bounds[segments.stop]
        if segments.start == 0:
            near = max(near - reach, 0.0)
        if segments.stop == len(bounds) - 1:
            far += reach
        # Others cannot come into the shells.
        near = max(near, self._edges[0] - reach - depth)
        far = max(near, min(far, self._edges[-1] + reach + depth))
        first, shells = self.shells(near, far, reach)
        return first, Ball(
            copies=copies_between(box, self._observer, near, far),
            edges=bounds[segments.start : segments.stop + 1],
            near=near,
            far=far,
            first=box.offset,
            observer=self._observer,
            nside=self.sky.nside,
            **shells,
        )

    @override
    def paint(
        self, crossing: SphereCrossing, moment: Moment, inputs: Sequence[tf.Tensor]
    ) -> Measured:
        factors, amounts = inputs[2 * crossing.group : 2 * crossing.group + 2]
        factors = factors[crossing.segments, : 2 + len(moment.lpt)]
        largest = np.abs(factors.numpy()).sum(-1).max(0)
        first, ball = self._ball(crossing, self.reach(moment.moving, largest))
        of_all = [
            tf.repeat(tf.cast(x, self.box.dtype)[tf.newaxis], len(crossing.universes), axis=0)
            for x in (factors, amounts)
        ]
        return self.painted("paint_ball", ball, moment, crossing.universes, of_all, first)

    def normalised(self, maps: tf.Tensor) -> tf.Tensor:
        """Returns painted maps for pixels of equal solid angle.

        Bilinear weights integrate to other solid angles than the pixels', see
        `Healpix.painted_areas`: without this a uniform universe would not have uniform maps.
        """
        sphere = Healpix(self.sky.nside)
        return maps * tf.constant(sphere.pixel_area / sphere.painted_areas, maps.dtype)

    @override
    def recording(self) -> dict[int, list[SphereCrossing]]:
        theory = self.inputs.cosmologies.theories[0]

        def states(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
            """Places are smooth between these kicks, and between those that change velocities."""
            with reaching(tf.reduce_min(a)):
                interpolation = self.integrator.interpolation(
                    theory.growth, self.steps, a.numpy().tolist()
                )
                since, _ = self.integrator.since_kick(theory.growth, self.steps, a)
            columns = tf.reshape(interpolation.factors, [len(interpolation.kicks), -1])
            numbers = np.array(interpolation.kicks) + np.array(since)
            kicks = tf.constant(interpolation.kicks, tf.float64)
            return numbers, tf.concat([columns, a[:, tf.newaxis], kicks[:, tf.newaxis]], axis=1)

        distances = theory.distances
        ends = np.array([0.0, self.end])
        self.paint_between(ends, 0)
        bounds, _, polynomial = polynomials(states, distances, ends, self.sky.earliest)
        coefficients, none = polynomial.numpy(), np.zeros(1, int)
        kicks = np.rint(coefficients[:, -1, 0]).astype(int)
        return {
            kick: [SphereCrossing(bounds, 0, none, segments, coefficients[segments, :-1])]
            for kick, segments in _by_kick(kicks)
        }

    @override
    def record(
        self,
        crossing: SphereCrossing,
        displacement: np.ndarray,
        boost: np.ndarray,
        fields: list[np.ndarray],
    ) -> Iterator[Particles]:
        assert crossing.recorded is not None
        largest = np.abs(crossing.recorded[:, : len(fields)]).sum(-1).max(0)
        reach = self.reach([displacement, *fields], np.append(1.0, largest))
        ball, shape = self._ball(crossing, reach)[1], displacement.shape[:3]
        for copy in ball.copies:
            x, y, z = (
                (first + np.arange(n)) * spacing + boxes * length - observer
                for first, n, spacing, boxes, length, observer in zip(
                    ball.first, shape, ball.spacing, copy, ball.lengths, ball.observer, strict=True
                )
            )
            for rows, columns in pieces(shape):
                along_x, along_y = x[rows], y[columns]
                across = np.square(along_x)[:, np.newaxis] + np.square(along_y)
                squares = across[..., np.newaxis] + np.square(z)
                inside = (squares >= ball.near**2) & (squares < ball.far**2)
                i, j, k = np.nonzero(inside)
                if len(i):
                    lattice = np.stack([along_x[i], along_y[j], z[k]], axis=-1)
                    values = [f[rows, columns][i, j, k] for f in (displacement, boost, *fields)]
                    chi = np.sqrt(squares[inside])
                    yield self._chosen(ball.edges, crossing.recorded, lattice, chi, values)

    def _chosen(
        self,
        edges: np.ndarray,
        coefficients: np.ndarray,
        lattice: np.ndarray,
        chi: np.ndarray,
        fields: list[np.ndarray],
    ) -> Particles:
        """Returns the observed ones among some particles.

        Args:
            edges: edges of the segments of a crossing [segments + 1] [Mpc/h].
            coefficients: see `SphereCrossing`.
            lattice, chi: undisplaced places [n, 3] and their distances [n] [Mpc/h].
            fields: displacements, boosts, velocities and LPT fields [n, 3].
        """
        segment = np.clip(np.searchsorted(edges, chi, side="right") - 1, 0, len(edges) - 2)
        lower, upper = edges[segment], edges[segment + 1]
        u = np.clip((2 * chi - lower - upper) / (upper - lower), -1.0, 1.0)
        values = np.zeros((coefficients.shape[1], len(u)))
        for power in range(DEGREE, -1, -1):
            values = values * u + coefficients[:, :, power].T[:, segment]
        displacement, boost, *others = fields
        moved, speed = (
            sum(c[:, np.newaxis] * field for c, field in zip(values[begin:], others, strict=False))
            for begin in (0, FIELDS)
        )
        place = lattice + placed(displacement + moved, self.box.size)
        observed = ~(np.linalg.norm(place, axis=-1) >= self.end)
        a = values[-1, observed]
        # a dx/dt is the canonical velocity over a.
        return place[observed], (speed + boost)[observed] * (HUBBLE / a)[:, np.newaxis], a


def _by_kick(kicks: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yields each kick with the slice of the consecutive segments that follow it."""
    for kick in sorted(set(kicks.tolist())):
        segments = np.flatnonzero(kicks == kick)
        yield kick, slice(int(segments[0]), int(segments[-1]) + 1)


def copies_between(
    box: Box, observer: tuple[float, float, float], near: float, far: float
) -> np.ndarray:
    """Returns the copies of the box that have particles of this rank between two distances [Mpc/h].

    Args:
        box: the box of the particles.
        observer: place in the box.
        near, far: the distances.

    Returns:
        int32 [copies, 3], see `Ball`.
    """
    reach = [int(np.ceil(far / length)) + 1 for length in box.size]
    nearest, farthest = [], []
    for axis, n in enumerate(reach):
        begin = box.offset[axis] * box.cell[axis] - observer[axis]
        low = begin + np.arange(-n, n + 1) * box.size[axis]
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
    of_times: OfTimes, distances: Distances, ends: np.ndarray, earliest: float
) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
    """Returns functions of the time at which light leaves as polynomials in the distance.

    Args:
        of_times: the functions, which are smooth where their number is the same.
        distances: distances of the cosmology.
        ends: the distances at which the first segment begins and the last ends [Mpc/h].
        earliest: scale factor before which nothing is observed.

    Returns:
        Edges of segments [segments + 1]; the number in each
        [segments]; and coefficients [segments, functions, 4] of u^0 to u^3, with u from -1 to 1 in
        each.
    """

    behind = BEHIND * float(distances.comoving(earliest))

    def times(chi: np.ndarray) -> tf.Tensor:
        return tf.maximum(distances.scale_factor(np.minimum(chi, behind)), earliest)

    with not_recorded():
        late, early = times(ends).numpy()
        borders = _borders(lambda a: of_times(tf.constant(a))[0], early, late)
        borders = distances.comoving(borders).numpy()
    edges = _refined(borders, ends)
    middle, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * np.diff(edges)
    points = middle[:, np.newaxis] + half[:, np.newaxis] * _POINTS
    numbers, at_points = of_times(times(points.ravel()))
    values = tf.reshape(at_points, [len(middle), DEGREE + 1, -1])
    coefficients = tf.einsum("pq,nqf->nfp", _TO_COEFFICIENTS, values)
    return edges, numbers.reshape(len(middle), -1)[:, 0], coefficients


def _borders(kicks_of: Callable[[np.ndarray], np.ndarray], early: float, late: float) -> np.ndarray:
    """Returns the scale factors between which light leaves after the same kick, by bisection.

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


def _refined(borders: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the edges of segments of limited width, among them the borders."""
    bounds = list(ends)
    for edge in borders:
        if np.abs(np.array(bounds) - edge).min() > SAME_EDGE:
            bounds.append(edge)
    bounds.sort()
    parts = [
        np.linspace(low, high, max(1, int(np.ceil((high - low) / WIDEST))), endpoint=False)
        for low, high in itertools.pairwise(bounds)
    ]
    return np.concatenate([*parts, bounds[-1:]])
