"""Statistics of maps of the convergence by name, as vectors that parameters are inferred from.

A statistic is a function of maps that returns a vector for each universe. To add one, write the
function and put it into `MAP_STATISTICS`, or name it "package.module:function".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flowpm_dist.options import object_named
from flowpm_dist.statistics.angular_power import angular_power
from flowpm_dist.statistics.maps import map_histogram, peaks
from flowpm_dist.statistics.summaries import vectors_of

BINS_PER_OCTAVE = 2
"""Of the angular power, logarithmic from the lowest mode to the Nyquist multipole."""

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
        """Edges of the bins of the angular power [bin + 1], see `BINS_PER_OCTAVE`."""
        pixels = self.kappa.shape[-1]
        count = max(1, int(BINS_PER_OCTAVE * np.log2(pixels / 2) + 1e-9))
        return 2 * np.pi / self.fov * np.geomspace(1.0, pixels / 2, count + 1)

    def coarser(self) -> NoisyMaps:
        """Returns the means over squares of 2 x 2 pixels; an odd last one is left out."""
        half = self.kappa.shape[-1] // 2
        whole = self.kappa[..., : 2 * half, : 2 * half]
        means = whole.reshape(*whole.shape[:-2], half, 2, half, 2).mean(axis=(-3, -1))
        return NoisyMaps(means, self.fov * 2 * half / self.kappa.shape[-1], self.sigma / 2)


MapStatistic = Callable[[NoisyMaps], np.ndarray]
"""A function of maps: [universe, value]."""


def map_power(maps: NoisyMaps) -> np.ndarray:
    """Returns ln C_l of each source, and C_l of pairs over the root of those of both."""
    fov, edges = maps.fov, maps.power_edges
    first, second = np.triu_indices(maps.kappa.shape[1], 1)
    auto = angular_power(maps.kappa, fov, edges).power
    found = [np.log(auto).reshape(len(auto), -1)]
    if first.size:
        other = maps.kappa[:, second]
        cross = angular_power(maps.kappa[:, first], fov, edges, other=other).power
        ratio = cross / np.sqrt(auto[:, first] * auto[:, second])
        found.append(ratio.reshape(len(ratio), -1))
    return np.concatenate(found, axis=1)


def map_peaks(maps: NoisyMaps) -> np.ndarray:
    """Returns the roots of the numbers of peaks by height, of maps and of coarser ones."""
    return _roots_of_counts(maps, lambda m: peaks(m.kappa, HEIGHTS, sigma=m.sigma).counts)


def map_histograms(maps: NoisyMaps) -> np.ndarray:
    """Returns the roots of the numbers of pixels by value, of maps and of coarser ones."""
    return _roots_of_counts(maps, lambda m: map_histogram(m.kappa / m.sigma, LEVELS).counts)


def _roots_of_counts(maps: NoisyMaps, counts: Callable[[NoisyMaps], np.ndarray]) -> np.ndarray:
    """The root of a count varies alike in full and in nearly empty bins."""
    found = [counts(each) for each in (maps, maps.coarser())]
    return np.concatenate([np.sqrt(one).reshape(len(one), -1) for one in found], axis=1)


MAP_STATISTICS: dict[str, MapStatistic] = {
    "power": map_power,
    "peaks": map_peaks,
    "histograms": map_histograms,
}
"""Name -> statistic of maps."""


def measured_maps(names: Sequence[str], maps: NoisyMaps) -> dict[str, np.ndarray]:
    """Returns statistics of maps, float64 [universe, value] each.

    Args:
        names: of `MAP_STATISTICS`, or "package.module:function".
        maps: of universes.

    Raises:
        ValueError: there is no such statistic, or it did not return a vector of finite numbers.
    """
    found = {}
    for name in names:
        statistic: MapStatistic = object_named(name, MAP_STATISTICS, "statistic of maps")
        found[name] = vectors_of(name, statistic(maps), len(maps.kappa))
    return found
