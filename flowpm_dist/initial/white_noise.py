"""White noise, the same universe on any number of ranks."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.initial.options import Noise
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import pointwise
from meshimpl.operations.noise import mode_noise, white_noise

NOISES = get_args(Noise)
"""The kinds of noise: keyed by cell, or by mode."""


def noise_function(
    box: Box, kind: str = "cells", *, fixed: bool = False, paired: bool = False
) -> MeshFunction:
    """Returns `f(seed)`: unit normal white noise [..., x, y, z], the same on any number of ranks.

    Args:
        box: the box; each universe of a batch has its own seed.
        kind: "cells": the noise depends on the seed and the cell, and is reproduced to the bit.
            "nested": it depends on the seed and the mode, and is reproduced to rounding. A grid
            twice as fine in the same box keeps the modes (nx, ny, nz) of the coarse one where
            |nx|, |ny| and |nz| are below half the coarse grid's cells, and so its large scales.
        fixed: whether to give every mode its expected amplitude and keep its phase only.
        paired: whether to give the noise the opposite sign, which shifts all phases by pi. The mean
            over a fixed universe and its pair has far less sample variance (Angulo and Pontzen
            2016, arXiv:1603.05253).

    Args of f:
        seed: int64 of the box's `number_shape`.

    Raises:
        ValueError: if the kind is another one.
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
    """Checks white noise that a user gave, on all ranks together.

    Args:
        noise: the whole array, of which each rank checks its block, or this rank's block.
        box: the box that it is for.

    Raises:
        ValueError: on every rank, if its shape or dtype does not fit, or a value is not finite.
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
