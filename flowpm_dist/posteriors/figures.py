"""Figures of posteriors: rank histograms, TARP curves, corner plots."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.interpolate import RegularGridInterpolator
from scipy.stats import binom

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.figures import (
    COLOURS,
    MEASURED,
    MUTED,
    PLAIN_LEGEND,
    SMALL_TITLE,
    THEORY,
    new_figure,
    style_axes,
    symbol,
)
from flowpm_dist.io.samples import Samples
from flowpm_dist.posteriors.calibration import Calibration, band

BINS = 10
"""Number of bins of a rank histogram."""
CONTOURS = (0.954, 0.683)
SHOWN = (0.001, 0.999)
"""Quantiles of the samples between which the axes of a corner plot extend, before a margin."""


def rank_figure(calibrations: Mapping[str, Calibration], *, tested: bool = True) -> Figure:
    """Returns histograms of ranks, a row for each method and a panel for each parameter.

    The band holds 95 % of the heights of each bin if ranks are uniform. P is the P-value of the
    Kolmogorov-Smirnov test.

    Args:
        calibrations: calibrations by method, all of the same parameters.
        tested: whether P is shown.
    """
    names = next(iter(calibrations.values())).names
    figure = new_figure(2.6 * len(names) + 0.8, 1.7 * len(calibrations) + 0.6)
    grid = figure.subplots(len(calibrations), len(names), squeeze=False, sharex=True)
    for row, (method, one) in zip(grid, calibrations.items(), strict=True):
        parts = one.count / one.groups
        low, high = binom.ppf([0.025, 0.975], one.groups, 1 / BINS) * parts
        for i, (axes, name) in enumerate(zip(row, names, strict=True)):
            style_axes(axes)
            axes.axhspan(low, high, color=MUTED, alpha=0.25, lw=0)
            axes.axhline(one.count / BINS, color=MUTED, lw=1)
            axes.hist(one.ranks[:, i], BINS, range=(0, 1), histtype="step", color=MEASURED, lw=1.5)
            axes.set(xlim=(0, 1), ylim=(0, None))
            if tested:
                axes.set_title(f"P = {one.ranks_p[i]:.2g}", fontsize=8, loc="right", pad=2)
            if axes in grid[0]:
                axes.set_title(symbol(name), loc="left", **SMALL_TITLE)
            if axes in grid[-1]:
                axes.set_xlabel("rank of the truth", fontsize=9)
        row[0].set_ylabel(method.replace(" + ", " +\n"), fontsize=8)
    return figure


def tarp_figure(calibrations: Mapping[str, Calibration], *, tested: bool = True) -> Figure:
    """Returns the difference between TARP's coverage and the credibility, for each method.

    The band holds the whole curve of right posteriors with a probability of 95 %.

    Args:
        calibrations: calibrations by method.
        tested: whether P is shown.
    """
    figure = new_figure(5.6, 3.6 + 0.18 * len(calibrations))
    axes = figure.subplots()
    style_axes(axes)
    reach = band(min(one.groups for one in calibrations.values()))
    axes.axhspan(-reach, reach, color=MUTED, alpha=0.25, lw=0, label="95 % band")
    axes.axhline(0, color=MUTED, lw=1)
    credibility = np.linspace(0, 1, 1001)
    for number, (method, one) in enumerate(calibrations.items()):
        covered = np.searchsorted(np.sort(one.tarp), credibility, side="right") / one.count
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "lw": 1.4}
        style["ls"] = "-" if number < len(COLOURS) else ":"
        label = f"{method}, P = {one.tarp_p:.2g}" if tested else method
        axes.plot(credibility, covered - credibility, label=label, **style)
    axes.set(xlim=(0, 1), xlabel="credibility", ylabel="coverage - credibility")
    figure.legend(loc="outside upper center", **{**PLAIN_LEGEND, "fontsize": 8})
    return figure


def corner_figure(
    samples: np.ndarray,
    priors: UniformPriors,
    *,
    truth: np.ndarray | None = None,
    shown: bool = False,
) -> Figure:
    """Returns a corner plot of samples: 68.3 and 95.4 % contours, medians and 68.3 % intervals.

    GetDist estimates the densities (arXiv:1910.13970); it knows the edges of the priors. A contour
    follows the density and holds its share of the samples. The axes show the samples, not the whole
    priors.

    Args:
        samples: [sample, p] [physical units].
        priors: the priors.
        truth: the true parameters [p] [physical units]; lines mark them, and the axes include them.
        shown: see `new_figure`.

    Raises:
        ValueError: truth is not a finite number for each parameter.
    """
    names, count = priors.names, len(priors.names)
    if truth is not None:
        truth = np.asarray(truth, np.float64)
        if truth.shape != (count,) or not np.isfinite(truth).all():
            raise ValueError(f"truth = {truth}: must be {count} finite numbers, one a parameter")
    densities, limits = _densities(samples, priors), _limits(samples, priors, truth)
    figure = new_figure(2.2 * count + 0.6, 2.2 * count + 0.4, shown=shown)
    grid = figure.subplots(count, count, squeeze=False, sharex="col")
    for i in range(count):
        for j in range(count):
            axes = grid[i, j]
            if j > i:
                axes.set_visible(False)
                continue
            style_axes(axes)
            axes.set_xlim(limits[j])
            axes.xaxis.set_major_locator(MaxNLocator(3, prune="both"))
            if truth is not None:
                axes.axvline(truth[j], color=THEORY, lw=1)
            if j == i:
                _one(axes, samples[:, i], densities[i,], symbol(names[i]))
                continue
            _two(axes, samples[:, [j, i]], densities.get((j, i)))
            if truth is not None:
                axes.axhline(truth[i], color=THEORY, lw=1)
            axes.set_ylim(limits[i])
            axes.yaxis.set_major_locator(MaxNLocator(3, prune="both"))
            if j > 0:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel(symbol(names[i]))
        grid[-1, i].set_xlabel(symbol(names[i]))
    return figure


def _densities(samples: np.ndarray, priors: UniformPriors) -> dict[tuple[int, ...], Any]:
    """Returns GetDist's densities of each parameter (i,) and of each pair (j, i), j < i.

    Where samples are all equal or lie on a line, the density is None or missing.
    """
    names, densities = list(priors.names), dict[tuple[int, ...], Any]()
    before = logging.root.manager.disable
    # It reports the burn-in that it did not remove, and each bandwidth that is a fallback.
    with contextlib.redirect_stdout(None):
        logging.disable(max(before, logging.WARNING))
        try:
            drawn = Samples(
                samples[np.newaxis], names, priors.ranges, is_independent=True
            ).to_getdist()
            for i, name in enumerate(names):
                densities[i,] = drawn.get1DDensity(name)
                for j in range(i):
                    with contextlib.suppress(np.linalg.LinAlgError):
                        densities[j, i] = drawn.get2DDensity(names[j], name)
        finally:
            logging.disable(before)
    return densities


def _limits(samples: np.ndarray, priors: UniformPriors, truth: np.ndarray | None) -> np.ndarray:
    """Returns the limits of axes [p, 2]: of nearly all samples, in the priors, and of the truth."""
    low, high = np.quantile(samples, SHOWN, axis=0)
    margin = np.maximum(0.1 * (high - low), 1e-6 * (priors.high - priors.low))
    low, high = np.maximum(low - margin, priors.low), np.minimum(high + margin, priors.high)
    if truth is not None:
        low, high = np.minimum(low, truth - margin), np.maximum(high, truth + margin)
    return np.stack([low, high], axis=1)


def _one(axes: Axes, samples: np.ndarray, density: Any, name: str) -> None:
    """Draws the density of one parameter, if there is one, and the interval of its samples."""
    if density is not None:
        axes.plot(density.x, density.P, color=MEASURED, lw=1.4)
    low, middle, high = np.quantile(samples, [0.1585, 0.5, 0.8415])
    axes.axvspan(low, high, color=MEASURED, alpha=0.12, lw=0)
    axes.axvline(middle, color=MEASURED, lw=1, ls=":")
    axes.set_ylim(0, 1.08)  # the greatest density is 1
    axes.set_yticks([])
    digits = max(0, 1 - int(np.floor(np.log10(max(high - low, 1e-12)))))
    value = f"{middle:.{digits}f}$^{{+{high - middle:.{digits}f}}}_{{-{middle - low:.{digits}f}}}$"
    axes.set_title(f"{name} = {value}", fontsize=9)


def _two(axes: Axes, samples: np.ndarray, density: Any) -> None:
    """Draws the contours of two parameters, or the samples if there is no density."""
    if density is None:
        axes.plot(*samples.T, ".", ms=2, color=MEASURED)
        return
    at = RegularGridInterpolator((density.y, density.x), density.P, bounds_error=False)
    # The levels that hold these shares of the samples, whatever the width of the estimate's kernel.
    levels = [*np.quantile(at(samples[:, ::-1]), 1 - np.array(CONTOURS)), density.P.max() * 1.001]
    axes.contourf(density.x, density.y, density.P, levels, colors=["#b7c4d6", "#6f87a8"])
