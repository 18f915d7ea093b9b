"""The power spectrum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.statistics.bins import BinChoice, bin_contents
from flowpm_dist.statistics.measure import Window, located, mode_means, sample_of, whole


@dataclass(frozen=True)
class PowerSpectrum:
    """A measured power spectrum; unpacks as `k, power`.

    Attributes:
        k: the mean wavenumber of the modes of each bin, [bin] [h/Mpc]. It is NaN, as the power, in
            a bin without modes.
        power: the power in each bin, [bin], or [batch, bin] for a batch of universes [(Mpc/h)^3].
        modes: the number of modes in each bin, [bin]; k and -k are both counted.
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))


def binned_power(
    field: Field | tf.Tensor,
    box: Box | None = None,
    window: Window = None,
    interlaced: Field | tf.Tensor | None = None,
    bins: BinChoice = None,
) -> tf.Tensor:
    """Returns the power in each bin [(Mpc/h)^3], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: the box of a block.
        window, interlaced, bins: as for `power_spectrum`; interlaced is given as the field is.

    Returns:
        The power [bin], or [universe, bin] for the universes of a batch of which this rank has a
        block. It is the same on the ranks that share them. So a loss made of it must be divided by
        their number, or it counts once for each (see `meshimpl.mesh_function`).
    """
    box, sample = located(field, box, window, interlaced)
    return mode_means([sample], box, bins=bins)[..., 0, 0, :]


def power_spectrum(
    field: Any,
    box_size: Any = None,
    *,
    bins: BinChoice = None,
    window: Window = None,
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> PowerSpectrum:
    """Returns the spherically averaged power spectrum of a density or overdensity.

    The mode k = 0 is in no bin.

    Args:
        field: a `Field` (each rank measures its part), or a whole array [x, y, z] on one rank.
        box_size: of an array [Mpc/h], one number or three. A `Field` has its own.
        bins: edges [h/Mpc], a number of linear bins, or `Bins`; each holds the modes with
            low <= k < high. By default they are one fundamental mode wide, around its multiples, up
            to the smallest Nyquist wavenumber.
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
            unknown, the interlaced field is of another box, or the bins do not increase or hold no
            mode.
    """
    box, sample = sample_of(field, box_size, window, interlaced)
    k, modes = bin_contents(box, bins)
    power = whole(mode_means([sample], box, bins=bins), box)[..., 0, 0, :]
    return PowerSpectrum(k, power - shot_noise, modes)
