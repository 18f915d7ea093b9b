"""Whether chains have found the same posterior: modes of the largest scales, R-hat, ESS."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box

LARGEST = 2
"""Waves across the box along each axis, at most, of the modes that are watched."""


def wave_numbers(largest: int = LARGEST) -> np.ndarray:
    """Whole numbers (nx, ny, nz) of half of all modes up to a radius, without 0; [mode, 3]."""
    along = range(-largest, largest + 1)
    ball = (n for n in itertools.product(along, repeat=3) if 0 < sum(x * x for x in n))
    inside = (n for n in ball if sum(x * x for x in n) <= largest**2)
    return np.array([n for n in inside if n > (0, 0, 0)])


def large_modes(field: tf.Tensor, box: Box, largest: int = LARGEST) -> np.ndarray:
    """Real and imaginary parts of the modes of the largest scales of each chain.

    Of unit normal white noise each is unit normal. On all ranks together.

    Args:
        field: block [..., x, y, z].
        box: of the field; its batch are chains.
        largest: waves across the box.

    Returns:
        float64 [..., 2 x mode] of all chains, on every rank.
    """
    waves = wave_numbers(largest)
    axes = []
    for axis, (n, begin, cells) in enumerate(zip(box.block, box.offset, box.grid, strict=True)):
        phase = -2 * np.pi / cells * np.outer(begin + np.arange(n), waves[:, axis])
        axes.append(tf.constant(np.exp(1j * phase)))
    values = tf.cast(tf.reshape(field, [-1, *box.block]), tf.complex128)
    part = tf.einsum("bxyz,zm->bxym", values, axes[2])
    part = tf.einsum("bxym,ym->bxm", part, axes[1])
    part = tf.einsum("bxm,xm->bm", part, axes[0])
    both = tf.concat([tf.math.real(part), tf.math.imag(part)], axis=-1) * np.sqrt(2 / box.cells)
    if box.batch is None:
        return box.mesh.world.allreduce(both[0]).numpy()
    after = box.batch - box.batch_offset - box.local_batch[0]
    return box.mesh.world.allreduce(tf.pad(both, [[box.batch_offset, after], [0, 0]])).numpy()


@dataclass(frozen=True)
class Convergence:
    """Of numbers that chains have drawn.

    Attributes:
        rhat: rank-normalised split R-hat of each number [n] (Vehtari and others 2021).
        ess: effective number of draws of each, of all chains together [n].
    """

    rhat: np.ndarray
    ess: np.ndarray


def convergence(draws: np.ndarray) -> Convergence:
    """Of draws [draw, chain, n], at least 4 of them, by ArviZ.

    Raises:
        ValueError: fewer draws.
    """
    from arviz_stats.base import array_stats

    if len(draws) < 4:
        raise ValueError(f"{len(draws)} draws: convergence needs at least 4")
    axes = {"chain_axis": 1, "draw_axis": 0}
    return Convergence(array_stats.rhat(draws, **axes), array_stats.ess(draws, **axes))
