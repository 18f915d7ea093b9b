"""Paints the particles of a run on maps of the flat sky when their light leaves them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.observables.light_cone.crossings import (
    LayerLook,
    layer_looks,
    layer_times,
    reaching,
)
from flowpm_dist.observables.light_cone.painter import MapPainter, painted
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.particle_mesh.kernels import Slabs, kernels
from flowpm_dist.simulation.inputs import Inputs

AmountsOf = Callable[[Distances, tf.Tensor, GrowthFunctions], tf.Tensor]
"""From the distances of a cosmology, the scale factors of the layers and the growth, amount and
slope of each: [layers, weights, 2]."""


class SkyPainter(MapPainter):
    """Adds each particle of each layer to maps, at the place where it crosses the light cone.

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
        self._layers, self._pixel, self._pixels, self._map_of = layers, fov / pixels, pixels, map_of
        integrator, edges = inputs.options.integrator, inputs.edges.tolist()

        def crossing(growth: GrowthFunctions) -> tuple[tuple[int, ...], tf.Tensor, tf.Tensor]:
            distances = Distances(growth.background.cosmology)
            a = layer_times(layers, distances)
            with reaching(a[-1]):
                kicks, factors = integrator.since_kick(growth, edges, a)
            return kicks, factors, amounts_of(distances, a, growth)

        found = inputs.cosmologies.of_growths(crossing)
        self.inputs = (tf.stack([f for _, f, _ in found]), tf.stack([w for _, _, w in found]))
        looks = layer_looks(inputs.box, layers, [kicks for kicks, _, _ in found])
        super().__init__(inputs, looks, found[0][0][0], len(found), maps, (pixels, pixels))

    def paint(self, look: LayerLook, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `MapPainter.paint`."""
        fields = [moment.displacement, moment.after, *moment.lpt]
        factors, amounts = (
            tf.gather(tf.gather(x, look.universes), look.layers, axis=1) for x in inputs
        )
        dtype, box, layers = self._box.dtype, self._box, look.layers
        moved = tf.concat([tf.ones_like(factors[..., :1]), factors[..., 1 : len(fields)]], -1)
        first = self._map_of[layers]
        slabs = Slabs(
            places=look.places,
            directions=look.directions,
            distances=self._layers.distances[layers],
            first_map=(first - first.min()).astype(np.int32),
            spacing=box.cell,
            lengths=box.size,
            pixel=self._pixel,
            pixels=self._pixels,
            maps=int(first.max() - first.min()) + amounts.shape[2],
        )
        maps = painted(
            functools.partial(kernels().paint_sky, slabs),
            functools.partial(kernels().paint_sky_vjp, slabs),
            self.blocks(fields, look.universes),
            tf.cast(moved, dtype),
            tf.cast(amounts, dtype),
        )
        return self.by_name(maps, look.universes, int(first.min()))
