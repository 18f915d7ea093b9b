"""Paints the particles of a run on maps of the whole sky when their light leaves them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.evolution.integrators import Integrator
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.grid.box import Box
from flowpm_dist.observables.light_cone.crossings import reaching
from flowpm_dist.observables.light_cone.painter import MapPainter, painted
from flowpm_dist.particle_mesh.kernels import Ball, kernels
from flowpm_dist.particle_mesh.kernels.ball import DEGREE
from flowpm_dist.simulation.inputs import Inputs
from meshimpl.tapes import not_recorded

WIDEST = 32.0
"""Width of a segment in which factors are one polynomial [Mpc/h]."""
CLOSE = 1e-6
"""Distance within which two edges are one [Mpc/h]."""

_POINTS = np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))  # of Chebyshev
_PARTS = np.arange(64) / 64
_TO_COEFFICIENTS = np.linalg.inv(np.vander(_POINTS, increasing=True))

AmountsOf = Callable[[Distances, GrowthFunctions], tf.Tensor]
"""From the distances and the growth of a cosmology, the amounts at nodes: [nodes, weights]."""


@dataclass(frozen=True)
class Segments:
    """The distance in segments, in each of which light leaves after one kick.

    Attributes:
        edges: of the segments, float64 [segments + 1] [Mpc/h].
        kicks: the number of the kick before, of each segment.
        factors: polynomials of the places' factors, see `Kernels.paint_ball`, of displacement,
            velocity and LPT fields, float64 [segments, 4, 4].
    """

    edges: np.ndarray
    kicks: np.ndarray
    factors: tf.Tensor

    @classmethod
    def of(
        cls,
        integrator: Integrator,
        growth: GrowthFunctions,
        steps: Sequence[float],
        shells: np.ndarray,
        earliest: float,
    ) -> Segments:
        """Returns the segments of shells, with edges at all of theirs.

        Args:
            integrator: of the run.
            growth: of its cosmology.
            steps: scale factors at which its steps begin and end.
            shells: edges of shells [Mpc/h].
            earliest: scale factor before which nothing is seen.

        Raises:
            ValueError: light leaves before the first kick, or the integrator has no places then.
        """
        distances = Distances(growth.background.cosmology)

        def since_kick(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
            with reaching(tf.reduce_min(a)):
                kicks, factors = integrator.since_kick(growth, steps, a)
            return np.array(kicks), factors

        def times(chi: np.ndarray) -> tf.Tensor:
            return tf.maximum(distances.scale_factor(chi), earliest)

        with not_recorded():
            late, early = times(shells[[0, -1]]).numpy()
            borders = _borders(lambda a: since_kick(tf.constant(a))[0], early, late)
            borders = distances.comoving(borders).numpy()
        edges = _refined(np.concatenate([shells, borders]), shells)
        middle, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * np.diff(edges)
        points = middle[:, np.newaxis] + half[:, np.newaxis] * _POINTS
        kicks, factors = since_kick(times(points.ravel()))
        values = tf.reshape(factors, [len(middle), DEGREE + 1, -1])
        own = tf.constant(np.eye(1, DEGREE + 1)[np.newaxis].repeat(len(middle), 0))
        polynomials = tf.einsum("pq,nqf->nfp", _TO_COEFFICIENTS, values[..., 1:])
        return cls(edges, kicks.reshape(len(middle), -1)[:, 0], tf.concat([own, polynomials], 1))


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
    """Returns edges of segments that are not too wide; those of shells are all among them."""
    kept = list(np.sort(shells))
    for edge in edges:
        if np.abs(np.array(kept) - edge).min() > CLOSE:
            kept.append(edge)
    kept.sort()
    parts = [
        np.linspace(low, high, max(1, int(np.ceil((high - low) / WIDEST))), endpoint=False)
        for low, high in itertools.pairwise(kept)
    ]
    return np.concatenate([*parts, kept[-1:]])


@dataclass(frozen=True)
class _Look:
    """What is seen of the universes of one growth after one kick.

    Attributes:
        group: number of the growth.
        universes: their numbers among those of this rank.
        segments: of the growth.
        ball: of this rank's particles.
        first: the number of the first of the ball's maps.
    """

    group: int
    universes: np.ndarray
    segments: slice
    ball: Ball
    first: int


class SpherePainter(MapPainter):
    """Adds each copy of each particle to maps of the sky, where it crosses the light cone.

    The periodic box is repeated in all directions, as it is.

    Args:
        inputs: of the run.
        ball: without copies, segments and maps: where the observer is, and the maps' pixels.
        shells: edges of shells [Mpc/h], from the nearest on.
        earliest: scale factor before which nothing is seen.
        amounts_of: see `Kernels.paint_ball`.
        maps: their number.
        map_of: of each shell, the map of its first weight, int32 [shells].
    """

    def __init__(
        self,
        inputs: Inputs,
        ball: Ball,
        shells: np.ndarray,
        earliest: float,
        amounts_of: AmountsOf,
        maps: int,
        map_of: np.ndarray,
    ) -> None:
        integrator, steps = inputs.options.integrator, inputs.edges.tolist()

        def crossing(growth: GrowthFunctions) -> tuple[Segments, tf.Tensor]:
            segments = Segments.of(integrator, growth, steps, shells, earliest)
            return segments, amounts_of(Distances(growth.background.cosmology), growth)

        found = inputs.cosmologies.of_growths(crossing)
        groups: dict[int, list[int]] = {}
        for universe, each in enumerate(found):
            groups.setdefault(id(each), []).append(universe)
        self.inputs = tuple(
            tensor
            for same in groups.values()
            for tensor in (found[same[0]][0].factors, found[same[0]][1])
        )
        looks: dict[int, list[_Look]] = {}
        for group, same in enumerate(groups.values()):
            segments = found[same[0]][0]
            middle = 0.5 * (segments.edges[1:] + segments.edges[:-1])
            numbers = map_of[np.searchsorted(shells, middle) - 1]
            for kick in sorted(set(segments.kicks.tolist())):
                of_kick = np.flatnonzero(segments.kicks == kick)
                chosen = slice(of_kick[0], of_kick[-1] + 1)
                edges = segments.edges[chosen.start : chosen.stop + 1]
                copies = copies_between(inputs.box, ball, edges[0], edges[-1])
                if not len(copies):
                    continue
                first = numbers[chosen]
                weights = found[same[0]][1].shape[1]
                seen = replace(
                    ball,
                    copies=copies,
                    edges=edges,
                    first_map=(first - first.min()).astype(np.int32),
                    maps=int(first.max() - first.min()) + weights,
                )
                look = _Look(group, np.array(same), chosen, seen, int(first.min()))
                looks.setdefault(kick, []).append(look)
        a_kick = int(found[0][0].kicks[0])
        pixels = 12 * ball.nside**2
        super().__init__(inputs, looks, a_kick, len(found), maps, (pixels,))

    def paint(self, look: _Look, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `MapPainter.paint`."""
        fields = [moment.displacement, moment.after, *moment.lpt]
        factors, amounts = inputs[2 * look.group : 2 * look.group + 2]
        of_all = [
            tf.repeat(tf.cast(x, self._box.dtype)[tf.newaxis], len(look.universes), axis=0)
            for x in (factors[look.segments, : len(fields)], amounts)
        ]
        maps = painted(
            functools.partial(kernels().paint_ball, look.ball),
            functools.partial(kernels().paint_ball_vjp, look.ball),
            self.blocks(fields, look.universes),
            *of_all,
        )
        return self.by_name(maps, look.universes, look.first)


def copies_between(box: Box, ball: Ball, near: float, far: float) -> np.ndarray:
    """Returns the copies of this rank's particles with some between two distances [Mpc/h].

    Args:
        box: of the particles.
        ball: where the observer is.
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
