"""One-point distributions of densities, counts and maps of the flat sky, and peaks of maps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import gaussian_smoothing
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.options import in_unit
from flowpm_dist.statistics.bins import sum_over_universe
from flowpm_dist.statistics.measure import box_of, sample_of, sum_over_cells, whole
from flowpm_dist.statistics.register import Statistic
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction


class _Counts(Labelled):
    """Counts in bins: `edges` [bin + 1] and `counts` [..., bin]."""

    edges: np.ndarray
    counts: np.ndarray

    @property
    def centres(self) -> np.ndarray:
        """The centres of the bins [bin]."""
        return bin_centres(self.edges)

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.counts, 1), "centre")
        return {
            "centre": LabelledArray(self.centres, axes[-1:], "", "centre of the bin"),
            "counts": LabelledArray(self.counts, axes, "1", "count in the bin"),
        }


@dataclass(frozen=True)
class Histogram(_Counts):
    """The number of cells, or pixels, with a value in each bin; unpacks as `centres, pdf`.

    Attributes:
        edges: the edges of the bins [bin + 1], in the value or in its logarithm.
        counts: the number of cells in each bin, [bin], or [batch, bin] for a batch of universes or
            [..., bin] for several maps.
        cells: the number of all cells of a universe or map, including those outside the edges.
    """

    edges: np.ndarray
    counts: np.ndarray
    cells: int

    @property
    def pdf(self) -> np.ndarray:
        """The probability density: its integral over the bins is the share of cells in them."""
        return self.counts / (self.cells * np.diff(self.edges))

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.centres, self.pdf))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the probability density, a curve for each universe or map.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the label of the curve.
        """
        names = "centre of the bin", "probability density"
        return draw_curves(axes, self.centres, self.pdf, names, labels=[label], logarithmic="")

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        arrays = super().labelled()
        axes = arrays["counts"].dimensions
        return arrays | {"pdf": LabelledArray(self.pdf, axes, "", "probability density")}


def density_histogram(field: Any, edges: Any, *, log: bool = False) -> Histogram:
    """Counts the cells whose value lies in each bin, as `numpy.histogram` does.

    Cells outside the edges are not counted. The last bin includes its upper edge.

    Args:
        field: a `Field`, or a whole array [x, y, z] on one rank.
        edges: the edges of the bins, increasing, [bin + 1].
        log: whether the edges are values of ln(density); empty cells and cells below 0 are then in
            no bin.

    Returns:
        The histogram, the same on every rank.

    Raises:
        ValueError: if the edges do not increase, or the field is not scalar.
    """
    edges = checked_edges(edges)
    box, block = box_of(field, None if isinstance(field, Field) else 1.0)
    box.check_equal("a histogram", edges=edges, log=log)
    values = block.numpy().reshape(-1, math.prod(box.block))
    counts = []
    for universe in values:
        if log:
            with np.errstate(divide="ignore", invalid="ignore"):
                universe = np.log(universe)
        counts.append(np.histogram(universe, edges)[0])
    sums = sum_over_universe(box.mesh, np.array(counts, np.int64))
    sums = sums.reshape(*box.local_batch, edges.size - 1)
    return Histogram(edges, whole(tf.constant(sums), box).astype(np.int64), box.cells)


def soft_histogram(
    field: Field | tf.Tensor, box: Box | None, edges: Any, *, log: bool = False
) -> tf.Tensor:
    """Returns a differentiable histogram, in which the two nearest bins share each cell.

    The shares are linear between the centres of the bins (cloud in cell). A cell beyond the first
    or the last centre belongs to that bin entirely and has no gradient. So the sum is the number of
    cells for any edges. The gradient is discontinuous where a value passes a centre.

    Args:
        field: a density: a `Field`, or this rank's block of it, [..., x, y, z].
        box: the box of a block; None for a `Field`.
        edges: the edges of the bins, increasing, [bin + 1]; at least two bins.
        log: whether the edges are values of ln(density).

    Returns:
        The number of cells in each bin, [bin], or [universe, bin] for the universes of a batch of
        which this rank has a block. Ranks that share a universe get the same values; see
        `binned_power` on losses.

    Raises:
        ValueError: if the edges do not increase, or there are fewer than two bins.
    """
    box, sample = sample_of(field, box)
    edges = in_unit("edges", edges)
    box.check_equal("a histogram", edges=edges, log=log)
    return _soft_function(box, tuple(_soft_centres(edges).tolist()), log)(sample.block)


@cached_on_mesh(16)
def _soft_function(box: Box, centres: tuple[float, ...], log: bool) -> MeshFunction:
    bins = mtf.Dimension("bin", len(centres))

    def local(density: tf.Tensor) -> tf.Tensor:
        return soft_counts(density, len(box.local_batch), np.array(centres), log)

    def build(_: Any, density: Any) -> Any:
        return sum_over_cells(local, density, box, bins, "soft_histogram")

    return box.function(build, density=box.shape)


def _soft_centres(edges: Any) -> np.ndarray:
    """Returns the centres of bins, of which a soft histogram needs two [bin]."""
    checked = checked_edges(edges)
    if checked.size < 3:
        raise ValueError("a soft histogram needs at least two bins")
    return bin_centres(checked)


def soft_counts(density: tf.Tensor, batch_rank: int, centres: np.ndarray, log: bool) -> tf.Tensor:
    """Returns the sums of the shares of cells in each bin, float64 [universe * bin].

    Args:
        density: the values of the cells, [..., cells ...].
        batch_rank: the number of leading dimensions, which are universes.
        centres: centres of the bins [bin], at least two.
        log: whether the centres are values of ln(density).
    """
    count = centres.size
    universes = math.prod(density.shape[:batch_rank])
    shares = _shares(tuple(centres.tolist()), log)
    lower, upper_share = shares(tf.reshape(density, [universes, -1]))
    number = lower + count * tf.range(universes)[:, tf.newaxis]
    return tf.math.unsorted_segment_sum(
        1 - upper_share, number, universes * count
    ) + tf.math.unsorted_segment_sum(upper_share, number + 1, universes * count)


@functools.lru_cache(maxsize=16)
def _shares(centres: tuple[float, ...], log: bool) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    @tf.function(jit_compile=True, autograph=False)
    def shares(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns for each cell the lower of its two bins, and the share of the upper one."""
        dtype = values.dtype
        # Clipped before the logarithm, whose slope at an empty cell would be infinite.
        ends = (np.exp(centres) if log else np.array(centres))[[0, -1]]
        values = tf.clip_by_value(values, *(tf.constant(end, dtype) for end in ends))
        values = tf.math.log(values) if log else values
        lower = tf.zeros(values.shape, tf.int32)
        for centre in centres[1:-1]:  # one vectorised pass, faster than a search
            lower += tf.cast(values >= tf.constant(centre, dtype), tf.int32)
        width = tf.gather(tf.constant(np.diff(centres), dtype), lower)
        share = (values - tf.gather(tf.constant(centres, dtype), lower)) / width
        return lower, tf.cast(share, tf.float64)

    return shares


def checked_edges(edges: Any) -> np.ndarray:
    """Returns edges as float64 [bin + 1], or raises ValueError if they do not increase."""
    checked = np.asarray(in_unit("edges", edges), dtype=np.float64)
    if checked.ndim != 1 or checked.size < 2 or not (np.diff(checked) > 0).all():
        raise ValueError("edges: at least two numbers, increasing, are needed")
    return checked


def bin_centres(edges: np.ndarray) -> np.ndarray:
    """Returns the centres of bins [bin] between edges [bin + 1]."""
    return (edges[:-1] + edges[1:]) / 2


@dataclass(frozen=True)
class Peaks(_Counts):
    """Counts of peaks by their height; unpacks as `centres, counts`.

    Attributes:
        edges: edges of the bins of height [bin + 1].
        counts: the number of peaks in each bin [..., bin].
    """

    edges: np.ndarray
    counts: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.centres, self.counts))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the counts, a curve for each map; see `Histogram.plot`."""
        names = "height", "peaks in the bin"
        return draw_curves(axes, self.centres, self.counts, names, labels=[label], logarithmic="")


def peaks(maps: Any, edges: Any, *, sigma: Any = None, periodic: bool = False) -> Peaks:
    """Counts the pixels that are above their eight neighbours, by height.

    It has no gradient.

    Args:
        maps: [..., x, y], at least 3 pixels along each axis.
        edges: edges of the bins [bin + 1], increasing; the last bin includes its upper edge.
        sigma: the rms noise of each map [...], or a number: heights are then signal over noise.
        periodic: whether pixels at opposite edges are neighbours. Otherwise pixels at an edge
            are no peaks, because not all of their neighbours are known.

    Raises:
        ValueError: edges that do not increase, maps that are too small, a sigma that is not above
            0.
    """
    edges, values = checked_edges(edges), np.asarray(in_unit("maps", maps))
    if values.ndim < 2 or min(values.shape[-2:]) < 3:
        raise ValueError(f"peaks need maps [..., x, y] of at least 3 x 3 pixels: {values.shape}")
    heights = values
    if sigma is not None:
        noise = np.asarray(in_unit("sigma", sigma), np.float64)
        if not (noise > 0).all():
            raise ValueError(f"sigma must be above 0: got {sigma}")
        heights = values / noise[..., np.newaxis, np.newaxis]
    highest = np.ones(values.shape, bool)
    for shift in np.ndindex(3, 3):
        if shift != (1, 1):
            highest &= values > np.roll(values, np.subtract(shift, 1), axis=(-2, -1))
    if not periodic:
        inner = np.zeros(values.shape[-2:], bool)
        inner[1:-1, 1:-1] = True
        highest &= inner
    rows = (each.reshape(-1, *values.shape[-2:]) for each in (heights, highest))
    counts = [
        np.histogram(height[is_peak], edges)[0] for height, is_peak in zip(*rows, strict=True)
    ]
    return Peaks(edges, np.array(counts, np.int64).reshape(*values.shape[:-2], edges.size - 1))


def map_histogram(maps: Any, edges: Any) -> Histogram:
    """Counts the pixels whose value lies in each bin, as `numpy.histogram` does.

    Args:
        maps: [..., x, y].
        edges: edges of the bins [bin + 1], increasing.

    Raises:
        ValueError: edges that do not increase.
    """
    edges, values = checked_edges(edges), np.asarray(in_unit("maps", maps))
    pixels = math.prod(values.shape[-2:])
    counts = [np.histogram(each, edges)[0] for each in values.reshape(-1, pixels)]
    shape = [*values.shape[:-2], edges.size - 1]
    return Histogram(edges, np.array(counts, np.int64).reshape(shape), pixels)


def soft_map_histogram(maps: Any, edges: Any) -> tf.Tensor:
    """Returns a differentiable histogram of maps, in which the two nearest bins share each pixel.

    The shares are the same as in `soft_histogram`.

    Args:
        maps: [..., x, y], float32 or float64.
        edges: edges of the bins [bin + 1], increasing; at least two bins.

    Returns:
        The number of pixels in each bin [..., bin], float64.

    Raises:
        ValueError: edges that do not increase, or fewer than two bins.
    """
    maps, centres = tf.convert_to_tensor(in_unit("maps", maps)), _soft_centres(edges)
    lead = maps.shape[:-2].as_list()
    return tf.reshape(soft_counts(maps, len(lead), centres, log=False), [*lead, centres.size])


@dataclass(frozen=True)
class CellValues:
    """The kind of a volume's numbers: densities, densities that may be below 0, or counts.

    Attributes:
        positive: whether no number is below 0, as in data without noise.
        mean_count: the mean count of a cell of mean density; None for densities.
    """

    positive: bool = True
    mean_count: float | None = None

    def histogram(self, field: Field, edges: np.ndarray) -> Histogram:
        """Returns the histogram of a field, in bins with these edges (see `bins`).

        All ranks of the field call it together.
        """
        return density_histogram(field, self.bins(edges), log=self._log)

    def bins(self, edges: np.ndarray) -> np.ndarray:
        """Returns the edges of bins that suit the values [bin + 1].

        Densities that are never below 0 have bins of ln(density). Cells of 0 and cells beyond the
        edges are in no bin. Other densities, and counts divided by their mean, have bins of
        asinh(density - 1). The first and the last of these bins have no outer edge, so that every
        cell is in a bin.

        Args:
            edges: values of ln(density) or asinh(density - 1), increasing, [bin + 1].

        Returns:
            Edges of ln(density), or of the values.
        """
        if self._log:
            return edges
        inner = (self.mean_count or 1.0) * (1.0 + np.sinh(edges[1:-1]))
        return np.array([-np.inf, *inner, np.inf])

    @property
    def _log(self) -> bool:
        return self.positive and self.mean_count is None


DENSITIES = CellValues()
"""Densities that are never below 0."""


SCALES: tuple[tuple[float, np.ndarray], ...] = (
    (0.0, np.linspace(-4.0, 5.0, 28)),
    (1.0, np.linspace(-3.0, 3.0, 28)),
    (2.0, np.linspace(-2.0, 2.0, 28)),
    (4.0, np.linspace(-1.0, 1.0, 28)),
)
"""Radius of the smoothing Gaussian [cells], and edges of bins, see `CellValues.bins`."""


@dataclass(frozen=True)
class Histograms(Labelled):
    """Histograms of a density that is smoothed by Gaussians.

    Attributes:
        radii: the radius of each Gaussian [cells], [scale]; 0 for the density itself.
        edges: lower and upper edge of each bin, [scale, bin, 2], in the density or its logarithm.
        counts: the number of cells in each bin, [scale, bin], or [batch, scale, bin].
        cells: the number of all cells of a universe.
    """

    radii: np.ndarray
    edges: np.ndarray
    counts: np.ndarray
    cells: int

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the share of cells in each bin, a curve for each radius, by the bin's number."""
        labels = [f"{label}  {radius:g} cells".strip() for radius in self.radii]
        names = "number of the bin", "share of the cells"
        numbers, shares = np.arange(self.counts.shape[-1]), self.counts / self.cells
        return draw_curves(axes, numbers, shares, names, labels=labels, logarithmic="")

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.counts, 2), "radius", "bin")
        low, high = self.edges[..., 0], self.edges[..., 1]
        return {
            "radius": LabelledArray(self.radii, axes[-2:-1], "cells", "radius of the Gaussian"),
            "low": LabelledArray(low, axes[-2:], "", "lower edge of the bin"),
            "high": LabelledArray(high, axes[-2:], "", "upper edge of the bin"),
            "counts": LabelledArray(self.counts, axes, "1", "cells in the bin"),
            "share": LabelledArray(self.counts / self.cells, axes, "1", "share of the cells"),
        }


def _histograms(density: Field, values: CellValues = DENSITIES) -> Histograms:
    """Returns histograms for each of `SCALES`."""
    box = density.box
    smoothed, cell = [density], max(box.cell)
    for radius, _ in SCALES[1:]:
        smoothed.append(Field(gaussian_smoothing(box, radius * cell)(density.block), box))
    each = [
        values.histogram(field, edges) for field, (_, edges) in zip(smoothed, SCALES, strict=True)
    ]
    edges = np.stack([np.stack([one.edges[:-1], one.edges[1:]], axis=-1) for one in each])
    counts = np.stack([one.counts for one in each], axis=-2)
    return Histograms(np.array([radius for radius, _ in SCALES]), edges, counts, box.cells)


def _roots(histograms: Histograms) -> np.ndarray:
    """Returns roots of the shares of cells, whose variance is the same in full and empty bins."""
    roots = np.sqrt(histograms.counts / histograms.cells)
    return roots.reshape(*roots.shape[:-2], -1)


HISTOGRAMS = Statistic(_histograms, _roots)
"""The density's histograms, unsmoothed and smoothed. Features: roots of the shares of cells."""
