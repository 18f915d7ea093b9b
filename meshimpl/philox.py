"""A counter-based random number generator: the value depends on a key and a place, on nothing else.

Philox4x32 with ten rounds (Salmon and others 2011, "Parallel random numbers: as easy as 1, 2, 3").
Each rank computes the numbers of its own cells; no layout, order or number of threads changes them.

Normal deviates involve log and cos, whose vectorised and scalar code paths may differ in the last
bit. So everything is computed in one compiled kernel on rows of 64: no element ever falls in a
scalar remainder, wherever a block begins or ends, and equal places give equal bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LANES = 64
_TWO_SIGMA = 0.022750131948179195  # probability of a standard normal below -2


def _word(x: tf.Tensor, high: bool) -> tf.Tensor:
    x = tf.bitcast(tf.cast(x, tf.int64), tf.uint64)
    shifted = tf.bitwise.right_shift(x, tf.constant(32, tf.uint64)) if high else x
    return tf.bitwise.bitwise_and(shifted, tf.constant(_MASK, tf.uint64))


def philox4x32(counter: Sequence[tf.Tensor], key: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Ten rounds on 32-bit words kept in uint64 tensors.

    Args:
        counter: four tensors of one shape.
        key: two tensors that broadcast with them.

    Returns:
        Four tensors of 32 random bits each.
    """
    mask, half = tf.constant(_MASK, tf.uint64), tf.constant(32, tf.uint64)
    xor = tf.bitwise.bitwise_xor
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * tf.constant(_MULTIPLIERS[0], tf.uint64)
        p1 = c2 * tf.constant(_MULTIPLIERS[1], tf.uint64)
        c0, c1, c2, c3 = (
            xor(xor(tf.bitwise.right_shift(p1, half), c1), k0),
            tf.bitwise.bitwise_and(p1, mask),
            xor(xor(tf.bitwise.right_shift(p0, half), c3), k1),
            tf.bitwise.bitwise_and(p0, mask),
        )
        k0 = tf.bitwise.bitwise_and(k0 + tf.constant(_WEYL[0], tf.uint64), mask)
        k1 = tf.bitwise.bitwise_and(k1 + tf.constant(_WEYL[1], tf.uint64), mask)
    return [c0, c1, c2, c3]


def _bits(index: tf.Tensor, stream: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
    counter = [_word(index, False), _word(index, True)]
    counter += [w + tf.zeros_like(counter[0]) for w in (_word(stream, False), _word(stream, True))]
    return philox4x32(counter, [_word(seed, False), _word(seed, True)])


def _unit(high: tf.Tensor, low: tf.Tensor) -> tf.Tensor:
    """53 random bits as a float64 in [0, 1)."""
    top = tf.bitwise.left_shift(high, tf.constant(21, tf.uint64))
    bits = tf.bitwise.bitwise_or(top, tf.bitwise.right_shift(low, tf.constant(11, tf.uint64)))
    return tf.cast(tf.bitcast(bits, tf.int64), tf.float64) * 2.0**-53


def uniform_pair(counter: Sequence[np.ndarray | int], seed: int) -> np.ndarray:
    """Two independent uniform deviates in [0, 1) for each place that four words name. Eager.

    `uniform` and `normal` use counters whose last word is the upper half of `stream`.

    Args:
        counter: four words, from 0 to 2^32 - 1, which broadcast to one shape [n].
        seed: from 0 to 2^63 - 1.

    Returns:
        float64 [2, n].
    """
    words = [tf.constant(np.array(word)) for word in np.broadcast_arrays(*counter)]
    key = [tf.constant(seed & _MASK, tf.uint64), tf.constant(seed >> 32, tf.uint64)]
    bits = philox4x32([tf.cast(word, tf.uint64) for word in words], key)
    return np.stack([_unit(*bits[:2]).numpy(), _unit(*bits[2:]).numpy()])


@tf.function(jit_compile=True, autograph=False)
def _uniform_rows(index: tf.Tensor, stream: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    bits = _bits(index, stream, seed)
    return _unit(bits[0], bits[1])


def normal_pair(
    index: tf.Tensor, stream: tf.Tensor | int, seed: tf.Tensor | int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Two independent standard normal deviates of each place (Box and Muller 1958), float64.

    To be called in compiled code, on rows: see `coordinates`. `normal` returns the first.
    """
    bits = _bits(index, tf.convert_to_tensor(stream), tf.convert_to_tensor(seed))
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - _unit(bits[0], bits[1])))
    angle = (2.0 * math.pi) * _unit(bits[2], bits[3])
    return radius * tf.cos(angle), radius * tf.sin(angle)


@tf.function(jit_compile=True, autograph=False)
def _normal_rows(index: tf.Tensor, stream: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return normal_pair(index, stream, seed)[0]


def _by_rows(
    kernel: tf.types.experimental.PolymorphicFunction,
    index: tf.Tensor,
    stream: tf.Tensor,
    seed: tf.Tensor,
) -> tf.Tensor:
    shape = index.shape
    count = shape.num_elements()
    flat = tf.pad(tf.reshape(index, [-1]), [[0, -count % _LANES]])
    rows = tf.reshape(flat, [-1, _LANES])
    values = kernel(rows, tf.cast(stream, tf.int64), tf.cast(seed, tf.int64))
    return tf.reshape(tf.reshape(values, [-1])[:count], shape)


def uniform(index: tf.Tensor, stream: tf.Tensor | int, seed: tf.Tensor | int) -> tf.Tensor:
    """Uniform deviates in [0, 1).

    Args:
        index: int64, the place of each value.
        stream: int64 scalar; different streams of one seed are independent.
        seed: int64 scalar.

    Returns:
        float64, the shape of `index`.
    """
    return _by_rows(_uniform_rows, index, tf.convert_to_tensor(stream), tf.convert_to_tensor(seed))


def normal(index: tf.Tensor, stream: tf.Tensor | int, seed: tf.Tensor | int) -> tf.Tensor:
    """Standard normal deviates (Box-Muller); arguments and result as for `uniform`."""
    return _by_rows(_normal_rows, index, tf.convert_to_tensor(stream), tf.convert_to_tensor(seed))


def normal_block(
    shape: Sequence[int],
    begin: tf.Tensor,
    size: Sequence[int],
    stream: tf.Tensor | int,
    seed: tf.Tensor | int,
    dtype: tf.DType = tf.float64,
) -> tf.Tensor:
    """`normal` at `global_index(shape, begin, size)`, to the bit, in one pass without temporaries.

    Args:
        shape: shape of the whole array.
        begin: place where the block starts, int64 of shape [ndims].
        size: shape of the block.
        stream, seed: int64 scalars, as for `normal`.
        dtype: to which the float64 values are rounded.

    Returns:
        dtype, of shape `size`.
    """
    kernel = _normal_block_rows(tuple(shape), tuple(size), dtype)
    rows = kernel(begin, tf.cast(stream, tf.int64), tf.cast(seed, tf.int64))
    return block_of_rows(rows, size)


@functools.cache
def _normal_block_rows(
    shape: tuple[int, ...], size: tuple[int, ...], dtype: tf.DType
) -> Callable[..., tf.Tensor]:
    @tf.function(jit_compile=True, autograph=False)
    def rows(begin: tf.Tensor, stream: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        index = tf.constant(0, tf.int64)
        for axis, along in enumerate(coordinates(size)):
            index = index * shape[axis] + along + begin[axis]
        return tf.cast(normal_pair(index, stream, seed)[0], dtype)

    return rows


def coordinates(size: Sequence[int]) -> list[tf.Tensor]:
    """The coordinates of a block's cells in rows of 64, for compiled code; the last row runs over.

    Returns:
        For each axis int64 of shape [rows, 64].
    """
    rows = -(-math.prod(size) // _LANES)
    places = tf.reshape(tf.range(rows * _LANES, dtype=tf.int64), [rows, _LANES])
    # The compiler divides by a known 32-bit number without a division.
    left = tf.cast(places, tf.uint32 if rows * _LANES < 2**32 else tf.uint64)
    result = []
    for n in reversed(size):
        quotient = left // tf.constant(n, left.dtype)
        result.append(tf.cast(left - quotient * tf.constant(n, left.dtype), tf.int64))
        left = quotient
    return result[::-1]


def block_of_rows(rows: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """The block of which `rows`, of shape [rows, 64, ...], has the values: [*size, ...]."""
    trailing = rows.shape[2:].as_list()
    flat = tf.reshape(rows, [-1, *trailing])
    count = math.prod(size)
    if flat.shape[0] != count:
        flat = flat[:count]
    return tf.reshape(flat, [*size, *trailing])


def global_index(
    shape: Sequence[int], begin: Sequence[int | tf.Tensor], size: Sequence[int]
) -> tf.Tensor:
    """Row-major places, in an array of `shape`, of the block of `size` that starts at `begin`.

    Returns:
        int64 of shape `size`.
    """
    index = tf.zeros([1] * len(shape), tf.int64)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = tf.range(size[axis], dtype=tf.int64) + tf.cast(begin[axis], tf.int64)
        view = [1] * len(shape)
        view[axis] = size[axis]
        index = index + tf.reshape(along * stride, view)
        stride *= shape[axis]
    return tf.reshape(index, size)


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
        stream, seed: int64 scalars, as for `uniform`.
        dtype: dtype of the result.
        name: ignored.
        **kwargs: minval and maxval, or mean and stddev.

    Raises:
        NotImplementedError: `tf_fn` is another function.
    """
    del name
    kind = getattr(tf_fn, "__name__", str(tf_fn))
    dtype = tf.as_dtype(dtype)
    if kind in ("random_uniform", "uniform"):
        return _uniform(uniform(index, stream, seed), dtype, **kwargs)
    if kind in ("random_normal", "normal"):
        return _scaled(normal(index, stream, seed), dtype, **kwargs)
    if kind == "truncated_normal":
        u = uniform(index, stream, seed)
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
