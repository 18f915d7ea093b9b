"""The adjoint of maps to which parts of the particles add, one part after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import tensorflow as tf

Part = TypeVar("Part")
PaintPart = Callable[[Part, Sequence[tf.Tensor], tf.Tensor, tf.Tensor], tf.Tensor]
"""What one part adds to the maps, by its fields, factors and amounts; differentiable."""


def moved_by(
    fields: Sequence[tf.Tensor], factors: Sequence[tf.Tensor], farthest: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of factors times fields, 0 where that has no place, and where it has one.

    Args:
        fields: [..., 3].
        factors: of each field, broadcast to [...].
        farthest: see `farthest_move` [Mpc/h].

    Returns:
        The sum [..., 3], without a gradient where it has no place; and bool [...].
    """

    def total(fields: Iterable[tf.Tensor], factors: Iterable[tf.Tensor]) -> tf.Tensor:
        return tf.add_n([c[..., tf.newaxis] * f for c, f in zip(factors, fields, strict=True)])

    placed = tf.reduce_all(tf.abs(total(fields, factors)) <= farthest, axis=-1)
    # Both of each product: the gradient of one is the other.
    kept_fields = [tf.where(placed[..., tf.newaxis], f, tf.zeros_like(f)) for f in fields]
    kept_factors = [tf.where(placed, c, tf.zeros_like(c)) for c in factors]
    return total(kept_fields, kept_factors), placed


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
