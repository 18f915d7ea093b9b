"""Features that parameters are inferred from: statistics of densities and of maps, as vectors.

`STATISTICS` and `MAP_STATISTICS` in `options` have them by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import gaussian_smoothing
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import object_named
from flowpm_dist.posteriors.options import MAP_STATISTICS, STATISTICS
from flowpm_dist.statistics.angular_power import angular_power, octave_edges
from flowpm_dist.statistics.bispectrum import bispectrum, default_shells
from flowpm_dist.statistics.histogram import DENSITIES, CellValues, map_histogram, peaks
from flowpm_dist.statistics.power import power_spectrum

SCALES: tuple[tuple[float, np.ndarray], ...] = (
    (0.0, np.linspace(-4.0, 5.0, 28)),
    (1.0, np.linspace(-3.0, 3.0, 28)),
    (2.0, np.linspace(-2.0, 2.0, 28)),
    (4.0, np.linspace(-1.0, 1.0, 28)),
)
"""Radius of the smoothing Gaussian [cells], and edges of bins, see `CellValues.bins`."""

HEIGHTS = np.linspace(-3.0, 7.0, 11)
"""Edges of bins of peaks [standard deviations of the noise]."""

LEVELS = np.array([-np.inf, *np.linspace(-6.0, 8.0, 29)[1:-1], np.inf])
"""Edges of bins of pixels [standard deviations of the noise]; every pixel is in one."""


class StatisticError(UserError, ValueError):
    """A user's own statistic returned something other than finite vectors."""


def statistic_of(
    name: str, values: CellValues = DENSITIES, *, of_maps: bool = False
) -> Callable[[Any], np.ndarray]:
    """Returns a function of a density, or of maps.

    Args:
        name: a name of `STATISTICS`, or of `MAP_STATISTICS`; or "package.module:function".
        values: what the numbers of the density are, for statistics with an argument `values`.
        of_maps: whether a statistic of maps is meant.

    Raises:
        ValueError: there is no such statistic.
    """
    register, kind = (MAP_STATISTICS, "statistic of maps") if of_maps else (STATISTICS, "statistic")
    found: Callable[..., np.ndarray] = object_named(name, register, kind)
    takes_values = not of_maps and "values" in inspect.signature(found).parameters
    return functools.partial(found, values=values) if takes_values else found


def measured(
    names: Sequence[str], data: Field | NoisyMaps, values: CellValues = DENSITIES
) -> dict[str, np.ndarray]:
    """Returns statistics of a density or of maps, float64 [universe, value] each.

    All ranks that have a part of a density must call this together.

    Args:
        names: see `statistic_of`.
        data: a density or counts, of a batch of universes or of one; or maps of universes.
        values: what the numbers of a density are.

    Raises:
        ValueError: there is no such statistic.
        StatisticError: a statistic did not return a vector of finite numbers for each universe.
    """
    of_maps = isinstance(data, NoisyMaps)
    universes = len(data.kappa) if isinstance(data, NoisyMaps) else data.box.batch or 1
    found = {}
    for name in names:
        vectors = np.asarray(statistic_of(name, values, of_maps=of_maps)(data), np.float64)
        if vectors.size == 0 or vectors.size % universes or vectors.ndim > 2:
            raise StatisticError(
                f"the statistic {name} returned an array of shape {vectors.shape}; must be a "
                f"vector for each of {universes} universes"
            )
        if not np.isfinite(vectors).all():
            raise StatisticError(f"the statistic {name} has values that are not finite")
        found[name] = vectors.reshape(universes, -1)
    return found


def log_power(density: Field) -> np.ndarray:
    """Returns the logarithm of the power spectrum, with the cloud-in-cell window divided out."""
    return np.log(power_spectrum(density, window="cic").power)


def histograms(density: Field, values: CellValues = DENSITIES) -> np.ndarray:
    """Returns the square roots of the shares of cells in bins of the density, for each of `SCALES`.

    The square root of a count has the same variance in full and in nearly empty bins.

    Args:
        density: a density or counts, of one universe or of a batch.
        values: the kind of its numbers, which determines the bins.
    """
    box = density.box
    smoothed, cell = [density], max(box.cell)
    for radius, _ in SCALES[1:]:
        smoothed.append(Field(gaussian_smoothing(box, radius * cell)(density.block), box))
    found = [
        values.histogram(field, edges) for field, (_, edges) in zip(smoothed, SCALES, strict=True)
    ]
    return np.concatenate([np.sqrt(one.counts / one.cells) for one in found], axis=-1)


def reduced_bispectrum(density: Field) -> np.ndarray:
    """Returns Q = B / (P1 P2 + P2 P3 + P3 P1) of all triangles of the default bins (Fry 1984).

    The cloud-in-cell window is divided out.
    """
    found = bispectrum(density, window="cic")
    power = power_spectrum(density, bins=default_shells(density.box), window="cic").power
    first, second, third = (power[..., number] for number in found.shells.T)
    return found.bispectrum / (first * second + second * third + third * first)


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
