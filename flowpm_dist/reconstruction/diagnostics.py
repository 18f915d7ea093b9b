"""Diagnostics of the convergence of chains: modes of the largest scales, R-hat, ESS."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box

LARGEST = 2
"""Greatest wave number of the modes that are watched, in waves across the box."""


def wave_numbers(largest: int = LARGEST) -> np.ndarray:
    """Returns the wave vectors (nx, ny, nz) of half of all modes up to a radius, [mode, 3].

    They are whole numbers of waves across the box, without the mode 0. The other half are their
    opposites.
    """
    along = range(-largest, largest + 1)
    ball = (n for n in itertools.product(along, repeat=3) if 0 < sum(x * x for x in n))
    inside = (n for n in ball if sum(x * x for x in n) <= largest**2)
    return np.array([n for n in inside if n > (0, 0, 0)])


def large_modes(field: tf.Tensor, box: Box, largest: int = LARGEST) -> np.ndarray:
    """Returns the real and imaginary parts of each chain's modes of the largest scales.

    If the field is unit normal white noise, each part is unit normal. Must be called on all ranks
    together.

    Args:
        field: this rank's block [..., x, y, z].
        box: the box of the field; its batch dimension holds the chains.
        largest: the greatest wave number, in waves across the box.

    Returns:
        The parts of all chains, float64 [..., 2 x mode], on every rank.
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
    """The convergence of several numbers that chains have drawn.

    Attributes:
        rhat: the rank-normalised split R-hat of each number [n] (Vehtari and others 2021).
        ess: the effective sample size of each number, of all chains together [n].
    """

    rhat: np.ndarray
    ess: np.ndarray


def convergence(draws: np.ndarray) -> Convergence:
    """Returns the convergence of draws, as ArviZ computes it.

    Args:
        draws: [draw, chain, n], with at least 4 draws.

    Raises:
        ValueError: if there are fewer draws.
    """
    from arviz_stats.base import array_stats

    if len(draws) < 4:
        raise ValueError(f"{len(draws)} draws: convergence needs at least 4")
    axes = {"chain_axis": 1, "draw_axis": 0}
    return Convergence(array_stats.rhat(draws, **axes), array_stats.ess(draws, **axes))
