"""Figures of posteriors: rank histograms, TARP curves, corner plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import gaussian_filter
from scipy.stats import binom

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.figures import (
    COLOURS,
    MEASURED,
    MUTED,
    PLAIN_LEGEND,
    SMALL_TITLE,
    new_figure,
    style_axes,
    symbol,
)
from flowpm_dist.posteriors.calibration import Calibration, band

BINS = 10
"""Number of bins of a rank histogram."""
CONTOURS = (0.954, 0.683)
CELLS = 40
"""Number of cells along each side of a panel of a corner plot."""


def rank_figure(found: Mapping[str, Calibration], *, tested: bool = True) -> Figure:
    """Returns histograms of ranks, a row for each method and a panel for each parameter.

    The band holds 95 % of the heights of each bin if ranks are uniform. P is the P-value of the
    Kolmogorov-Smirnov test.

    Args:
        found: calibrations by method, all of the same parameters.
        tested: whether P is shown.
    """
    names = next(iter(found.values())).names
    figure = new_figure(2.6 * len(names) + 0.8, 1.7 * len(found) + 0.6)
    grid = figure.subplots(len(found), len(names), squeeze=False, sharex=True)
    for row, (method, one) in zip(grid, found.items(), strict=True):
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


def tarp_figure(found: Mapping[str, Calibration], *, tested: bool = True) -> Figure:
    """Returns the difference between TARP's coverage and the credibility, for each method.

    The band holds the whole curve of right posteriors with a probability of 95 %.

    Args:
        found: calibrations by method.
        tested: whether P is shown.
    """
    figure = new_figure(5.6, 3.6 + 0.18 * len(found))
    axes = figure.subplots()
    style_axes(axes)
    reach = band(min(one.groups for one in found.values()))
    axes.axhspan(-reach, reach, color=MUTED, alpha=0.25, lw=0, label="95 % band")
    axes.axhline(0, color=MUTED, lw=1)
    credibility = np.linspace(0, 1, 1001)
    for number, (method, one) in enumerate(found.items()):
        covered = np.searchsorted(np.sort(one.tarp), credibility, side="right") / one.count
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "lw": 1.4}
        style["ls"] = "-" if number < len(COLOURS) else ":"
        label = f"{method}, P = {one.tarp_p:.2g}" if tested else method
        axes.plot(credibility, covered - credibility, label=label, **style)
    axes.set(xlim=(0, 1), xlabel="credibility", ylabel="coverage - credibility")
    figure.legend(loc="outside upper center", **{**PLAIN_LEGEND, "fontsize": 8})
    return figure


def corner_figure(samples: np.ndarray, priors: UniformPriors, *, shown: bool = False) -> Figure:
    """Returns a corner plot of samples: 68 and 95 % contours, medians and 68 % intervals.

    Args:
        samples: [sample, p] [physical units].
        priors: the priors; their ranges are the limits of the axes.
        shown: see `new_figure`.
    """
    names, count = priors.names, len(priors.names)
    figure = new_figure(2.2 * count + 0.6, 2.2 * count + 0.4, shown=shown)
    grid = figure.subplots(count, count, squeeze=False, sharex="col")
    for i in range(count):
        for j in range(count):
            axes = grid[i, j]
            if j > i:
                axes.set_visible(False)
                continue
            style_axes(axes)
            axes.set_xlim(priors.low[j], priors.high[j])
            axes.xaxis.set_major_locator(MaxNLocator(3, prune="both"))
            if j == i:
                _one(axes, samples[:, i], priors, i)
            else:
                _two(axes, samples[:, [j, i]], priors, (j, i))
                if j > 0:
                    axes.tick_params(labelleft=False)
                else:
                    axes.set_ylabel(symbol(names[i]))
        grid[-1, i].set_xlabel(symbol(names[i]))
    return figure


def _one(axes: Axes, samples: np.ndarray, priors: UniformPriors, place: int) -> None:
    ends = priors.low[place], priors.high[place]
    axes.hist(samples, CELLS, range=ends, density=True, histtype="step", color=MEASURED, lw=1.4)
    low, middle, high = np.quantile(samples, [0.1585, 0.5, 0.8415])
    axes.axvspan(low, high, color=MEASURED, alpha=0.12, lw=0)
    axes.axvline(middle, color=MEASURED, lw=1, ls=":")
    axes.set_yticks([])
    digits = max(0, 1 - int(np.floor(np.log10(max(high - low, 1e-12)))))
    value = f"{middle:.{digits}f}$^{{+{high - middle:.{digits}f}}}_{{-{middle - low:.{digits}f}}}$"
    axes.set_title(f"{symbol(priors.names[place])} = {value}", fontsize=9)


def _two(axes: Axes, samples: np.ndarray, priors: UniformPriors, places: tuple[int, int]) -> None:
    ends = [(priors.low[place], priors.high[place]) for place in places]
    counts, x, y = np.histogram2d(samples[:, 0], samples[:, 1], bins=CELLS, range=ends)
    density = gaussian_filter(counts, 1.5, mode="reflect")
    ordered = np.sort(density.ravel())[::-1]
    share = np.cumsum(ordered) / ordered.sum()
    levels = [ordered[np.searchsorted(share, level)] for level in CONTOURS]
    middles = (x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2
    if levels[0] < levels[1]:
        shown = [*levels, density.max() * 1.001]
        axes.contourf(*middles, density.T, shown, colors=["#b7c4d6", "#6f87a8"])
    axes.set_ylim(*ends[1])
    axes.yaxis.set_major_locator(MaxNLocator(3, prune="both"))
