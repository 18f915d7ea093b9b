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
        k: the mean wavenumber of the modes of each bin, [bin] [h/Mpc].
        power: the power in each bin, [bin], or [batch, bin] for a batch of universes [(Mpc/h)^3].
        modes: the number of modes in each bin, [bin]; k and -k are both counted.
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))


def binned_power(
    block: tf.Tensor, box: Box, window: Window = None, interlaced: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns the power in each bin [(Mpc/h)^3], differentiable.

    Args:
        block: this rank's block of a density or overdensity, [..., x, y, z].
        box: the box of the density.
        window, interlaced: as for `power_spectrum`; interlaced is a block.

    Returns:
        The power [bin], or [universe, bin] for the universes of a batch of which this rank has a
        block. It is the same on the ranks that share them. So a loss made of it must be divided by
        their number, or it counts once for each (see `meshimpl.mesh_function`).
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
    """Returns the spherically averaged power spectrum of a density or overdensity.

    Bins are one fundamental mode wide, up to the Nyquist wavenumber. The mode k = 0 is left out.

    Args:
        field: a `Field` (each rank measures its part), or a whole array [x, y, z] on one rank.
        box_size: [Mpc/h], one number or three; by default the `Field`'s own.
        window: "cic" divides each mode by the squared cloud-in-cell window.
        shot_noise: the shot noise to subtract [(Mpc/h)^3]: V / N_particles for Poisson sampling.
            Particles that started on a lattice have none at early times.
        interlaced: the density of the same particles moved by half a cell along each axis. Its
            mean with the first, after moving it back, is free of the leading aliases
            (arXiv:1512.07295).

    Returns:
        The power spectrum, the same on every rank.

    Raises:
        ValueError: if the field is not scalar, box_size is not the field's own, the window is
            unknown, or the interlaced field is of another box.
    """
    box, sample = sample_of(field, box_size, window, interlaced)
    k, modes = bin_contents(box)
    power = whole(mode_means([sample], box), box)[..., 0, 0, :]
    return PowerSpectrum(k, power - shot_noise, modes)
