"""Comparison of two fields: cross power, transfer function, correlation coefficient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.box import Box, check_same_box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.io.labels import WAVENUMBER
from flowpm_dist.options import in_unit
from flowpm_dist.statistics.bins import BinChoice, bin_contents
from flowpm_dist.statistics.measure import Sample, Window, mode_means, sample_of, whole
from flowpm_dist.statistics.power import PowerSpectrum

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Comparison(Labelled):
    """The power and cross power of two fields, in numpy arrays, or in tensors by `binned_compare`.

    Attributes:
        k: mean wavenumber of the modes of each bin [h/Mpc].
        power_a, power_b: the power of each field [(Mpc/h)^3], [..., bin].
        cross: mean of Re(a b*) [(Mpc/h)^3], [..., bin].
        modes: number of modes; k and -k are both counted.
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

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws correlation and transfer function.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: what the names of the two curves begin with.
        """
        curves = np.stack([self.correlation, self.transfer], axis=-2)
        labels = [f"{label}  {name}".strip() for name in ("correlation", "transfer function")]
        return draw_curves(axes, self.k, curves, (WAVENUMBER, "$r(k)$, $T(k)$"), labels=labels)

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.cross, 1), "k")
        arrays = {
            "k": LabelledArray(self.k, axes[-1:], "h/Mpc", "mean wavenumber"),
            "modes": LabelledArray(self.modes, axes[-1:], "1", "number of modes"),
        }
        for name, units, meaning in (
            ("power_a", "(Mpc/h)^3", "power of the first field"),
            ("power_b", "(Mpc/h)^3", "power of the second field"),
            ("cross", "(Mpc/h)^3", "cross power"),
            ("transfer", "1", "root of power_a / power_b"),
            ("correlation", "1", "correlation coefficient"),
        ):
            arrays[name] = LabelledArray(np.asarray(getattr(self, name)), axes, units, meaning)
        return arrays


def binned_compare(
    a: Field | tf.Tensor,
    b: Field | tf.Tensor,
    box: Box | None = None,
    window: Window | Pair = "own",
    interlaced: Pair = (None, None),
    bins: BinChoice = None,
) -> Comparison:
    """Auto and cross power of each bin, with `transfer` and `correlation`, differentiable.

    Args:
        a, b: `Field`s on the same box, or this rank's blocks of them, [..., x, y, z].
        box: the box of blocks; None for `Field`s.
        window, interlaced, bins: see `compare`; interlaced are given as the fields are.

    Returns:
        Tensors; see `binned_power` on shapes and losses.
    """
    box, samples = _samples(a, b, box, window, interlaced)
    return _comparison(mode_means(samples, box, bins=bins), box, bins)


def compare(
    a: Any,
    b: Any,
    box_size: Any = None,
    *,
    bins: BinChoice = None,
    window: Window | Pair = "own",
    shot_noise: float | tuple[float, float] = 0.0,
    interlaced: Pair = (None, None),
) -> Comparison:
    """Returns all two-point statistics of two fields, from one transform of each.

    Args:
        a, b: `Field`s on the same box (or whole arrays on one rank).
        box_size: the sides of the arrays' box [Mpc/h], one number or three; `Field`s have one.
        bins: as for `power_spectrum`.
        window: as for `power_spectrum`, for both or a pair: ("cic", None) for arrays of a density
            painted from particles and of a linear field.
        shot_noise: subtracted from the two auto spectra [(Mpc/h)^3], one number or a pair.
        interlaced: for each field the shifted one or None, as for `power_spectrum`.

    Returns:
        The same on every rank; unpacks as k, P_aa, P_bb, P_ab, transfer, correlation.

    Raises:
        ValueError: the fields are not on the same box; see also `power_spectrum`.
    """
    noise_a, noise_b = _pair(in_unit("shot_noise", shot_noise, "(Mpc/h)^3"))
    box, samples = _samples(a, b, box_size, window, interlaced)
    comparison = _comparison(whole(mode_means(samples, box, bins=bins), box), box, bins)
    return replace(
        comparison, power_a=comparison.power_a - noise_a, power_b=comparison.power_b - noise_b
    )


def cross_power(
    a: Any,
    b: Any,
    box_size: Any = None,
    *,
    bins: BinChoice = None,
    window: Window | Pair = "own",
    shot_noise: float = 0.0,
    interlaced: Pair = (None, None),
) -> PowerSpectrum:
    """Cross power spectrum, the mean of Re(a b*); arguments as for `compare`.

    `shot_noise` [(Mpc/h)^3] is the noise of the particles that both fields contain.
    """
    shot_noise = in_unit("shot_noise", shot_noise, "(Mpc/h)^3")
    comparison = compare(a, b, box_size, bins=bins, window=window, interlaced=interlaced)
    return PowerSpectrum(comparison.k, comparison.cross - shot_noise, comparison.modes)


def transfer_function(
    a: Any, b: Any, box_size: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """k [h/Mpc] and sqrt(P_aa / P_bb); arguments as for `compare`."""
    comparison = compare(a, b, box_size, **options)
    return comparison.k, comparison.transfer


def correlation_coefficient(
    a: Any, b: Any, box_size: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """k [h/Mpc] and P_ab / sqrt(P_aa P_bb); arguments as for `compare`."""
    comparison = compare(a, b, box_size, **options)
    return comparison.k, comparison.correlation


def _samples(
    a: Any, b: Any, box: Any, window: Window | Pair, interlaced: Pair
) -> tuple[Box, list[Sample]]:
    a, b = in_unit("a", a), in_unit("b", b)
    (box_a, first), (box_b, second) = (
        sample_of(field, box, kind, shifted)
        for field, kind, shifted in zip((a, b), _pair(window), interlaced, strict=True)
    )
    check_same_box(box_a, box_b, "the two fields")
    return box_a, [first, second]


def _comparison(means: Any, box: Box, bins: BinChoice) -> Comparison:
    k, modes = bin_contents(box, bins)
    power_a, power_b, cross = (means[..., product, 0, :] for product in range(3))
    return Comparison(k, power_a, power_b, cross, modes)


def _pair(value: Any) -> Pair:
    first, second = value if isinstance(value, (tuple, list)) else (value, value)
    return first, second
