"""The figures of a tuning: its history, the importances of keys, and parallel coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowpm_dist.io.figures import COLOURS, MUTED, PLAIN_LEGEND, new_figure, style_axes
from flowpm_dist.studies.process import COMPLETE
from flowpm_dist.studies.tuning.options import Range, Space
from flowpm_dist.studies.tuning.records import TrialRecord

MARKERS = {"complete": "o", "pruned": "v", "collapsed": "x"}
SHOWN_SHARE = 0.9
"""Share of the values that the axes show in full: a few runs are often far off."""


def figures(
    records: Sequence[TrialRecord],
    importances: Callable[[], Mapping[str, float]],
    space: Space,
    metric: str,
) -> dict[str, Callable[[], Figure]]:
    """Returns functions that draw the figures, by the name of their file.

    Args:
        records: the trials that count.
        importances: returns how much each key explains, see `importances_figure`.
        space: the values that keys may have.
        metric: name of the values.
    """
    return {
        "history.png": lambda: history_figure(records, metric),
        "importances.png": lambda: importances_figure(importances(), metric),
        "parallel.png": lambda: parallel_figure(records, space, metric),
    }


def history_figure(records: Sequence[TrialRecord], metric: str) -> Figure:
    """Returns a figure of the value of each trial by its number, and of the best so far.

    Args:
        records: the trials that count.
        metric: name of the values.
    """
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    for number, (state, marker) in enumerate(MARKERS.items()):
        points = [(r.number, r.value) for r in records if r.state == state and r.value is not None]
        if points:
            numbers, values = zip(*points, strict=True)
            style: dict[str, Any] = {"color": COLOURS[number], "label": state, "ls": "none"}
            axes.plot(numbers, values, marker=marker, ms=5, **style)
        if points and state == COMPLETE:
            best = np.minimum.accumulate(values)
            axes.step(numbers, best, where="post", color=MUTED, lw=1.2, label="best so far")
    label = "without a value"
    for record in records:
        if record.value is None:
            axes.axvline(record.number, color=MUTED, lw=0.8, ls=":", label=label)
            label = "_"  # once in the legend
    _show_most(axes, [(r.number, r.value) for r in records if r.value is not None])
    if records:
        axes.set_xlim(min(r.number for r in records) - 0.5, max(r.number for r in records) + 0.5)
    axes.set(xlabel="trial", ylabel=metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style_axes(axes)
    if records:
        axes.legend(**PLAIN_LEGEND)
    return figure


def _show_most(axes: Axes, points: Sequence[tuple[int, float]]) -> None:
    """Limits an axis to the low values if a few others are far above; arrows mark those."""
    if len(points) < 5:
        return
    values = [value for _, value in points]
    low, most = min(values), float(np.quantile(values, SHOWN_SHARE))
    if max(values) - low > 3 * (most - low) > 0:
        margin = 0.1 * (most - low)
        top = most + 3 * margin
        axes.set_ylim(low - margin, top)
        above = [number for number, value in points if value > top]
        style: dict[str, Any] = {"color": MUTED, "ms": 6, "label": "above the axis"}
        height = np.full(len(above), 0.97)
        axes.plot(above, height, "^", transform=axes.get_xaxis_transform(), **style)


def importances_figure(importances: Mapping[str, float], metric: str) -> Figure:
    """Returns a figure of the share of the variance that each key explains.

    Args:
        importances: the shares by key; empty if too few trials are complete.
        metric: name of the values.
    """
    figure = new_figure(6.4, 1.2 + 0.4 * max(2, len(importances)))
    axes = figure.subplots()
    names = list(importances)[::-1]
    bars = axes.barh(names, [importances[name] for name in names], color=COLOURS[0])
    axes.bar_label(bars, fmt=" %.2f", fontsize=9)
    axes.set(xlabel=f"share of the variance of {metric}", xlim=(0, 1.1))
    style_axes(axes)
    if not importances:
        axes.set_yticks([])
        text = "too few trials are complete"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    return figure


def parallel_figure(records: Sequence[TrialRecord], space: Space, metric: str) -> Figure:
    """Returns a figure with an axis for each key and a line for each trial.

    Complete trials have the colour of their value; the others are grey.

    Args:
        records: the trials that count.
        space: the values that keys may have.
        metric: name of the values.
    """
    figure = new_figure(1.6 * (len(space) + 1) + 1.4, 4.6)
    axes = figure.subplots()
    complete = {r.number: r.value for r in records if r.state == COMPLETE and r.value is not None}
    known = [*complete.values()] or [0.0, 1.0]
    scale = Normalize(min(known), max(float(np.quantile(known, SHOWN_SHARE)), min(known) + 1e-12))
    colours = colormaps["viridis_r"]
    places = range(len(space))
    for record in sorted(records, key=lambda r: (r.number in complete, -(r.value or 0))):
        if {*record.values} != {*space}:
            continue
        heights = [_height(space[key], record.values[key]) for key in space]
        if (value := complete.get(record.number)) is not None:
            axes.plot(places, heights, color=colours(scale(value)), lw=1.6, alpha=0.9)
        else:
            axes.plot(places, heights, color=MUTED, lw=0.6, alpha=0.35)
    for place, values in enumerate(space.values()):
        axes.axvline(place, color="black", lw=0.8)
        for value in _ticks(values):
            text = value if isinstance(value, str) else f"{value:.3g}"
            axes.text(place + 0.03, _height(values, value), text, fontsize=8, va="center")
    axes.set_xticks(places, [key.replace(".", ".\n", 1) for key in space], fontsize=9)
    axes.set(xlim=(-0.2, len(space) - 0.6), ylim=(-0.06, 1.06), yticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(ScalarMappable(scale, colours), ax=axes, label=metric, extend="max")
    return figure


def _height(values: Range | Sequence[Any], value: Any) -> float:
    """Returns where a value is on its axis, from 0 to 1."""
    if not isinstance(values, Range):
        return list(values).index(value) / max(1, len(values) - 1)
    low, high, at = (np.log(x) if values.log else x for x in (values.low, values.high, value))
    return float((at - low) / (high - low))


def _ticks(values: Range | Sequence[Any]) -> list[Any]:
    if not isinstance(values, Range):
        return list(values)
    low, high = values.low, values.high
    middle = (low * high) ** 0.5 if values.log else (low + high) / 2
    return [low, middle, high]
