"""Multipoles of the power spectrum about a fixed line of sight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.particle_mesh.redshift_space import axis_number
from flowpm_dist.statistics.bins import BinChoice, bin_contents
from flowpm_dist.statistics.measure import Window, located, mode_means, sample_of, whole


@dataclass(frozen=True)
class Multipoles:
    """Measured multipoles; unpacks as `k, power`.

    Attributes:
        k: mean wavenumber of the modes of each bin [h/Mpc].
        power: P_l of each order [(Mpc/h)^3], [order, bin]; of a batch [batch, order, bin].
        modes: number of modes, k and -k counted both.
        orders: l.
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray
    orders: tuple[int, ...]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))


def binned_multipoles(
    field: Field | tf.Tensor,
    box: Box | None = None,
    axis: str = "z",
    orders: Sequence[int] = (0, 2, 4),
    window: Window = None,
    interlaced: Field | tf.Tensor | None = None,
    bins: BinChoice = None,
) -> tf.Tensor:
    """Multipoles of each bin [(Mpc/h)^3], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: of a block.
        axis, orders, window, interlaced, bins: as for `multipoles`; interlaced is given as the
            field is.

    Returns:
        [order, bin] or, of a batch, [universe, order, bin]; replicated as `binned_power`'s.
    """
    box, sample = located(field, box, window, interlaced)
    means = mode_means([sample], box, _checked_orders(orders), axis_number(axis), bins)
    return means[..., 0, :, :]


def multipoles(
    field: Any,
    box_size: Any = None,
    axis: str = "z",
    orders: Sequence[int] = (0, 2, 4),
    *,
    bins: BinChoice = None,
    window: Window = None,
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> Multipoles:
    """P_l(k) = (2 l + 1) <|delta|^2 L_l(mu)> over the modes of a bin, plane-parallel.

    mu is the cosine between k and the line of sight. Modes are discrete: in the first bins an
    isotropic field has small quadrupoles and hexadecapoles too.

    Args:
        field: a `Field`, or a whole array [x, y, z] on one rank.
        box_size: of an array [Mpc/h], one number or three. A `Field` has its own.
        axis: of the line of sight, "x", "y" or "z".
        orders: l, even.
        bins, window, interlaced: as for `power_spectrum`.
        shot_noise: subtracted from P_0 [(Mpc/h)^3].

    Returns:
        The same on every rank.

    Raises:
        ValueError: an unknown axis, an odd or negative order; see also `power_spectrum`.
    """
    box, sample = sample_of(field, box_size, window, interlaced)
    orders = _checked_orders(orders)
    k, modes = bin_contents(box, bins)
    means = mode_means([sample], box, orders, axis_number(axis), bins)
    power = whole(means, box)[..., 0, :, :]
    noise = np.array([shot_noise if order == 0 else 0.0 for order in orders])
    return Multipoles(k, power - noise[:, np.newaxis], modes, orders)


def _checked_orders(orders: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(int(order) for order in orders)
    if not checked or any(order < 0 or order % 2 for order in checked):
        raise ValueError(f"orders {tuple(orders)}: even numbers from 0 on are needed")
    return checked
