"""Paints the particles of a run on maps of the sky when their light leaves them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.evolution.integrators import Integrator
from flowpm_dist.evolution.observers import Look, Moment, Observer, Seen
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.particle_mesh.kernels import Slabs, kernels
from flowpm_dist.simulation.inputs import Inputs
from meshimpl.collectives import Communicator

AmountsOf = Callable[[Distances, tf.Tensor], tf.Tensor]
"""From the distances of a cosmology and the scale factors of the layers, amount and slope of each:
[layers, weights, 2]."""


@dataclass(frozen=True)
class _Look:
    """What is seen of the universes whose layers are crossed after the same kicks.

    Attributes:
        universes: their numbers among those of this rank.
        layers: number of each layer of the slabs among those of the cone.
        slabs: of this rank's particles.
        maps: the number of the first of the slabs' maps.
    """

    universes: np.ndarray
    layers: np.ndarray
    slabs: Slabs
    maps: int


class SkyPainter(Observer):
    """Adds each particle of each layer to maps, at the place where it crosses the light cone.

    A particle crosses when the light leaves its undisplaced place: at the scale factor of its
    layer's distance. From the kick before that time it has drifted by a part of the integrator's
    own drift. Each particle is on each tile once, and moves smoothly on the sky with all that it
    depends on (MADLens, Boehm and others 2021, arXiv:2012.07266, section 2.2).

    Args:
        inputs: of the run.
        layers: of the cone.
        fov: side of the field of view [rad].
        pixels: along each side.
        map_of: of each layer, the map of its first weight, int32 [layers].
        maps: their number.
        amounts_of: what a particle adds at distance chi is (amount + slope (chi - that of its
            layer)) / chi^2.
    """

    needs_before = False

    def __init__(
        self,
        inputs: Inputs,
        layers: Layers,
        fov: float,
        pixels: int,
        map_of: np.ndarray,
        maps: int,
        amounts_of: AmountsOf,
    ) -> None:
        self._box, self._layers, self._maps = inputs.box, layers, maps
        self._fov, self._pixels, self._map_of = fov, pixels, map_of
        self._group = inputs.box.mesh.without("replica").world
        edges = inputs.edges.tolist()

        def crossing(growth: GrowthFunctions) -> tuple[tuple[int, ...], tf.Tensor, tf.Tensor]:
            distances = Distances(growth.background.cosmology)
            a = tf.maximum(distances.scale_factor(layers.distances), layers.earliest)
            try:
                kicks, factors = self._crossing(inputs.options.integrator, growth, edges, a)
            except ValueError as error:
                z = 1.0 / float(a[-1]) - 1.0
                raise ValueError(f"a light cone that reaches to z = {z:.4g}: {error}") from error
            return kicks, factors, amounts_of(distances, a)

        found = inputs.cosmologies.of_growths(crossing)
        self.inputs = (tf.stack([f for _, f, _ in found]), tf.stack([w for _, _, w in found]))
        self._universes = len(found)
        self._looks: dict[int, list[_Look]] = {}
        for kicks in dict.fromkeys(kicks for kicks, _, _ in found):
            same = np.flatnonzero([kicks == others for others, _, _ in found])
            for kick in sorted(set(kicks)):
                look = self._look_at(same, np.flatnonzero(np.array(kicks) == kick))
                if look is not None:
                    self._looks.setdefault(kick, []).append(look)
        # A rank that sees nothing looks all the same, so that it takes part in the way back.
        self._empty = not self._looks
        self.kicks = frozenset(self._looks or found[0][0][:1])

    def _crossing(
        self, integrator: Integrator, growth: GrowthFunctions, edges: list[float], a: tf.Tensor
    ) -> tuple[tuple[int, ...], tf.Tensor]:
        """Returns the kick of each layer, and the factors of its places from those at the kick."""
        return integrator.since_kick(growth, edges, a)

    def looks(self, kick: int) -> list[Look]:
        """See `Observer.looks`."""
        if self._empty:
            return [self._see_nothing]
        return [functools.partial(self._see, look) for look in self._looks[kick]]

    def _see_nothing(self, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        sums = [tf.cast(tf.reduce_sum(t), self._box.dtype) for t in (moment.displacement, *inputs)]
        nothing = tf.zeros([self._pixels, self._pixels], self._box.dtype) + 0.0 * tf.add_n(sums)
        return {(u, m): nothing for u in range(self._universes) for m in range(self._maps)}

    def _see(self, look: _Look, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        seen: Seen = {}
        fields = [moment.displacement, moment.after, *moment.lpt]
        spatial = self._box.local_batch == ()
        factors, amounts = (
            tf.gather(tf.gather(x, look.universes), look.layers, axis=1) for x in inputs
        )
        dtype = self._box.dtype
        moved = tf.concat([tf.ones_like(factors[..., :1]), factors[..., 1 : len(fields)]], -1)
        blocks = [f[tf.newaxis] if spatial else self._some(f, look) for f in fields]
        maps = _paint(look.slabs, blocks, tf.cast(moved, dtype), tf.cast(amounts, dtype))
        for i, universe in enumerate(look.universes):
            for m in range(look.slabs.maps):
                name = int(universe), look.maps + m
                seen[name] = seen[name] + maps[i, m] if name in seen else maps[i, m]
        return seen

    def results(self, seen: Seen) -> tf.Tensor:
        """Returns the maps [..., map, x, y] of this rank's universes, whole on all their ranks."""
        nothing = tf.zeros([self._pixels, self._pixels], self._box.dtype)
        parts = [
            tf.stack([seen.get((u, m), nothing) for m in range(self._maps)])
            for u in range(self._universes)
        ]
        maps = tf.stack(parts) if self._box.local_batch else parts[0]
        return sum_over(self._group, maps)

    def pack(self, seen: Seen) -> dict[str, tf.Tensor]:
        """See `Observer.pack`; the universes are those of this rank."""
        return {"maps": SkyPainter.results(self, seen)}

    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Seen:
        """See `Observer.unpack`: the first of the ranks goes on with the whole."""
        shape = (self._universes, self._maps, self._pixels, self._pixels)
        if "maps" not in packed:
            raise ValueError("a light cone goes on only from where its maps were kept")
        maps = packed["maps"] if self._box.local_batch else packed["maps"][tf.newaxis]
        if maps.shape != shape:
            raise ValueError(f"maps of shape {maps.shape} were kept: those here are {shape}")
        if self._group.index:
            return {}
        maps = tf.cast(maps, self._box.dtype)
        return {(u, m): maps[u, m] for u in range(self._universes) for m in range(self._maps)}

    def _some(self, field: tf.Tensor, look: _Look) -> tf.Tensor:
        every = len(look.universes) == self._universes
        return field if every else tf.gather(field, look.universes)

    def _look_at(self, universes: np.ndarray, chosen: np.ndarray) -> _Look | None:
        """Returns a look at chosen layers; None where this rank has no particle of theirs."""
        box, layers = self._box, self._layers
        places, directions = [], []
        order: list[int] = []
        for number in sorted(set(layers.tile[chosen].tolist())):
            tile = layers.tiles[number]
            axis = tile.axes[2]
            first, count = box.offset[axis], box.block[axis]
            here = [
                (int(layers.index[m]) - first, int(m))
                for m in chosen[layers.tile[chosen] == number]
                if first <= layers.index[m] < first + count
            ]
            for run in _runs(sorted(here)):
                places.append([tile.axes[1], tile.axes[0], axis, run[0][0], len(run), len(order)])
                directions.append(self._directions(number))
                order += [m for _, m in run]
        if not order:
            return None
        numbers = np.array(order)
        first_map = self._map_of[numbers]
        slabs = Slabs(
            places=np.array(places, np.int32),
            directions=np.array(directions),
            distances=layers.distances[numbers],
            first_map=(first_map - first_map.min()).astype(np.int32),
            spacing=box.cell,
            lengths=box.size,
            pixel=self._fov / self._pixels,
            pixels=self._pixels,
            maps=int(first_map.max() - first_map.min()) + self.inputs[1].shape[2],
        )
        return _Look(universes, numbers, slabs, int(first_map.min()))

    def _directions(self, number: int) -> list[float]:
        """Returns a row of `Slabs.directions`: of the columns of a map, y, and of its rows, x."""
        tile, box = self._layers.tiles[number], self._box
        row: list[float] = []
        for i in (1, 0):
            axis, sense = tile.axes[i], tile.senses[i]
            row += [tile.shifts[i] + sense * box.offset[axis] * box.cell[axis], sense]
        return [*row, tile.senses[2]]


def _runs(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Returns pairs, sorted by their first number, in runs without a gap in it."""
    runs: list[list[tuple[int, int]]] = []
    for place in places:
        if runs and runs[-1][-1][0] == place[0] - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _paint(
    slabs: Slabs, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
) -> tf.Tensor:
    """Returns `Kernels.paint_sky` with its gradient."""
    count = len(fields)

    @tf.custom_gradient
    def paint(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Sequence[tf.Tensor]]]:
        maps = kernels().paint_sky(slabs, inputs[:count], inputs[count], inputs[count + 1])

        def gradient(dmaps: tf.Tensor) -> list[tf.Tensor]:
            moved, by_factors, by_amounts = kernels().paint_sky_vjp(
                slabs, inputs[:count], inputs[count], inputs[count + 1], dmaps
            )
            others = [tf.cast(t, dmaps.dtype) for t in (by_factors, by_amounts)]
            return [*moved, *others]

        return maps, gradient

    return paint(*fields, factors, amounts)


def sum_over(group: Communicator, part: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the ranks' parts, whole on each rank; gradients add up the ranks' losses.

    Args:
        group: the ranks.
        part: this rank's.
    """

    @tf.custom_gradient
    def whole(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return group.allreduce(x), group.allreduce

    return whole(part)
