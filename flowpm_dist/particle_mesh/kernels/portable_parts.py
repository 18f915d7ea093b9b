"""The adjoint of maps to which parts of the particles add, one part after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import tensorflow as tf

Part = TypeVar("Part")
PaintPart = Callable[[Part, Sequence[tf.Tensor], tf.Tensor, tf.Tensor], tf.Tensor]
"""What one part adds to the maps, by its fields, factors and amounts; differentiable."""


def finite_fields(fields: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns fields [..., 3] with 0 at particles that are not finite, and which are [...]."""
    finite = tf.reduce_all([tf.math.is_finite(field) for field in fields], axis=[0, -1])
    return [tf.where(finite[..., tf.newaxis], f, tf.zeros_like(f)) for f in fields], finite


def vjp_of_parts(
    paint: PaintPart[Part],
    parts: Iterable[Part],
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
    dmaps: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns the cotangents of fields, factors and amounts, the last two float64.

    A tape holds one part: memory does not grow with their number.

    Args:
        paint: see `PaintPart`.
        parts: of the particles.
        fields, factors, amounts: the arguments of `paint`.
        dmaps: cotangent of the maps, in any shape of as many values.
    """
    sources = [*fields, factors, amounts]
    total = [tf.zeros_like(source) for source in sources]
    for part in parts:
        with tf.GradientTape() as tape:
            tape.watch(sources)
            maps = paint(part, fields, factors, amounts)
        zeros, dpart = tf.UnconnectedGradients.ZERO, tf.reshape(dmaps, maps.shape)
        found = tape.gradient(maps, sources, dpart, unconnected_gradients=zeros)
        total = [a + b for a, b in zip(total, found, strict=True)]
    *dfields, dfactors, damounts = total
    return dfields, tf.cast(dfactors, tf.float64), tf.cast(damounts, tf.float64)
