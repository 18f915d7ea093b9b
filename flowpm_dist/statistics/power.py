"""The power spectrum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.statistics.bins import bin_contents
from flowpm_dist.statistics.measure import Sample, Window, mode_means, sample_of, whole


@dataclass(frozen=True)
class PowerSpectrum:
    """A measured power spectrum; unpacks as `k, power`.

    Attributes:
        k: mean wavenumber of the modes of each bin [h/Mpc].
        power: [(Mpc/h)^3]; of a batch of universes [batch, bin].
        modes: number of modes, k and -k counted both.
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))


def binned_power(
    block: tf.Tensor, box: Box, window: Window = None, interlaced: tf.Tensor | None = None
) -> tf.Tensor:
    """Power of each bin [(Mpc/h)^3], differentiable.

    Args:
        block: this rank's block of a density or overdensity, [..., x, y, z].
        box: it lives in.
        window, interlaced: as for `power_spectrum`; interlaced is a block.

    Returns:
        [bin] or, of a batch, [universe, bin] of the universes this rank has a block of; the same on
        the ranks that share them. So a loss made of it is divided by their number, or counts once
        for each (see `meshimpl.mesh_function`).
    """
    return mode_means([Sample(block, window, interlaced)], box)[..., 0, 0, :]


def power_spectrum(
    field: Any,
    box_size: Any = None,
    *,
    window: Window = None,
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> PowerSpectrum:
    """Spherically averaged power spectrum of a density or overdensity.

    Bins are one fundamental mode wide, up to the Nyquist wavenumber. The mean does not count.

    Args:
        field: a `Field` (each rank measures its part), or a whole array [x, y, z] on one rank.
        box_size: [Mpc/h], one number or three; by default the `Field`'s own.
        window: "cic" divides each mode by the squared cloud-in-cell window.
        shot_noise: subtracted [(Mpc/h)^3]; V / N_particles for Poisson sampling, which particles
            that started on a lattice do not have at early times.
        interlaced: the density of the same particles moved by half a cell along each axis; its
            mean with the first, moved back, has lost the leading aliases (arXiv:1512.07295).

    Returns:
        The same on every rank.

    Raises:
        ValueError: not a scalar field, another box size than the field's own, an unknown window, or
            an interlaced field of another box.
    """
    box, sample = sample_of(field, box_size, window, interlaced)
    k, modes = bin_contents(box)
    power = whole(mode_means([sample], box), box)[..., 0, 0, :]
    return PowerSpectrum(k, power - shot_noise, modes)
