"""TensorFlow's random functions on the counter-based generator."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from meshimpl import philox

_TWO_SIGMA = 0.022750131948179195  # probability of a standard normal below -2


def draw(
    tf_fn: Any,
    index: tf.Tensor,
    stream: tf.Tensor,
    seed: int,
    dtype: Any = tf.float32,
    name: str | None = None,
    **kwargs: Any,
) -> tf.Tensor:
    """Draws what `tf_fn(shape, dtype=..., **kwargs)` draws, with values fixed by their place.

    Args:
        tf_fn: `tf.random.uniform`, `tf.random.normal` or `tf.random.truncated_normal`.
        index: int64, the place of each value.
        stream, seed: int64 scalars, see `meshimpl.philox`.
        dtype: of the result.
        name: ignored.
        **kwargs: minval and maxval, or mean and stddev.

    Raises:
        NotImplementedError: `tf_fn` is another function.
    """
    del name
    kind = getattr(tf_fn, "__name__", str(tf_fn))
    dtype = tf.as_dtype(dtype)
    if kind in ("random_uniform", "uniform"):
        return _uniform(philox.uniform(index, stream, seed), dtype, **kwargs)
    if kind in ("random_normal", "normal"):
        return _scaled(philox.normal(index, stream, seed), dtype, **kwargs)
    if kind == "truncated_normal":
        u = philox.uniform(index, stream, seed)
        inside = _TWO_SIGMA + u * (1.0 - 2.0 * _TWO_SIGMA)
        return _scaled(tf.math.ndtri(inside), dtype, **kwargs)
    raise NotImplementedError(
        f"random values from {kind!r}: uniform, normal and truncated_normal are available"
    )


def _uniform(u: tf.Tensor, dtype: tf.DType, minval: Any = 0, maxval: Any = None) -> tf.Tensor:
    if dtype.is_integer:
        if maxval is None:
            raise ValueError("maxval must be given for an integer dtype")
        low, high = tf.cast(minval, tf.float64), tf.cast(maxval, tf.float64)
        return tf.cast(tf.minimum(tf.floor(low + u * (high - low)), high - 1.0), dtype)
    low = tf.cast(minval, dtype)
    high = tf.cast(1 if maxval is None else maxval, dtype)
    # Rounding to a narrower dtype must not reach 1: keep as many bits as it holds.
    bits = {tf.float32: 24, tf.float16: 11, tf.bfloat16: 8}.get(dtype)
    if bits is not None:
        u = tf.floor(u * 2.0**bits) * 2.0**-bits
    return low + tf.cast(u, dtype) * (high - low)


def _scaled(z: tf.Tensor, dtype: tf.DType, mean: Any = 0.0, stddev: Any = 1.0) -> tf.Tensor:
    return tf.cast(z, dtype) * tf.cast(stddev, dtype) + tf.cast(mean, dtype)
