"""White noise, the same universe on any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import to_field, to_spectrum
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
