"""Initial conditions up to the linear field: white noise and the amplitude of its modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology import LinearPower
from flowpm_dist.fields import Box
from flowpm_dist.spectral import to_field, to_spectrum
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.noise import mode_noise, white_noise
from meshimpl.operations.pointwise import pointwise

NOISES = ("cells", "nested")
"""Keyed by cell, or by mode."""


def noise_function(
    box: Box, kind: str = "cells", *, fixed: bool = False, paired: bool = False
) -> MeshFunction:
    """`f(seed)`: unit normal white noise [..., x, y, z], the same on any number of ranks.

    Args:
        box: grid; of a batch every universe has a seed of its own.
        kind: "cells": fixed by the seed and the cell, to the bit. "nested": by the seed and the
            mode, to rounding: a grid twice as fine in the same box keeps the modes (nx, ny, nz) of
            the coarse one exactly where |nx|, |ny| and |nz| are below half the coarse grid's cells,
            and so its large scales.
        fixed: give every mode its expected amplitude and keep its phase only.
        paired: with the opposite sign: all phases turned by pi. The mean over a fixed universe and
            its pair has far less sample variance (Angulo and Pontzen 2016, arXiv:1603.05253).

    Args of f:
        seed: int64 of the box's `number_shape`.

    Raises:
        ValueError: another kind.
    """
    if kind not in NOISES:
        raise ValueError(f"noise {kind!r} is not one of {', '.join(map(repr, NOISES))}")
    space = mtf.Shape(box.shape.dims[-3:])

    def build(_: Any, seed: Any) -> Any:
        if kind == "nested":
            spectrum = mode_noise(seed, space, box.dtype)
            field = to_field(_unit_modes(spectrum, box) if fixed else spectrum, box)
        else:
            field = white_noise(seed, space, box.dtype)
            field = _fixed(field, box) if fixed else field
        return -field if paired else field

    return box.function(build, seed=(box.number_shape, tf.int64))


def white_noise_function(box: Box) -> MeshFunction:
    """`f(seed)`: unit normal white noise [..., x, y, z], fixed by the seed and the cell alone."""
    return noise_function(box)


def fixed(box: Box) -> MeshFunction:
    """`f(white_noise)`: the same phases, and each mode's amplitude the expected one.

    Over the square root of the number of cells every mode of the result has modulus 1 (modes that
    are exactly 0 stay so).
    """
    return box.function(lambda _, noise: _fixed(noise, box), white_noise=box.shape)


def _fixed(noise: Any, box: Box) -> Any:
    return to_field(_unit_modes(to_spectrum(noise), box), box)


def _unit_modes(spectrum: Any, box: Box) -> Any:
    scale = math.sqrt(box.cells)

    def unit(value: tf.Tensor) -> tf.Tensor:
        square = tf.reduce_sum(tf.square(value), axis=-1, keepdims=True)
        positive = square > 0
        modulus = tf.sqrt(tf.where(positive, square, tf.ones_like(square)))
        return tf.where(positive, scale * value / modulus, tf.zeros_like(value))

    return pointwise(unit, spectrum)


def linear_amplitude(box: Box, power: LinearPower) -> tf.Tensor:
    """sqrt(P(k) / cell volume) of this rank's modes, without growth.

    Times the unnormalised spectrum of white noise it gives the spectrum of the linear overdensity
    before growth. Evaluated in float64. Where the squared sides of the box are commensurable, as in
    a cube, the squared wavenumbers are multiples of one unit, and P is evaluated once for each of
    these; elsewhere plane by plane, so that little memory is needed.

    Args:
        box: grid and size, of one universe or of each.
        power: its `unscaled(k)` [(Mpc/h)^3].

    Returns:
        [kz, ky, kx] of the box's dtype.
    """

    def amplitude(k: Any) -> tf.Tensor:
        spectrum = power.unscaled(k) / (box.volume / box.cells)
        positive = spectrum > 0  # the mean mode: its derivative by the parameters is 0, not NaN
        root = tf.sqrt(tf.where(positive, spectrum, tf.ones_like(spectrum)))
        return tf.where(positive, root, tf.zeros_like(root))

    lattice = _squares(box)
    if lattice is not None:
        unit, multiples = lattice
        count = 1 + sum(m * (n // 2) ** 2 for m, n in zip(multiples, box.grid, strict=True))
        table = amplitude(np.sqrt(unit * np.arange(count, dtype=np.float64)))
        return _look_up(table, lambda: _square_index(box, multiples, count), box.dtype)
    kx, ky, kz = box.wavenumbers()
    square = tf.constant(kx[0] ** 2 + ky[0] ** 2)

    def plane(k: tf.Tensor) -> tf.Tensor:
        return tf.cast(amplitude(tf.sqrt(square + k**2)), box.dtype)

    return tf.map_fn(plane, tf.constant(kz[:, 0, 0]), fn_output_signature=box.dtype)


def _squares(box: Box) -> tuple[float, tuple[int, ...]] | None:
    """u and (mx, my, mz) with k^2 = u (mx nx^2 + my ny^2 + mz nz^2), where that saves work."""
    longest = max(box.size)
    exact = [(longest / s) ** 2 for s in box.size]
    ratios = [Fraction(r).limit_denominator(1000) for r in exact]
    common = math.lcm(*(r.denominator for r in ratios))
    multiples = tuple(int(r * common) for r in ratios)
    agree = all(math.isclose(r, e, rel_tol=1e-14) for r, e in zip(ratios, exact, strict=True))
    count = sum(m * (n // 2) ** 2 for m, n in zip(multiples, box.grid, strict=True))
    if not agree or count > box.cells // 2:
        return None
    return (2 * math.pi / longest) ** 2 / common, multiples


def _square_index(box: Box, multiples: tuple[int, ...], count: int) -> tf.Tensor:
    """mx nx^2 + my ny^2 + mz nz^2 of this rank's modes, int32 [kz, ky, kx] below `count`."""
    numbers = box.pencils.mode_numbers()
    x, y, z = (
        tf.constant(np.minimum(m * n**2, count - 1), tf.int32)  # padded modes hold no power
        for m, n in zip(multiples, numbers, strict=True)
    )
    return tf.minimum(z + (x + y), count - 1)


def _look_up(table: tf.Tensor, index: Callable[[], tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """table[index()] in `dtype`; the gradient sums in float64 and makes the index anew."""

    @tf.custom_gradient
    def look_up(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            flat = tf.reshape(tf.cast(dy, tf.float64), [-1])
            places = tf.reshape(index(), [-1])
            return tf.math.unsorted_segment_sum(flat, places, values.shape[0])

        return tf.gather(tf.cast(values, dtype), index()), gradient

    return look_up(table)


def check_white_noise(noise: np.ndarray, box: Box) -> None:
    """Raise a `ValueError`, on every rank, that says what is wrong with given white noise.

    Args:
        noise: the whole array, of which each rank looks at its block, or this rank's block.
        box: that it is for.
    """
    whole = tuple(box.shape.to_integer_list)
    block = box.local_batch + box.block
    if noise.shape not in (whole, block):
        raise ValueError(f"white_noise has shape {noise.shape}; the grid is {whole}")
    if not np.issubdtype(noise.dtype, np.floating):
        raise ValueError(f"white_noise is {noise.dtype}; real floating values are needed")
    if noise.shape == whole:
        begin = (box.batch_offset,) * len(box.local_batch) + box.offset
        noise = noise[tuple(slice(b, b + n) for b, n in zip(begin, block, strict=True))]
    bad = noise.size - np.count_nonzero(np.isfinite(noise))
    total = int(box.mesh.world.allreduce(tf.constant(bad, tf.int64)))
    if total:
        raise ValueError(f"white_noise has {total} values that are not finite")
