"""What adds particles to maps of the sky, of any shape, when they cross a light cone."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.observables.light_cone.crossings import CrossingObserver, check_seen
from flowpm_dist.simulation.inputs import Inputs
from meshimpl.collectives import Communicator


class MapPainter(CrossingObserver):
    """Adds particles to maps, which are named by the numbers of universe and map.

    Args:
        inputs: of the run.
        looks: see `CrossingObserver`.
        a_kick: one at which every rank may look.
        universes: their number on this rank.
        maps: their number.
        shape: of a map.
    """

    needs_before = False

    def __init__(
        self,
        inputs: Inputs,
        looks: Mapping[int, Sequence[Any]],
        a_kick: int,
        universes: int,
        maps: int,
        shape: tuple[int, ...],
    ) -> None:
        # A rank that sees nothing looks all the same, so that it takes part in the way back.
        looks = looks or {a_kick: [None]}
        super().__init__(inputs.box, looks, looks)
        self._universes, self._maps, self._shape = universes, maps, shape
        self._group = inputs.box.mesh.without("replica").world

    def see(self, look: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `CrossingObserver.see`."""
        return self._nothing(moment, inputs) if look is None else self.paint(look, moment, inputs)

    @abc.abstractmethod
    def paint(self, look: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """Returns what one look adds to the maps, by the numbers of universe and map."""

    def _nothing(self, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        sums = [tf.cast(tf.reduce_sum(t), self._box.dtype) for t in (moment.displacement, *inputs)]
        nothing = tf.zeros(self._shape, self._box.dtype) + 0.0 * tf.add_n(sums)
        return {(u, m): nothing for u in range(self._universes) for m in range(self._maps)}

    def blocks(self, fields: Sequence[tf.Tensor], universes: np.ndarray) -> list[tf.Tensor]:
        """Returns fields of chosen universes [b, x, y, z, 3]."""
        if self._box.local_batch == ():
            return [field[tf.newaxis] for field in fields]
        if len(universes) == self._universes:
            return list(fields)
        return [tf.gather(field, universes) for field in fields]

    def by_name(self, maps: tf.Tensor, universes: np.ndarray, first: int) -> Seen:
        """Returns maps [b, map, ...] of chosen universes, the first of them numbered `first`."""
        # Not by slices, whose gradients are each as large as all maps.
        return {
            (int(universe), first + m): each
            for universe, rows in zip(universes, tf.unstack(maps), strict=True)
            for m, each in enumerate(tf.unstack(rows))
        }

    def results(self, seen: Seen) -> Any:
        """Returns the maps [..., map, *shape] of this rank's universes, whole on their ranks."""
        return self.summed(seen)

    def summed(self, seen: Seen) -> tf.Tensor:
        """Returns the sums of the ranks' maps [..., map, *shape].

        Raises:
            FloatingPointError: a particle was not finite, or too far displaced, where it was seen.
                On every rank.
        """
        nothing = tf.zeros(self._shape, self._box.dtype)
        parts = [
            tf.stack([seen.get((u, m), nothing) for m in range(self._maps)])
            for u in range(self._universes)
        ]
        maps = sum_over(self._group, tf.stack(parts) if self._box.local_batch else parts[0])
        check_seen(tf.reduce_all(tf.math.is_finite(maps)), self._box)
        return maps

    def pack(self, seen: Seen) -> dict[str, tf.Tensor]:
        """See `Observer.pack`; the universes are those of this rank."""
        return {"maps": self.summed(seen)}

    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Seen:
        """See `Observer.unpack`: the first of the ranks goes on with the whole."""
        shape = (self._universes, self._maps, *self._shape)
        if "maps" not in packed:
            raise ValueError("a light cone goes on only from where its maps were kept")
        maps = packed["maps"] if self._box.local_batch else packed["maps"][tf.newaxis]
        if maps.shape != shape:
            raise ValueError(f"maps of shape {maps.shape} were kept: those here are {shape}")
        if self._group.index:
            return {}
        maps = tf.cast(maps, self._box.dtype)
        return {(u, m): maps[u, m] for u in range(self._universes) for m in range(self._maps)}


Paint = Callable[[Sequence[tf.Tensor], tf.Tensor, tf.Tensor], tf.Tensor]
"""From fields, factors and amounts to maps."""
PaintVjp = Callable[
    [Sequence[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor],
    tuple[list[tf.Tensor], tf.Tensor, tf.Tensor],
]
"""From these and the cotangent of the maps to the cotangents of these."""


def painted(
    paint: Paint,
    paint_vjp: PaintVjp,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
) -> tf.Tensor:
    """Returns the maps of a kernel, with the gradient by its adjoint.

    Args:
        paint, paint_vjp: the kernel and its adjoint.
        fields, factors, amounts: what it takes.
    """
    count = len(fields)

    @tf.custom_gradient
    def maps_of(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Sequence[tf.Tensor]]]:
        given = inputs[:count], inputs[count], inputs[count + 1]

        def gradient(dmaps: tf.Tensor) -> list[tf.Tensor]:
            moved, *others = paint_vjp(*given, dmaps)
            return [*moved, *(tf.cast(t, dmaps.dtype) for t in others)]

        return paint(*given), gradient

    return maps_of(*fields, factors, amounts)


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
