"""White noise that is the same field on any number of ranks, keyed by cell or by mode.

Noise keyed by (seed, global cell) depends on the shape of the grid. Noise keyed by (seed, mode)
keeps the large scales of a universe when its grid is refined, see `mode_noise`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from meshimpl import philox
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl
from meshimpl.operations.fft import spectral_shape
from meshimpl.operations.local import on_blocks

CELLS, MODES = 0, 1
"""Streams of the generator."""

_MODE_BITS = 21  # of each signed wavenumber in a mode's key


def _for_each_seed(seeds: tf.Tensor, draw: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    count = seeds.shape.num_elements()
    fields = [draw(seed) for seed in tf.unstack(tf.reshape(seeds, [-1]), num=count)]
    return fields[0] if count == 1 else tf.stack(fields)


@functools.cache
def _mode_rows(
    grid: tuple[int, ...], size: tuple[int, ...], dtype: tf.DType
) -> Callable[..., tf.Tensor]:
    """Returns compiled `f(begin [kz, ky, kx, pair], seed)`: a block's modes [rows, 64, pair]."""

    @tf.function(jit_compile=True, autograph=False)
    def rows(begin: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        places = [along + begin[i] for i, along in enumerate(philox.coordinates(size))]
        zyx = list(zip(places, reversed(grid), strict=True))
        half = key = tf.zeros_like(places[0])
        for place, n in zyx:
            half = tf.where(half == 0, _half(place, n), half)
        for place, n in zyx:
            number = tf.where(2 * place >= n, place - n, place)
            flipped = tf.where(2 * place == n, number, -number)
            number = tf.where(half < 0, flipped, number)
            key = key * 2**_MODE_BITS + number + 2 ** (_MODE_BITS - 1)
        first, second = philox.normal_pair(key, MODES, seed)
        scale = math.sqrt(math.prod(grid))
        real = tf.where(half == 0, first, first * math.sqrt(0.5))
        imaginary = second * math.sqrt(0.5) * tf.cast(half, tf.float64)
        return tf.cast(scale * tf.stack([real, imaginary], axis=-1), dtype)

    return rows


def _half(place: tf.Tensor, n: int) -> tf.Tensor:
    """Returns the half of an axis of n modes: 1, -1, or 0 for modes that are their own negative."""
    own_negative = (place == 0) | (2 * place == n)
    sign = tf.where(2 * place < n, tf.ones_like(place), -tf.ones_like(place))
    return tf.where(own_negative, tf.zeros_like(place), sign)


def white_noise(seed: Any, grid: Any, dtype: tf.DType = tf.float32) -> Any:
    """Returns a field of independent unit normal values, keyed by (seed, cell).

    The values are drawn in float64 and rounded, so that float32 and float64 give one universe.

    Args:
        seed: integer mtf tensor: a scalar, or [batch] for one field each.
        grid: the `mtf.Shape` of one field.
        dtype: float32 or float64.

    Returns:
        mtf tensor of shape seed.shape + grid.
    """

    def lower(impl: HvdSimdMeshImpl, seeds: tf.Tensor) -> tf.Tensor:
        begin = tf.cast(impl.slice_begin_tensor(grid), tf.int64)
        whole, size = grid.to_integer_list, impl.slice_shape(grid)
        return _for_each_seed(
            seeds, lambda one: philox.normal_block(whole, begin, size, CELLS, one, dtype)
        )

    seed = mtf.cast(seed, tf.int64)
    shape = mtf.Shape(seed.shape.dims + grid.dims)
    return on_blocks(lower, [seed], [(shape, dtype)], name="white_noise")[0]


def mode_noise(seed: Any, grid: Any, dtype: tf.DType = tf.float32) -> Any:
    """Returns the spectrum of independent unit normal values, keyed by (seed, mode).

    A mode has integer wavenumbers n = (nx, ny, nz). Its amplitude w(n), divided by the square root
    of the number of cells, is a complex normal deviate of unit variance, with w(-n) = conj w(n). It
    is the same on every grid where |nx|, |ny| and |nz| are below half the cells. A component that
    is half the cells counts as minus half. Such a mode is its own alias; on a finer grid it is not,
    and there it has another value. `irfft3d` gives the real field. The modes are drawn in float64
    and rounded before the transform. So the real fields of all layouts and dtypes agree up to the
    rounding of the transform.

    Args:
        seed: integer mtf tensor: a scalar, or [batch] for one spectrum each.
        grid: the `mtf.Shape` [x, y, z] of one field; each side is even and below 2^20.
        dtype: float32 or float64.

    Returns:
        mtf tensor of shape seed.shape + [kz, ky, kx, pair], as from `rfft3d`, not normalised.
    """

    modes = spectral_shape(grid, seed.mesh.impl)

    def lower(impl: HvdSimdMeshImpl, seeds: tf.Tensor) -> tf.Tensor:
        begin = tf.cast(impl.slice_begin_tensor(modes), tf.int64)
        size = impl.slice_shape(modes)[:3]
        rows = _mode_rows(tuple(grid.to_integer_list), tuple(size), dtype)
        return _for_each_seed(seeds, lambda one: philox.block_of_rows(rows(begin, one), size))

    seed = mtf.cast(seed, tf.int64)
    shape = mtf.Shape(seed.shape.dims + modes.dims)
    return on_blocks(lower, [seed], [(shape, dtype)], name="mode_noise")[0]
