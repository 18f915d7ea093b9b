"""The power spectrum, its multipoles, and wedges P(k, mu) about a fixed line of sight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.io.labels import POWER_OF_K, WAVENUMBER, gaussian_scatter
from flowpm_dist.options import in_unit
from flowpm_dist.particle_mesh.positions import axis_number
from flowpm_dist.statistics.bins import BinChoice, Binning, bin_contents, binning, contents
from flowpm_dist.statistics.measure import Window, mode_means, sample_of, whole
from flowpm_dist.statistics.register import Statistic


@dataclass(frozen=True)
class PowerSpectrum(Labelled):
    """A measured power spectrum; unpacks as `k, power`.

    Attributes:
        k: the mean wavenumber of the modes of each bin, [bin] [h/Mpc]. In a bin without modes, k
            and power are NaN.
        power: the power in each bin, [bin], or [batch, bin] for a batch of universes [(Mpc/h)^3].
        modes: the number of modes in each bin, [bin]; k and -k are both counted.
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the power, a curve for each universe, with the scatter of a Gaussian field.

        The scatter is for an auto spectrum without shot noise; other spectra have more.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the label of the curve.
        """
        scatter, names = gaussian_scatter(self.power, self.modes), (WAVENUMBER, POWER_OF_K)
        return draw_curves(
            axes, self.k, self.power, names, scatter=scatter, labels=[label], logarithmic="xy"
        )

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.power, 1), "k")
        return self._bins() | {"power": LabelledArray(self.power, axes, "(Mpc/h)^3", "power")}

    def _bins(self) -> dict[str, LabelledArray]:
        return {
            "k": LabelledArray(self.k, ("k",), "h/Mpc", "mean wavenumber"),
            "modes": LabelledArray(self.modes, ("k",), "1", "number of modes"),
        }


def power_spectrum(
    field: Any,
    box_size: Any = None,
    *,
    bins: BinChoice = None,
    window: Window = "own",
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> PowerSpectrum:
    """Returns the spherically averaged power spectrum of a density or overdensity.

    The mode k = 0 is in no bin.

    Args:
        field: a `Field` (each rank measures its part), or a whole array [x, y, z] on one rank.
        box_size: the sides of an array's box [Mpc/h], one number or three.
        bins: edges [h/Mpc], a number of linear bins, or `Bins`; each holds the modes with low <= k
            < high. By default each bin is one fundamental mode wide and centred on a multiple of
            it, up to the smallest Nyquist wavenumber.
        window: the window of painting that each mode is divided by: "own" is the window that a
            `Field` knows, such as cloud-in-cell's of `State.density()`; arrays and blocks have
            none. "cic", "tsc" or "pcs" divides any field by this scheme's, None leaves it in.
        shot_noise: the shot noise to subtract [(Mpc/h)^3]: V / N_particles for Poisson sampling.
            Particles that started on a lattice have none at early times.
        interlaced: a second density of the same particles, which were moved by half a cell along
            each axis. It is moved back and averaged with `field`. This cancels the leading aliases
            (arXiv:1512.07295).

    Returns:
        The power spectrum, the same on every rank.

    Raises:
        ValueError: if the field is not scalar, box_size differs from the field's, the window is
            unknown, the interlaced field has another box, or the bins do not increase or hold no
            mode.
    """
    shot_noise = in_unit("shot_noise", shot_noise, "(Mpc/h)^3")
    box, sample = sample_of(field, box_size, window, interlaced)
    power = whole(mode_means([sample], box, bins=bins), box)[..., 0, 0, :]
    k, modes = bin_contents(box, bins)
    return PowerSpectrum(k, power - shot_noise, modes)


def binned_power(
    field: Field | tf.Tensor,
    box: Box | None = None,
    window: Window = "own",
    interlaced: Field | tf.Tensor | None = None,
    bins: BinChoice = None,
) -> tf.Tensor:
    """Returns the power in each bin [(Mpc/h)^3], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: the box of a block.
        window, interlaced, bins: see `power_spectrum`; interlaced has the same form as field.

    Returns:
        The power [bin]. For a batch [universe, bin], with the universes of which this rank has a
        block. Ranks that share a universe get the same values. A loss made from them must be
        divided by the number of these ranks, or it counts once for each rank (see
        `meshimpl.mesh_function`).
    """
    box, sample = sample_of(field, box, window, interlaced)
    return mode_means([sample], box, bins=bins)[..., 0, 0, :]


@dataclass(frozen=True)
class Multipoles(PowerSpectrum):
    """Measured multipoles of the power spectrum; unpacks as `k, power`.

    The power is [order, bin]; for a batch [batch, order, bin].

    Attributes:
        orders: the orders l.
    """

    orders: tuple[int, ...]

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws k P_l(k), a curve for each order; see `PowerSpectrum.plot`."""
        names = WAVENUMBER, r"$k\,P_l(k)$  [(Mpc/$h$)$^2$]"
        labels = [f"{label}  $l = {order}$".strip() for order in self.orders]
        scatter = None if 0 not in self.orders else self.k * self.scatter
        return draw_curves(axes, self.k, self.k * self.power, names, scatter=scatter, labels=labels)

    @property
    def scatter(self) -> np.ndarray:
        """The standard deviation of the multipoles of a Gaussian field, shaped as `power`.

        The measured multipoles give the power at each angle, and with it the variance of the modes
        there. Modes are taken to be spread evenly over mu (Grieb and others 2016, MNRAS 457, 1577,
        arXiv:1509.04293).

        Raises:
            ValueError: the monopole is not among the orders.
        """
        if 0 not in self.orders:
            raise ValueError(f"the scatter needs the monopole; the orders are {self.orders}")
        mu, weights = np.polynomial.legendre.leggauss(2 * max(self.orders) + 1)
        shapes = np.stack([np.polynomial.Legendre.basis(order)(mu) for order in self.orders])
        at_angles = np.einsum("...lk,lm->...km", self.power, shapes)
        means = np.einsum("...km,lm,m->...lk", at_angles**2, shapes**2, weights / 2)
        factors = 2 * np.array(self.orders)[:, np.newaxis] + 1
        return factors * np.sqrt(2 / np.maximum(self.modes, 1) * means)

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes, orders = (*leading_axes(self.power, 2), "order", "k"), np.array(self.orders)
        return self._bins() | {
            "order": LabelledArray(orders, ("order",), "1", "order of the multipole"),
            "power": LabelledArray(self.power, axes, "(Mpc/h)^3", "multipoles of the power"),
        }


def binned_multipoles(
    field: Field | tf.Tensor,
    box: Box | None = None,
    axis: str = "z",
    orders: Sequence[int] = (0, 2, 4),
    window: Window = "own",
    interlaced: Field | tf.Tensor | None = None,
    bins: BinChoice = None,
) -> tf.Tensor:
    """Multipoles of each bin [(Mpc/h)^3], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: the box of a block.
        axis, orders, window, interlaced, bins: see `multipoles`; interlaced has the same form as
            field.

    Returns:
        [order, bin] or, for a batch, [universe, order, bin]; see `binned_power` on losses.
    """
    box, sample = sample_of(field, box, window, interlaced)
    means = mode_means([sample], box, checked_orders(orders), axis_number(axis), bins)
    return means[..., 0, :, :]


def multipoles(
    field: Any,
    box_size: Any = None,
    axis: str = "z",
    orders: Sequence[int] = (0, 2, 4),
    *,
    bins: BinChoice = None,
    window: Window = "own",
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> Multipoles:
    """P_l(k) = (2 l + 1) <|delta|^2 L_l(mu)> over the modes of a bin, plane-parallel.

    mu is the cosine between k and the line of sight. Because modes are discrete, an isotropic field
    has small quadrupoles and hexadecapoles in the first bins.

    Args:
        field: a `Field`, or a whole array [x, y, z] on one rank.
        box_size: the sides of an array's box [Mpc/h], one number or three.
        axis: the line of sight, "x", "y" or "z".
        orders: l, even.
        bins, window, interlaced: see `power_spectrum`.
        shot_noise: subtracted from P_0 [(Mpc/h)^3].

    Returns:
        The multipoles, the same on every rank.

    Raises:
        ValueError: an unknown axis, an odd or negative order; see also `power_spectrum`.
    """
    shot_noise = in_unit("shot_noise", shot_noise, "(Mpc/h)^3")
    box, sample = sample_of(field, box_size, window, interlaced)
    orders = checked_orders(orders)
    means = mode_means([sample], box, orders, axis_number(axis), bins)
    k, modes = bin_contents(box, bins)
    power = whole(means, box)[..., 0, :, :]
    noise = np.array([shot_noise if order == 0 else 0.0 for order in orders])
    return Multipoles(k, power - noise[:, np.newaxis], modes, orders)


def checked_orders(orders: Sequence[int]) -> tuple[int, ...]:
    """Returns the orders of multipoles, if they are even numbers of at least 0."""
    checked = tuple(int(order) for order in in_unit("orders", orders))
    if not checked or any(order < 0 or order % 2 for order in checked):
        raise ValueError(f"orders {tuple(orders)}: must be even numbers of at least 0")
    return checked


@dataclass(frozen=True)
class Wedges(Labelled):
    """A measured power spectrum in wedges; unpacks as `k, mu, power`.

    Each array is [wedge, bin]; the power of a batch is [batch, wedge, bin]. k, mu and power are NaN
    where there are no modes.

    Attributes:
        k: mean wavenumber of the modes [h/Mpc].
        mu: mean |mu| of the modes.
        power: P(k, mu) [(Mpc/h)^3].
        modes: number of modes; k and -k are both counted.
        edges: edges of the wedges in |mu|, [wedge + 1].
    """

    k: np.ndarray
    mu: np.ndarray
    power: np.ndarray
    modes: np.ndarray
    edges: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.mu, self.power))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the power, a curve for each wedge; see `PowerSpectrum.plot`."""
        ends = zip(self.edges[:-1], self.edges[1:], strict=True)
        labels = [rf"{label}  ${low:.3g} \leq |\mu| < {high:.3g}$".strip() for low, high in ends]
        names = WAVENUMBER, r"$P(k, \mu)$  [(Mpc/$h$)$^3$]"
        scatter = gaussian_scatter(self.power, self.modes)
        return draw_curves(
            axes, self.k, self.power, names, scatter=scatter, labels=labels, logarithmic="xy"
        )

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.power, 2), "wedge", "bin")
        return {
            "k": LabelledArray(self.k, axes[-2:], "h/Mpc", "mean wavenumber"),
            "mu": LabelledArray(self.mu, axes[-2:], "1", "mean |mu|"),
            "modes": LabelledArray(self.modes, axes[-2:], "1", "number of modes"),
            "power": LabelledArray(self.power, axes, "(Mpc/h)^3", "power"),
        }


def binned_wedges(
    field: Field | tf.Tensor,
    box: Box | None = None,
    wedges: int | Sequence[float] = 5,
    axis: str = "z",
    window: Window = "own",
    interlaced: Field | tf.Tensor | None = None,
    bins: BinChoice = None,
) -> tf.Tensor:
    """Returns the power in each wedge and bin [(Mpc/h)^3], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: the box of a block.
        wedges, axis, window, interlaced, bins: see `power_wedges`; interlaced has the same form as
            field.

    Returns:
        [wedge, bin] or, for a batch, [universe, wedge, bin]; see `binned_power` on losses. Where
        there are no modes the power is NaN, with a gradient of 0.
    """
    box, sample = sample_of(field, box, window, interlaced)
    shared = binning(bins, box, wedges, axis_number(axis))
    return _by_wedge(mode_means([sample], box, bins=shared)[..., 0, 0, :], shared)


def power_wedges(
    field: Any,
    box_size: Any = None,
    wedges: int | Sequence[float] = 5,
    axis: str = "z",
    *,
    bins: BinChoice = None,
    window: Window = "own",
    shot_noise: float = 0.0,
    interlaced: Any = None,
) -> Wedges:
    """Returns P(k, mu): the power in bins of wavenumber and of direction, plane-parallel.

    mu is the cosine between k and the line of sight. Modes with mu and -mu are in one wedge. The
    mean over all wedges of a bin, weighted by their numbers of modes, is the power spectrum in this
    bin.

    Args:
        field: a `Field`, or a whole array [x, y, z] on one rank.
        box_size: the sides of an array's box [Mpc/h], one number or three.
        wedges: the number of wedges of equal width in |mu|, or their edges from 0 to 1. A wedge
            holds the modes with low <= |mu| < high; one that ends at 1 holds mu = 1 as well.
        axis: the line of sight, "x", "y" or "z".
        bins, window, interlaced: see `power_spectrum`.
        shot_noise: subtracted from the power of each wedge [(Mpc/h)^3].

    Returns:
        The wedges, the same on every rank.

    Raises:
        ValueError: an unknown axis, or wedges that do not increase from 0 to 1; see also
            `power_spectrum`.
    """
    shot_noise = in_unit("shot_noise", shot_noise, "(Mpc/h)^3")
    box, sample = sample_of(field, box_size, window, interlaced)
    shared = binning(bins, box, wedges, axis_number(axis))
    power = _by_wedge(whole(mode_means([sample], box, bins=shared), box)[..., 0, 0, :], shared)
    k, mu, modes = (_by_wedge(values, shared) for values in contents(box, shared))
    return Wedges(k, mu, power - shot_noise, modes, np.array(shared.wedges))


def _by_wedge(values: Any, shared: Binning) -> Any:
    """Returns [..., wedge, bin] from [..., wedge * bin]."""
    reshape = tf.reshape if isinstance(values, tf.Tensor) else np.reshape
    return reshape(values, [*values.shape[:-1], -1, shared.bins])


def _log(power: np.ndarray) -> np.ndarray:
    """Returns ln P, and 0 of volumes without power, such as those without galaxies."""
    return np.log(np.where(power == 0, 1.0, power))


def _shapes(poles: Multipoles) -> np.ndarray:
    """Returns ln P_0, and P_l / P_0 of the others."""
    monopole, others = poles.power[..., :1, :], poles.power[..., 1:, :]
    ratios = others / np.where(monopole == 0, 1.0, monopole)
    vectors = np.concatenate([_log(monopole), ratios], axis=-2)
    return vectors.reshape(*vectors.shape[:-2], -1)


POWER = Statistic(functools.partial(power_spectrum, window="cic"), lambda p: _log(p.power))
"""The power spectrum without the cloud-in-cell window. Features: ln P."""

MULTIPOLES = Statistic(functools.partial(multipoles, window="cic"), _shapes)
"""P_0, P_2 and P_4 without the cloud-in-cell window. Features: ln P_0, P_2 / P_0, P_4 / P_0."""

WEDGES = Statistic(
    functools.partial(power_wedges, window="cic"),
    lambda wedges: _log(wedges.power[..., wedges.modes > 0]),
)
"""The power in five wedges without the cloud-in-cell window. Features: ln P of bins with modes."""
