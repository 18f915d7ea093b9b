"""Statistics of maps with noise, as vectors of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowpm_dist.statistics.angular_spectra import angular_power, octave_edges
from flowpm_dist.statistics.histogram import map_histogram, peaks

HEIGHTS = np.linspace(-3.0, 7.0, 11)
"""Edges of bins of peaks [standard deviations of the noise]."""

LEVELS = np.array([-np.inf, *np.linspace(-6.0, 8.0, 29)[1:-1], np.inf])
"""Edges of bins of pixels [standard deviations of the noise]; every pixel is in one."""


@dataclass(frozen=True)
class NoisyMaps:
    """Maps of universes, with noise.

    Attributes:
        kappa: convergence [universe, source, x, y] [1].
        fov: side of the field of view [rad].
        sigma: standard deviation of the noise of a pixel [1].
    """

    kappa: np.ndarray
    fov: float
    sigma: float

    @property
    def power_edges(self) -> np.ndarray:
        """Edges of the bins of the angular power [bin + 1], see `octave_edges`."""
        return octave_edges(self.fov, self.kappa.shape[-1])

    def coarser(self) -> NoisyMaps:
        """Returns the means over squares of 2 x 2 pixels; an odd last one is left out."""
        half = self.kappa.shape[-1] // 2
        whole = self.kappa[..., : 2 * half, : 2 * half]
        means = whole.reshape(*whole.shape[:-2], half, 2, half, 2).mean(axis=(-3, -1))
        return NoisyMaps(means, self.fov * 2 * half / self.kappa.shape[-1], self.sigma / 2)


def map_power(maps: NoisyMaps) -> np.ndarray:
    """Returns ln C_l of each source, and C_ij / sqrt(C_ii C_jj) of each pair."""
    fov, edges = maps.fov, maps.power_edges
    first, second = np.triu_indices(maps.kappa.shape[1], 1)
    auto = angular_power(maps.kappa, fov, edges).power
    vectors = [np.log(auto).reshape(len(auto), -1)]
    if first.size:
        other = maps.kappa[:, second]
        cross = angular_power(maps.kappa[:, first], fov, edges, other=other).power
        ratio = cross / np.sqrt(auto[:, first] * auto[:, second])
        vectors.append(ratio.reshape(len(ratio), -1))
    return np.concatenate(vectors, axis=1)


def map_peaks(maps: NoisyMaps) -> np.ndarray:
    """Returns the roots of the numbers of peaks by height, of maps and of coarser maps."""
    return _roots_of_counts(maps, lambda m: peaks(m.kappa, HEIGHTS, sigma=m.sigma).counts)


def map_histograms(maps: NoisyMaps) -> np.ndarray:
    """Returns the roots of the numbers of pixels by value, of maps and of coarser maps."""
    return _roots_of_counts(maps, lambda m: map_histogram(m.kappa / m.sigma, LEVELS).counts)


def _roots_of_counts(maps: NoisyMaps, counts: Callable[[NoisyMaps], np.ndarray]) -> np.ndarray:
    """Returns roots of counts, whose variance is the same in full and in nearly empty bins."""
    roots = [np.sqrt(counts(each)) for each in (maps, maps.coarser())]
    return np.concatenate([root.reshape(len(root), -1) for root in roots], axis=1)
