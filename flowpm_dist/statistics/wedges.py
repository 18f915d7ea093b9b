"""The power spectrum in wedges of direction, P(k, mu), about a fixed line of sight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.particle_mesh.redshift_space import axis_number
from flowpm_dist.statistics.bins import BinChoice, Binning, binning, contents
from flowpm_dist.statistics.measure import Window, located, mode_means, sample_of, whole


@dataclass(frozen=True)
class Wedges:
    """A measured power spectrum in wedges; unpacks as `k, mu, power`.

    Each array is [wedge, bin], the power of a batch [batch, wedge, bin]. Where there are no modes,
    k, mu and power are NaN.

    Attributes:
        k: mean wavenumber of the modes [h/Mpc].
        mu: mean |mu| of the modes.
        power: P(k, mu) [(Mpc/h)^3].
        modes: number of modes, k and -k counted both.
        edges: of the wedges in |mu|, [wedge + 1].
    """

    k: np.ndarray
    mu: np.ndarray
    power: np.ndarray
    modes: np.ndarray
    edges: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.mu, self.power))


def binned_wedges(
    field: Field | tf.Tensor,
    box: Box | None = None,
    wedges: int | Sequence[float] = 5,
    axis: str = "z",
    window: Window = None,
    interlaced: Field | tf.Tensor | None = None,
    bins: BinChoice = None,
) -> tf.Tensor:
    """Returns the power in each wedge and bin [(Mpc/h)^3], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: of a block.
        wedges, axis, window, interlaced, bins: as for `power_wedges`; interlaced is given as the
            field is.

    Returns:
        [wedge, bin] or, of a batch, [universe, wedge, bin]; replicated as `binned_power`'s. Where
        there are no modes the power is NaN, with a gradient of 0.
    """
    box, sample = located(field, box, window, interlaced)
    shared = binning(bins, box, wedges, axis_number(axis))
    return _by_wedge(mode_means([sample], box, bins=shared)[..., 0, 0, :], shared)


def power_wedges(
    field: Any,
    box_size: Any = None,
    wedges: int | Sequence[float] = 5,
    axis: str = "z",
    *,
    bins: BinChoice = None,
    window: Window = None,
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> Wedges:
    """Returns P(k, mu): the power in bins of wavenumber and of direction, plane-parallel.

    mu is the cosine between k and the line of sight. Modes with mu and -mu are in one wedge. The
    mean over the wedges of a bin, weighted by their modes, is its power spectrum.

    Args:
        field: a `Field`, or a whole array [x, y, z] on one rank.
        box_size: of an array [Mpc/h], one number or three. A `Field` has its own.
        wedges: their number, equally wide in |mu|, or their edges from 0 to 1; each holds the modes
            with low <= |mu| < high, and that of mu = 1 where it ends there.
        axis: of the line of sight, "x", "y" or "z".
        bins, window, interlaced: as for `power_spectrum`.
        shot_noise: subtracted from the power of each wedge [(Mpc/h)^3].

    Returns:
        The same on every rank.

    Raises:
        ValueError: an unknown axis, or wedges that do not increase from 0 to 1; see also
            `power_spectrum`.
    """
    box, sample = sample_of(field, box_size, window, interlaced)
    shared = binning(bins, box, wedges, axis_number(axis))
    k, mu, modes = (_by_wedge(values, shared) for values in contents(box, shared))
    power = _by_wedge(whole(mode_means([sample], box, bins=shared), box)[..., 0, 0, :], shared)
    return Wedges(k, mu, power - shot_noise, modes, np.array(shared.wedges))


def _by_wedge(values: Any, shared: Binning) -> Any:
    """Returns [..., wedge, bin] from [..., wedge * bin]."""
    reshape = tf.reshape if isinstance(values, tf.Tensor) else np.reshape
    return reshape(values, [*values.shape[:-1], -1, shared.bins])
