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
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor
from meshimpl.operations.fft import spectral_shape

CELLS, MODES = 0, 1
"""The generator's streams."""

_MODE_BITS = 21  # of each signed wavenumber in a mode's key


class WhiteNoiseOperation(mtf.Operation):
    """Unit normal noise that depends only on the seed and on the cell's place in the grid."""

    def __init__(self, seed: Any, grid: Any, dtype: tf.DType, name: str | None = None) -> None:
        super().__init__([seed], name=name or "white_noise")
        self._grid = grid
        self._outputs = [mtf.Tensor(self, mtf.Shape(seed.shape.dims + grid.dims), dtype)]

    def lower(self, lowering: Any) -> None:
        """Lowers to draws of this rank's cells, without communication."""
        impl = lowering.mesh_impl(self)
        (output,) = self.outputs
        begin = tf.cast(impl.slice_begin_tensor(self._grid), tf.int64)
        whole, size = self._grid.to_integer_list, impl.slice_shape(self._grid)

        def draw(seed: tf.Tensor) -> tf.Tensor:
            return philox.normal_block(whole, begin, size, CELLS, seed, output.dtype)

        _lower_for_each_seed(self, lowering, draw)


class ModeNoiseOperation(mtf.Operation):
    """The spectrum of white noise whose modes depend only on the seed and on their wavenumbers."""

    def __init__(self, seed: Any, grid: Any, dtype: tf.DType, name: str | None = None) -> None:
        super().__init__([seed], name=name or "mode_noise")
        self._grid = grid.to_integer_list
        self._modes = spectral_shape(grid, seed.mesh.impl)
        shape = mtf.Shape(seed.shape.dims + self._modes.dims)
        self._outputs = [mtf.Tensor(self, shape, dtype)]

    def lower(self, lowering: Any) -> None:
        """Lowers to draws of this rank's modes, without communication."""
        impl = lowering.mesh_impl(self)
        begin = tf.cast(impl.slice_begin_tensor(self._modes), tf.int64)
        size = impl.slice_shape(self._modes)[:3]
        rows = _mode_rows(tuple(self._grid), tuple(size), self.outputs[0].dtype)
        _lower_for_each_seed(
            self, lowering, lambda seed: philox.block_of_rows(rows(begin, seed), size)
        )


def _lower_for_each_seed(
    operation: Any, lowering: Any, draw: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    (output,) = operation.outputs
    seeds = lowering.tensors[operation.inputs[0]].to_laid_out_tensor().one_slice
    count = seeds.shape.num_elements()
    fields = [draw(seed) for seed in tf.unstack(tf.reshape(seeds, [-1]), num=count)]
    stacked = fields[0] if count == 1 else tf.stack(fields)
    value = tf.reshape(stacked, lowering.mesh_impl(operation).slice_shape(output.shape))
    lowering.set_tensor_lowering(output, LaidOutTensor([value]))


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


def white_noise(seed: Any, grid: Any, dtype: tf.DType = tf.float32, name: str | None = None) -> Any:
    """Returns a field of independent unit normal values, keyed by (seed, cell).

    The values are drawn in float64 and rounded, so that float32 and float64 give one universe.

    Args:
        seed: integer mtf tensor: a scalar, or [batch] for one field each.
        grid: the `mtf.Shape` of one field.
        dtype: float32 or float64.
        name: the name of the operation.

    Returns:
        mtf tensor of shape seed.shape + grid.
    """
    return WhiteNoiseOperation(mtf.cast(seed, tf.int64), grid, dtype, name).outputs[0]


def mode_noise(seed: Any, grid: Any, dtype: tf.DType = tf.float32, name: str | None = None) -> Any:
    """Returns the spectrum of independent unit normal values, keyed by (seed, mode).

    Divided by the square root of the number of cells, the amplitude w(n) of the mode with integer
    wavenumbers n = (nx, ny, nz) is a complex normal deviate of unit variance, with
    w(-n) = conj w(n). It is the same on every grid where |nx|, |ny| and |nz| are below half the
    cells. A component of half the cells counts as minus half. Such a mode differs from that of a
    finer grid, where it is not its own alias. `irfft3d` gives the real field. The modes are drawn
    in float64 and rounded before that, so layouts and dtypes agree to the rounding of the
    transform.

    Args:
        seed: integer mtf tensor: a scalar, or [batch] for one spectrum each.
        grid: the `mtf.Shape` [x, y, z] of one field, even and below 2^20 each.
        dtype: float32 or float64.
        name: the name of the operation.

    Returns:
        mtf tensor of shape seed.shape + [kz, ky, kx, pair], not normalised, as that of `rfft3d`.
    """
    return ModeNoiseOperation(mtf.cast(seed, tf.int64), grid, dtype, name).outputs[0]
