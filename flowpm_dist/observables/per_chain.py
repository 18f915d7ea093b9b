"""Numbers of several chains as factors of their fields."""

from __future__ import annotations

import tensorflow as tf

from flowpm_dist.grid.box import Box


def local_values(values: tf.Tensor, box: Box) -> tf.Tensor:
    """Returns the values of this rank's chains, shaped to multiply their fields.

    Args:
        values: a number, or one for each chain of the box [chain].
        box: whose batch are the chains.

    Returns:
        [..., 1, 1, 1] in the box's dtype.
    """
    if box.batch is not None:
        values = tf.broadcast_to(values, [box.batch])
        values = values[box.batch_offset : box.batch_offset + box.local_batch[0]]
    return as_factor(values, box)


def as_factor(values: tf.Tensor, box: Box) -> tf.Tensor:
    """Returns numbers of this rank's chains, shaped to multiply their fields [..., 1, 1, 1]."""
    return tf.cast(values, box.dtype)[..., tf.newaxis, tf.newaxis, tf.newaxis]
