"""Comoving positions of particles: their lattice sites and the displacement from there."""

from __future__ import annotations

import tensorflow as tf

from flowpm_dist.grid.box import Box


def positions(displacement: tf.Tensor, box: Box, *, wrap: bool = True) -> tf.Tensor:
    """Returns the comoving positions of particles [Mpc/h], differentiable.

    Args:
        displacement: from the lattice sites, this rank's block [..., x, y, z, 3] [Mpc/h].
        box: of the particles.
        wrap: whether positions are taken into the periodic box, 0 <= x < side; else a particle that
            crossed a face of it is beyond that face.

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
