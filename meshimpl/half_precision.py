"""Pieces of a message in half precision: float16 numbers, and behind them the piece's scale.

The largest number of a piece becomes `LARGEST`. float16 keeps 11 bits of numbers down to 2^-29 of
it, and fewer below. bfloat16 would need no scale, but keeps 8 bits.
"""

from __future__ import annotations

import tensorflow as tf

LARGEST = 2.0**15
"""Of a piece that travels; float16 ends at 65504."""
SMALLEST = 1e-30
"""A piece in which all numbers are smaller is scaled as if this were the largest."""
SCALE = 2
"""The length of a scale, a float32, in numbers of float16."""


def halved(pieces: tf.Tensor) -> tf.Tensor:
    """Returns pieces as they travel.

    Args:
        pieces: float32 or complex64, [n, ...].

    Returns:
        float16 [n, m + SCALE], where a piece has m real numbers. One that is not finite stays so.

    Raises:
        TypeError: another dtype.
    """
    if pieces.dtype not in (tf.float32, tf.complex64):
        raise TypeError(
            f"messages in half precision are of float32 or complex64, not {pieces.dtype.name}"
        )
    numbers = tf.reshape(tf.bitcast(pieces, tf.float32), [pieces.shape[0], -1])
    # Less than half the time of the maximum of |x|, which TensorFlow does not vectorise.
    highest, lowest = (f(numbers, axis=1, keepdims=True) for f in (tf.reduce_max, tf.reduce_min))
    largest = tf.maximum(highest, -lowest)
    scale = tf.maximum(largest, SMALLEST) / LARGEST
    carried = tf.cast(numbers * (1.0 / scale), tf.float16)
    return tf.concat([carried, tf.reshape(tf.bitcast(scale, tf.float16), [-1, SCALE])], axis=1)


def restored(carried: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Returns the pieces that `halved` has packed, rounded to float16.

    Args:
        carried: the result of `halved`.
        shape: of the pieces.
        dtype: float32 or complex64.
    """
    scale = tf.bitcast(carried[:, -SCALE:], tf.float32)[:, tf.newaxis]
    numbers = tf.cast(carried[:, :-SCALE], tf.float32) * scale
    if dtype.is_complex:
        numbers = tf.reshape(numbers, [*shape, 2])
    return tf.reshape(tf.bitcast(numbers, dtype), shape)
