"""The two-point correlation function of a density in a periodic box, and its multipoles."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.options import in_unit
from flowpm_dist.particle_mesh.positions import axis_number
from flowpm_dist.statistics.bins import inverse_windows, relative_wavenumbers, sum_over_universe
from flowpm_dist.statistics.measure import Window, interlace, sample_of, whole
from flowpm_dist.statistics.power import checked_orders
from flowpm_dist.statistics.register import Statistic
from meshimpl.graph_guards import check_eager, fence
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import local

_TIE = 1e-9
"""Added to a distance in units of an edge, so that rounding does not move it across the edge."""


@dataclass(frozen=True)
class CorrelationFunction(Labelled):
    """A measured correlation function; unpacks as `r, xi`.

    Attributes:
        r: the mean distance of the separations in each bin, [bin] [Mpc/h]. In a bin without
            separations, r and xi are NaN.
        xi: the correlation function, [bin], or [batch, bin] for a batch of universes [1].
        separations: the number of separations between cells in each bin, [bin]; x and -x are both
            counted. Each of them has as many pairs of cells as the mesh has cells.
    """

    r: np.ndarray
    xi: np.ndarray
    separations: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.r, self.xi))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws r^2 xi(r), a curve for each universe, without error bars.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the label of the curve.
        """
        names = r"$r$  [Mpc/$h$]", r"$r^2\,\xi(r)$  [(Mpc/$h$)$^2$]"
        return draw_curves(
            axes, self.r, self.r**2 * self.xi, names, labels=self._labels(label), logarithmic=""
        )

    def _labels(self, label: str) -> list[str]:
        return [label]

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.xi, 1), "r")
        return self._bins() | {"xi": LabelledArray(self.xi, axes, "1", "correlation function")}

    def _bins(self) -> dict[str, LabelledArray]:
        return {
            "r": LabelledArray(self.r, ("r",), "Mpc/h", "mean distance"),
            "separations": LabelledArray(self.separations, ("r",), "1", "number of separations"),
        }


@dataclass(frozen=True)
class CorrelationMultipoles(CorrelationFunction):
    """Measured multipoles of the correlation function; unpacks as `r, xi`.

    xi is [order, bin]; for a batch [batch, order, bin].

    Attributes:
        orders: the orders l.
    """

    orders: tuple[int, ...]

    def _labels(self, label: str) -> list[str]:
        return [f"{label}  $l = {order}$".strip() for order in self.orders]

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.xi, 2), "order", "r")
        return self._bins() | {
            "order": LabelledArray(np.array(self.orders), ("order",), "1", "order"),
            "xi": LabelledArray(self.xi, axes, "1", "multipoles of the correlation function"),
        }


def correlation_function(
    field: Any,
    box_size: Any = None,
    *,
    bins: int | Sequence[float] | None = None,
    window: Window = "own",
    interlaced: Any = None,
) -> CorrelationFunction:
    """Returns xi(r) = <delta(x) delta(x + r)> over all pairs of cells of a periodic box.

    It is the inverse Fourier transform of the power |delta(k)|^2 of each mode, averaged over the
    separations of a bin. The separation 0 is in no bin, so that shot noise, which is a constant in
    k, cancels at all others. At distances of a few cells, xi is the density's on the mesh: aliases
    and the window, which is large at the Nyquist wavenumber, affect it.

    Args:
        field: a density or overdensity: a `Field` (each rank measures its part), or a whole array
            [x, y, z] on one rank.
        box_size: the sides of an array's box [Mpc/h], one number or three.
        bins: increasing edges from 0 on [Mpc/h], or a number of equal bins from half a cell to half
            the shortest side. Each holds the separations with low <= r < high, of the nearest
            periodic images. By default each bin is one cell wide and centred on a multiple of it.
            A cell is its longest side, or its shortest if the longest does not fit into half the
            shortest side of the box.
        window: the window of painting that each mode is divided by, see `power_spectrum`.
        interlaced: a second density of the same particles, which were moved by half a cell along
            each axis, see `power_spectrum`.

    Returns:
        The correlation function, the same on every rank.

    Raises:
        ValueError: see `power_spectrum`; or no separation is in any of the bins.
    """
    r, xi, separations = _measured(field, box_size, bins, (0,), 2, window, interlaced)
    return CorrelationFunction(r, xi[..., 0, :], separations)


def correlation_multipoles(
    field: Any,
    box_size: Any = None,
    axis: str = "z",
    orders: Sequence[int] = (0, 2, 4),
    *,
    bins: int | Sequence[float] | None = None,
    window: Window = "own",
    interlaced: Any = None,
) -> CorrelationMultipoles:
    """Returns xi_l(r) = (2 l + 1) <xi(r) L_l(mu)> over the separations of a bin, plane-parallel.

    mu is the cosine between r and the line of sight. Because separations are discrete, an isotropic
    field has small quadrupoles and hexadecapoles in the first bins.

    Args:
        field, box_size, bins, window, interlaced: see `correlation_function`.
        axis: the line of sight, "x", "y" or "z".
        orders: l, even.

    Returns:
        The multipoles, the same on every rank.

    Raises:
        ValueError: an unknown axis, an odd or negative order; see also `correlation_function`.
    """
    orders, number = checked_orders(orders), axis_number(axis)
    r, xi, separations = _measured(field, box_size, bins, orders, number, window, interlaced)
    return CorrelationMultipoles(r, xi, separations, orders)


def _measured(
    field: Any,
    box_size: Any,
    bins: int | Sequence[float] | None,
    orders: tuple[int, ...],
    axis: int,
    window: Window,
    interlaced: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the mean distance [bin], the multipoles [..., order, bin] and the separations."""
    check_eager("a correlation function")
    box, sample = sample_of(field, box_size, window, interlaced)
    edges = _edges(bins, box)
    box.check_equal("a statistic", bins=edges, orders=orders, axis=axis, window=sample.window)
    function = _function(box, sample.order, sample.shifted is not None)
    blocks = [block for block in (sample.block, sample.shifted) if block is not None]
    xi = np.reshape(function(*blocks).numpy(), [-1, *box.block])
    sums = np.zeros((len(xi), 2 + len(orders), edges.size + 1))
    for plane in range(box.block[0]):
        r, mu2 = _distances(box, plane, axis)
        number = np.searchsorted(edges, r * (1 + _TIE), side="right").ravel()
        number[r.ravel() == 0] = 0
        weights = [_legendre(order, mu2) for order in orders]
        for universe, values in enumerate(xi[:, plane].astype(np.float64)):
            summands = [np.ones_like(r), r, *(values * weight for weight in weights)]
            for row, summand in enumerate(summands):
                sums[universe, row] += np.bincount(number, summand.ravel(), edges.size + 1)
    total = sum_over_universe(box.mesh, sums.reshape(*box.local_batch, *sums.shape[1:]))
    everything = whole(tf.constant(total[..., 1:-1]), box)
    separations, distance = (everything.reshape(-1, *everything.shape[-2:])[0, i] for i in (0, 1))
    if not separations.any():
        raise ValueError(
            f"bins {bins!r}: no separation of cells is in any of them; a cell has sides of "
            f"{box.cell} Mpc/h"
        )
    with np.errstate(invalid="ignore"):
        return distance / separations, everything[..., 2:, :] / separations, separations


def _edges(bins: int | Sequence[float] | None, box: Box) -> np.ndarray:
    """Returns the edges of bins of distance [Mpc/h]; see `correlation_function`."""
    bins = in_unit("bins", bins, "Mpc/h")
    most = min(box.size) / 2
    cell = max(box.cell) if max(box.cell) <= most * (1 + _TIE) else min(box.cell)
    if bins is None:
        return cell * (np.arange(int(most / cell + 1e-6) + 1) + 0.5)
    if isinstance(bins, Integral):
        if bins < 1:
            raise ValueError(f"bins = {bins}: must be at least 1")
        return np.linspace(cell / 2, most, int(bins) + 1)
    edges = np.asarray(bins, np.float64)
    rising = edges.ndim == 1 and edges.size > 1 and np.isfinite(edges).all()
    if not rising or edges[0] < 0 or not (np.diff(edges) > 0).all():
        raise ValueError(
            f"bins {bins!r}: increasing edges from 0 on [Mpc/h] are needed, or a whole number"
        )
    return edges


def _distances(box: Box, plane: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns r [Mpc/h] and mu^2 of the separations of a plane of this rank's block, [y, z]."""
    along = []
    for begin, count, cells, cell in zip(box.offset, box.block, box.grid, box.cell, strict=True):
        number = begin + np.arange(count)
        along.append(cell * np.minimum(number, cells - number))
    squares = [along[0][plane] ** 2, along[1][:, np.newaxis] ** 2, along[2] ** 2]
    r2 = squares[0] + squares[1] + squares[2]
    mu2 = np.divide(squares[axis], r2, out=np.zeros_like(r2), where=r2 > 0)
    return np.sqrt(r2), mu2


def _legendre(order: int, mu2: np.ndarray) -> np.ndarray:
    """Returns (2 l + 1) L_l(mu) of an even order."""
    coefficients = np.polynomial.legendre.leg2poly([0] * order + [2 * order + 1])
    return np.polynomial.polynomial.polyval(mu2, coefficients[::2])


@cached_on_mesh(16)
def _function(box: Box, order: int, interlaced: bool) -> MeshFunction:
    """Returns `f(field, [shifted])`: xi at each separation of cells [..., x, y, z]."""

    def build(_: Any, field: Any, shifted: Any = None) -> Any:
        spectrum = to_spectrum(field)
        if shifted is not None:
            spectrum = interlace(spectrum, to_spectrum(shifted), box)
        kinds = [(spectrum.shape, spectrum.dtype)]
        (power,) = local(lambda x: _power(box, order, x), [spectrum], kinds, name="power")
        return to_field(power, box)

    names = ["field", "shifted"] if interlaced else ["field"]
    return box.function(build, **dict.fromkeys(names, box.shape))


def _power(box: Box, order: int, spectrum: tf.Tensor) -> tf.Tensor:
    """Returns |delta|^2 / cells of each mode, without the mean, as pairs [..., pair].

    Modes are divided by sinc(k cell / 2) to the power `order` along each axis.
    """

    @tf.function(jit_compile=True, autograph=False)
    def power(spectrum: tf.Tensor, *vectors: tf.Tensor) -> tf.Tensor:
        kx, ky, kz, x, y, z = vectors
        scale = tf.where(kx**2 + ky**2 + kz**2 > 0, x * y * z / box.cells, 0)
        squares = tf.reduce_sum(tf.cast(spectrum, tf.float64) ** 2, axis=-1) * scale**2 * box.cells
        return tf.cast(tf.stack([squares, tf.zeros_like(squares)], axis=-1), spectrum.dtype)

    numbers, windows = relative_wavenumbers(box), inverse_windows(box)
    vectors = [*numbers, *(w**order for w in windows)]
    return power(spectrum, *(fence(tf.constant(each, tf.float64)) for each in vectors))


CORRELATION = Statistic(
    functools.partial(correlation_function, window="cic"), lambda found: found.xi
)
"""The correlation function without the cloud-in-cell window. Features: xi."""
