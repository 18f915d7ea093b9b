"""Sums of fields with a factor for each universe."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.operations.pointwise import sum_of_products


@tf.function(jit_compile=True, autograph=False)
def combine(fields: Sequence[tf.Tensor], factors: tf.Tensor) -> tf.Tensor:
    """Returns the sum of factor times field, in one pass.

    Args:
        fields: blocks [..., x, y, z, 3].
        factors: [..., at least as many as fields].
    """
    return sum_of_products(*tf.unstack(factors, axis=-1)[: len(fields)], *fields)


def drift(x: tf.Tensor, v: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns x + factor v, in one pass of the kernels.

    Args:
        x, v: blocks [..., x, y, z, 3].
        factor: for each universe [...].
    """
    shape = [-1, *x.shape[-4:]]
    moved = kernels().linear(tf.reshape(x, shape), tf.reshape(v, shape), tf.reshape(factor, [-1]))
    return tf.reshape(moved, x.shape)


def broadcast_per_universe(factor: tf.Tensor) -> tf.Tensor:
    """Returns a number for each universe [...] as a factor of blocks [..., x, y, z, 3]."""
    return factor[..., tf.newaxis, tf.newaxis, tf.newaxis, tf.newaxis]
