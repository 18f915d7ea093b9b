"""Positions of particles: comoving, and as a distant observer sees them in redshift space."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box


def positions(displacement: tf.Tensor, box: Box, *, wrap: bool = True) -> tf.Tensor:
    """Returns the comoving positions of particles [Mpc/h], differentiable.

    Args:
        displacement: from the lattice sites, this rank's block [..., x, y, z, 3] [Mpc/h].
        box: the particles' box.
        wrap: whether positions are wrapped into the periodic box, 0 <= x < side. Otherwise a
            particle that has left the box has a position outside it.

    Returns:
        This rank's block, of the displacement's shape and dtype.
    """
    along = []
    for axis, (sites, side) in enumerate(zip(box.sites(), box.size, strict=True)):
        x = displacement[..., axis] + tf.constant(sites, displacement.dtype)
        if wrap:
            x = tf.math.floormod(x, side)
            x = tf.where(x < side, x, x - side)  # rounded up to it, from just below 0
        along.append(x)
    return tf.stack(along, axis=-1)


def axis_number(axis: str) -> int:
    """Returns the number of an axis: 0, 1 or 2 for "x", "y" or "z".

    Raises:
        ValueError: if the axis has another name.
    """
    if axis not in ("x", "y", "z"):
        raise ValueError(f"axis {axis!r}: 'x', 'y' or 'z'")
    return "xyz".index(axis)


def redshift_space(
    displacement: tf.Tensor, velocity: tf.Tensor, a: Any, E: Any, axis: str = "z"
) -> tf.Tensor:
    """Returns the displacement to the apparent positions s = x + v_pec / (a H), differentiable.

    The peculiar velocity is v_pec = a dx/dt = p / a, so the shift is p / (a^2 E) [Mpc/h]. Along z,
    which no mesh splits, it needs no wider halo.

    Args:
        displacement: this rank's block [..., x, y, z, 3] [Mpc/h].
        velocity: the canonical velocity p = a^2 dx/dt, of the same shape [Mpc/h H0].
        a: the scale factor [1]; one number, or one for each universe of a batch.
        E: H(a) / H0 [1], likewise.
        axis: the axis of the line of sight, "x", "y" or "z".

    Raises:
        ValueError: if the axis is unknown.
    """
    dtype = displacement.dtype
    number = axis_number(axis)
    factor = 1 / (tf.cast(a, tf.float64) ** 2 * tf.cast(E, tf.float64))
    factor = tf.reshape(factor, [*factor.shape, *[1] * (4 if factor.shape.rank else 0)])
    along = tf.one_hot(number, 3, dtype=tf.float64)
    return displacement + velocity * tf.cast(factor * along, dtype)
