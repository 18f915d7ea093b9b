"""The bispectrum in bins of three wavenumbers, by transforms of shells (Scoccimarro 2015)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import Filter, convolve, painting_window
from flowpm_dist.grid.options import Scheme
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.statistics.bins import (
    BinChoice,
    Binning,
    Bins,
    bin_contents,
    binning,
    outside_graphs,
    relative_wavenumber,
)
from flowpm_dist.statistics.measure import Window, sample_of, sum_over_cells, whole
from flowpm_dist.statistics.power import power_spectrum
from flowpm_dist.statistics.register import Statistic
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction


@dataclass(frozen=True)
class Bispectrum(Labelled):
    """A measured bispectrum, for each triangle of bins i <= j <= l that closes.

    Attributes:
        shells: the numbers (i, j, l) of the bins, [triangle, 3].
        k: the mean wavenumbers of the three bins, [triangle, 3] [h/Mpc].
        bispectrum: [triangle], or [batch, triangle] for a batch of universes [(Mpc/h)^6].
        triangles: the number of closed triangles of modes, [triangle]; each order of the three
            modes and each sign counts.
        reduced: Q = B / (P1 P2 + P2 P3 + P3 P1), shaped as `bispectrum` (Fry 1984); None if the
            power was not measured.
    """

    shells: np.ndarray
    k: np.ndarray
    bispectrum: np.ndarray
    triangles: np.ndarray
    reduced: np.ndarray | None = None

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws k1 k2 k3 B of each triangle, a curve for each universe.

        The triangles are in the order of `shells`: the first side grows last.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the curve's label in the legend.
        """
        names = "number of the triangle", r"$k_1 k_2 k_3\,B$  [(Mpc/$h$)$^3$]"
        curves = np.prod(self.k, axis=1) * self.bispectrum
        numbers = np.arange(len(self.triangles))
        return draw_curves(axes, numbers, curves, names, labels=[label], logarithmic="")

    def labelled(self) -> dict[str, LabelledArray]:
        """Returns the arrays by name; k1, k2 and k3 are the wavenumbers of a triangle."""
        axes = (*leading_axes(self.bispectrum, 1), "triangle")
        sides = {
            f"k{side + 1}": LabelledArray(k, axes[-1:], "h/Mpc", "mean wavenumber")
            for side, k in enumerate(self.k.T)
        }
        arrays = {
            **sides,
            "triangles": LabelledArray(self.triangles, axes[-1:], "1", "number of triangles"),
            "bispectrum": LabelledArray(self.bispectrum, axes, "(Mpc/h)^6", "bispectrum"),
        }
        if self.reduced is not None:
            arrays["reduced"] = LabelledArray(self.reduced, axes, "1", "reduced bispectrum")
        return arrays


def bispectrum(
    field: Any, box_size: Any = None, *, bins: BinChoice = None, window: Window = "own"
) -> Bispectrum:
    """Returns the bispectrum of a density or overdensity, the mean over all directions.

    One transform for each bin gives the field of the bin's modes only. The mean of the product of
    three such fields is the sum over the triangles of modes (arXiv:1506.02729).

    Args:
        field: a `Field` (each rank measures its part), or a whole array [x, y, z] on one rank.
        box_size: the sides of an array's box [Mpc/h], one number or three.
        bins: see `power_spectrum`; they end at two thirds of the Nyquist wavenumber or below. By
            default six linear bins up to there. Memory and time grow with their number.
        window: what each mode is divided by, see `power_spectrum`.

    Returns:
        The bispectrum, the same on every rank.

    Raises:
        ValueError: bins beyond two thirds of the Nyquist wavenumber, where three modes can add up
            to a whole sampling frequency; see also `power_spectrum`.
    """
    box, sample = sample_of(field, box_size, window)
    chosen = _checked(bins, box)
    means = whole(_means(sample.block, box, chosen, sample.window), box)
    shells, counts = _triangles(box, chosen)
    k, _ = bin_contents(box, chosen)
    return Bispectrum(shells, k[shells], means, counts)


def binned_bispectrum(
    field: Field | tf.Tensor,
    box: Box | None = None,
    *,
    bins: BinChoice = None,
    window: Window = "own",
) -> tf.Tensor:
    """Returns the bispectrum of each triangle of bins [(Mpc/h)^6], differentiable.

    Args:
        field: a density or overdensity: a `Field`, or this rank's block of it, [..., x, y, z].
        box: the box of a block.
        bins, window: see `bispectrum`, whose `shells` list the triangles in the same order.

    Returns:
        [triangle], or [universe, triangle] for the universes of a batch of which this rank has a
        block. Ranks that share a universe get the same values; see `binned_power` on losses.
    """
    box, sample = sample_of(field, box, window)
    return _means(sample.block, box, _checked(bins, box), sample.window)


def default_shells(box: Box) -> Bins:
    """Returns six bins linear in k, up to two thirds of the Nyquist wavenumber."""
    return Bins(6, k_max=2 / 3 * np.pi / max(box.cell))


def _checked(bins: BinChoice, box: Box) -> Binning:
    last = 2 / 3 * np.pi / max(box.cell)
    chosen = binning(default_shells(box) if bins is None else bins, box)
    if not chosen.edges:
        raise ValueError("the bispectrum needs bins with edges: a number, `Bins`, or edges [h/Mpc]")
    highest = chosen.edges[-1] * 2 * np.pi / max(box.size)
    if highest > last * (1 + 1e-9):
        raise ValueError(
            f"bins up to {highest:.4g} h/Mpc: triangles are unambiguous up to two thirds of the "
            f"Nyquist wavenumber, {last:.4g} h/Mpc"
        )
    return chosen


def _means(block: tf.Tensor, box: Box, bins: Binning, window: Scheme | None) -> tf.Tensor:
    """Returns the mean over the triangles, times V^2 / cells^3 in units of the modes."""
    box.check_equal("a bispectrum", bins=bins, window=window)
    _, counts = _triangles(box, bins)
    sums = _function(box, bins, window)(block)
    return sums * tf.constant(box.volume**2 / box.cells / counts, box.dtype)


@cached_on_mesh(16)
def _triangles(box: Box, bins: Binning) -> tuple[np.ndarray, np.ndarray]:
    """Returns the triangles of bins that hold triangles of modes, and their numbers.

    All ranks call it together. Three shells of a point's spectrum, which is 1 in all modes, count
    the triangles of modes.
    """
    single = Box(box.grid, box.size, box.mesh, tf.float64, box.batch)
    point = np.zeros(single.local_batch + single.block)
    if not any(single.offset):
        point[..., 0, 0, 0] = 1.0
    every = _combinations(bins)
    with outside_graphs("a bispectrum", box.mesh):
        sums = whole(_function(single, bins, None, all_=True)(tf.constant(point)), single)
    counts = np.rint(sums.reshape(-1, len(every))[0] * float(box.cells) ** 2)
    if not counts.any():
        raise ValueError("no triangle of modes is in any three of the bins: wider bins are needed")
    return every[counts > 0], counts[counts > 0]


def _combinations(bins: Binning) -> np.ndarray:
    return np.array(list(itertools.combinations_with_replacement(range(bins.size), 3)))


@cached_on_mesh(16)
def _function(box: Box, bins: Binning, window: Scheme | None, all_: bool = False) -> MeshFunction:
    """Returns `f(field)`: the sum over cells of the product of three shells [..., triangle]."""
    every = _combinations(bins) if all_ else _triangles(box, bins)[0]
    filters = [Filter(_shell(box, bins, number, window)) for number in range(bins.size)]
    triangles = mtf.Dimension("triangle", len(every))
    cells = int(np.prod(box.block))

    def local(shells: tf.Tensor) -> tf.Tensor:
        values = tf.cast(tf.reshape(shells, [-1, cells, bins.size]), tf.float64)
        sums = {}
        for i, j in sorted({(i, j) for i, j, _ in every.tolist()}):
            pair = values[..., i] * values[..., j]
            sums[i, j] = tf.linalg.matvec(values, pair, transpose_a=True)
        return tf.stack([sums[i, j][..., m] for i, j, m in every.tolist()], axis=-1)

    def build(_: Any, field: Any) -> Any:
        return sum_over_cells(local, convolve(field, box, filters), box, triangles, "triangles")

    return box.function(build, field=box.shape)


def _shell(box: Box, bins: Binning, number: int, window: Scheme | None) -> Any:
    def kernel(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        # In whole mode numbers, because wavenumbers in float32 may cross the edges of bins.
        x, y, z = (
            tf.round(tf.cast(k, tf.float64) * (size / (2 * np.pi))) * (max(box.size) / size)
            for k, size in zip((kx, ky, kz), box.size, strict=True)
        )
        inside = bins.number((x, y, z), relative_wavenumber(x, y, z)) == number
        shell = tf.cast(inside, kx.dtype)
        return shell if window is None else shell / painting_window(kx, ky, kz, box, window)

    return kernel


def _with_reduced(density: Field, window: Window = "cic") -> Bispectrum:
    triangles = bispectrum(density, window=window)
    power = power_spectrum(density, bins=default_shells(density.box), window=window).power
    first, second, third = (power[..., number] for number in triangles.shells.T)
    with np.errstate(invalid="ignore"):  # of volumes without power
        reduced = triangles.bispectrum / (first * second + second * third + third * first)
    return replace(triangles, reduced=reduced)


def _reduced(triangles: Bispectrum) -> np.ndarray:
    """Returns Q, and 0 of volumes without power, such as those without galaxies."""
    assert triangles.reduced is not None
    empty = np.isnan(triangles.reduced) & (triangles.bispectrum == 0)
    return np.where(empty, 0.0, triangles.reduced)


BISPECTRUM = Statistic(_with_reduced, _reduced)
"""B and Q of all triangles of the default bins, without the cloud-in-cell window. Features: Q."""
