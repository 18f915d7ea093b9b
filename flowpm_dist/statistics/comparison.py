"""Two fields against each other: cross power, transfer function, correlation coefficient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, check_same_box
from flowpm_dist.grid.field import Field
from flowpm_dist.statistics.bins import BinChoice, bin_contents
from flowpm_dist.statistics.measure import (
    Window,
    located,
    mode_means,
    sample_of,
    whole,
)
from flowpm_dist.statistics.power import PowerSpectrum

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Comparison:
    """The power of two fields and what they share; numpy arrays, or tensors of `binned_compare`.

    Attributes:
        k: mean wavenumber of the modes of each bin [h/Mpc].
        power_a, power_b: of each field [(Mpc/h)^3], [..., bin].
        cross: mean of Re(a b*) [(Mpc/h)^3], [..., bin].
        modes: number of modes, k and -k counted both.
    """

    k: np.ndarray
    power_a: Any
    power_b: Any
    cross: Any
    modes: np.ndarray

    @property
    def transfer(self) -> Any:
        """sqrt(P_aa / P_bb)."""
        return (self.power_a / self.power_b) ** 0.5

    @property
    def correlation(self) -> Any:
        """r = P_ab / sqrt(P_aa P_bb), from -1 to 1."""
        return self.cross / (self.power_a**0.5 * self.power_b**0.5)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.k, self.power_a, self.power_b, self.cross, self.transfer,
                     self.correlation))  # fmt: skip


def binned_compare(
    a: Field | tf.Tensor,
    b: Field | tf.Tensor,
    box: Box | None = None,
    window: Window | Pair = None,
    interlaced: Pair = (None, None),
    bins: BinChoice = None,
) -> Comparison:
    """Auto and cross power of each bin, with `transfer` and `correlation`, differentiable.

    Args:
        a, b: `Field`s on the same box, or this rank's blocks of them, [..., x, y, z].
        box: both live in; may be left out for fields.
        window, interlaced, bins: as for `compare`; interlaced are given as the fields are.

    Returns:
        Tensors of shapes and replication as `binned_power`'s.
    """
    samples = []
    for field, kind, shifted in zip((a, b), _pair(window), interlaced, strict=True):
        box, sample = located(field, box, kind, shifted)
        samples.append(sample)
    assert box is not None
    return _comparison(mode_means(samples, box, bins=bins), box, bins)


def compare(
    a: Any,
    b: Any,
    box_size: Any = None,
    *,
    bins: BinChoice = None,
    window: Window | Pair = None,
    shot_noise: float | tuple[float, float] = 0.0,
    interlaced: Pair = (None, None),
) -> Comparison:
    """Returns all two-point statistics of two fields, from one transform of each.

    Args:
        a, b: `Field`s on the same box (or whole arrays on one rank).
        box_size: of arrays [Mpc/h], one number or three. `Field`s have their own.
        bins: as for `power_spectrum`.
        window: "cic" or None for both, or a pair: a density painted from particles has it, a linear
            field has not.
        shot_noise: subtracted from the two auto spectra [(Mpc/h)^3], one number or a pair.
        interlaced: for each field the shifted one or None, as for `power_spectrum`.

    Returns:
        The same on every rank; unpacks as k, P_aa, P_bb, P_ab, transfer, correlation.

    Raises:
        ValueError: the fields are not on the same box; see also `power_spectrum`.
    """
    samples, boxes = [], []
    for field, kind, shifted in zip((a, b), _pair(window), interlaced, strict=True):
        box, sample = sample_of(field, box_size, kind, shifted)
        samples.append(sample)
        boxes.append(box)
    box = boxes[0]
    check_same_box(box, boxes[1], "the two fields")
    noise_a, noise_b = _pair(shot_noise)
    found = _comparison(whole(mode_means(samples, box, bins=bins), box), box, bins)
    power_a, power_b = found.power_a - noise_a, found.power_b - noise_b
    return Comparison(found.k, power_a, power_b, found.cross, found.modes)


def cross_power(
    a: Any,
    b: Any,
    box_size: Any = None,
    *,
    bins: BinChoice = None,
    window: Window | Pair = None,
    shot_noise: float = 0.0,
    interlaced: Pair = (None, None),
) -> PowerSpectrum:
    """Cross power spectrum, the mean of Re(a b*); arguments as for `compare`.

    `shot_noise` [(Mpc/h)^3] is that of particles the two fields have in common.
    """
    found = compare(a, b, box_size, bins=bins, window=window, interlaced=interlaced)
    return PowerSpectrum(found.k, found.cross - shot_noise, found.modes)


def transfer_function(
    a: Any, b: Any, box_size: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """k [h/Mpc] and sqrt(P_aa / P_bb); arguments as for `compare`."""
    found = compare(a, b, box_size, **options)
    return found.k, found.transfer


def correlation_coefficient(
    a: Any, b: Any, box_size: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """k [h/Mpc] and P_ab / sqrt(P_aa P_bb); arguments as for `compare`."""
    found = compare(a, b, box_size, **options)
    return found.k, found.correlation


def _comparison(means: Any, box: Box, bins: BinChoice) -> Comparison:
    k, modes = bin_contents(box, bins)
    power_a, power_b, cross = (means[..., product, 0, :] for product in range(3))
    return Comparison(k, power_a, power_b, cross, modes)


def _pair(value: Any) -> Pair:
    first, second = value if isinstance(value, (tuple, list)) else (value, value)
    return first, second
