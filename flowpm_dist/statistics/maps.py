"""Peaks and the one-point distribution of maps of the flat sky."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.statistics.histogram import Histogram, bin_centres, checked_edges, soft_counts


@dataclass(frozen=True)
class Peaks:
    """Counts of peaks by their height; unpacks as `centres, counts`.

    Attributes:
        edges: edges of the bins of height [bin + 1].
        counts: the number of peaks in each bin [..., bin].
    """

    edges: np.ndarray
    counts: np.ndarray

    @property
    def centres(self) -> np.ndarray:
        """The centres of the bins [bin]."""
        return bin_centres(self.edges)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.centres, self.counts))


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
    edges, values = checked_edges(edges), np.asarray(maps)
    if values.ndim < 2 or min(values.shape[-2:]) < 3:
        raise ValueError(f"peaks need maps [..., x, y] of at least 3 x 3 pixels: {values.shape}")
    heights = values
    if sigma is not None:
        noise = np.asarray(sigma, np.float64)
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
    shape = values.shape[:-2]
    pairs = zip(
        heights.reshape(-1, *values.shape[-2:]),
        highest.reshape(-1, *values.shape[-2:]),
        strict=True,
    )
    counts = [np.histogram(height[is_peak], edges)[0] for height, is_peak in pairs]
    return Peaks(edges, np.array(counts, np.int64).reshape(*shape, edges.size - 1))


def map_histogram(maps: Any, edges: Any) -> Histogram:
    """Counts the pixels whose value lies in each bin, as `numpy.histogram` does.

    Args:
        maps: [..., x, y].
        edges: edges of the bins [bin + 1], increasing.

    Raises:
        ValueError: edges that do not increase.
    """
    edges, values = checked_edges(edges), np.asarray(maps)
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
    maps, checked = tf.convert_to_tensor(maps), checked_edges(edges)
    if checked.size < 3:
        raise ValueError("a soft histogram needs at least two bins")
    lead = maps.shape[:-2].as_list()
    counts = soft_counts(maps, len(lead), bin_centres(checked), log=False)
    return tf.reshape(counts, [*lead, checked.size - 1])
