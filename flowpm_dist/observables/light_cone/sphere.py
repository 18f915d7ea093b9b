"""Paints the particles of a run on maps of the whole sky when their light leaves them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.grid.box import Box
from flowpm_dist.observables.light_cone.painter import MapPainter, painted
from flowpm_dist.observables.light_cone.segments import Segments
from flowpm_dist.particle_mesh.kernels import Ball, kernels
from flowpm_dist.simulation.inputs import Inputs

AmountsOf = Callable[[Distances, GrowthFunctions], tf.Tensor]
"""From the distances and the growth of a cosmology, the amounts at nodes: [nodes, weights]."""


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
