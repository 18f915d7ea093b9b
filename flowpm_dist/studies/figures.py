"""The figures of a study: scaling, phases, what the keys change, and energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    PLAIN_LEGEND,
    SMALL_TITLE,
    new_figure,
    plain_log_ticks,
    style_axes,
)
from flowpm_dist.studies.measures import (
    ENERGY,
    EPOCH,
    PHASE,
    POWER,
    STEP,
    THROUGHPUT,
    TRAINED,
    VALIDATED,
)
from flowpm_dist.studies.summary import (
    EFFICIENCY,
    ENERGIES,
    KEYS,
    PHASES,
    SCALING,
    SPEED_UP,
    Group,
    label_of,
    ranks_of,
)

MOST_CURVES, MOST_BARS = 12, 40
"""The most curves of a panel, and the most bars, that a reader can distinguish."""


def figures(groups: Sequence[Group]) -> dict[str, Callable[[], Figure]]:
    """Returns functions that draw the figures for which there is data, by the name of their file.

    Args:
        groups: the runs of each point.
    """
    drawings: dict[str, Callable[[], Figure]] = {}
    timed = [group for group in groups if group.values(STEP)]
    columns = {name for group in timed for run in group.runs for name in run.measured}
    if len({group.ranks for group in timed}) > 1:
        drawings[SCALING] = partial(scaling_figure, timed)
    if any(name.startswith(PHASE) for name in columns):
        drawings[PHASES] = partial(phases_figure, timed[:MOST_BARS])
    if keys := numeric_keys(timed):
        drawings[KEYS] = partial(keys_figure, timed, keys)
    if ENERGY in columns:
        drawings[ENERGIES] = partial(energy_figure, timed)
    return drawings


def scaling_figure(groups: Sequence[Group]) -> Figure:
    """Returns a figure of time, throughput, speed-up and efficiency against the ranks.

    Bars extend from the least value to the greatest of the repetitions; dotted lines are ideal.
    """
    figure = new_figure(9.2, 7.0)
    panels = figure.subplots(2, 2, sharex=True).ravel()
    names = (STEP, THROUGHPUT, SPEED_UP, EFFICIENCY)
    ranks = sorted({group.ranks for group in groups})
    for number, curve in enumerate(_by_values(groups)):
        several = [group for group in curve if group.spread(SPEED_UP) is not None]
        # A mesh of its own is compared with the fewest ranks, which have another mesh.
        first = several[0].first if several else None
        if first is not None and first.ranks < several[0].ranks:
            several = [first, *several]
        elif len(several) < 2:
            continue
        for axes, name in zip(panels, names, strict=True):
            _draw(axes, several, name, number, curve[0].label)
    for axes, name in zip(panels, names, strict=True):
        axes.set(xscale="log", ylabel=name)
        axes.set_xticks(ranks, [str(each) for each in ranks], minor=False)
        axes.minorticks_off()
        style_axes(axes)
    ideal = np.array(ranks) / ranks[0]
    panels[2].plot(ranks, ideal, ls=":", color=MUTED, label="ideal")
    panels[3].axhline(1, ls=":", color=MUTED)
    panels[3].set_ylim(bottom=0)
    for axes in panels[:3]:
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
    for axes in panels[2:]:
        axes.set_xlabel("ranks")
    if any(line.get_label()[0] != "_" for line in panels[2].lines):
        panels[2].legend(**PLAIN_LEGEND)
    return figure


def _draw(
    axes: Axes, groups: Sequence[Group], name: str, number: int, label: str, key: str = ""
) -> None:
    """Draws a curve of medians, with bars from the least to the greatest value.

    Args:
        axes: what to draw on.
        groups: the points.
        name: the column, see `Group.spread`; points without it are left out.
        number: number of the curve.
        label: its label.
        key: the key along the axis; by default the ranks are.
    """
    points = [
        (g.varied[key] if key else g.ranks, *values) for g in groups if (values := g.spread(name))
    ]
    if points:
        at, medians, least, greatest = np.array(points).T
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": label}
        bars = (medians - least, greatest - medians)
        axes.errorbar(at, medians, bars, fmt="o-", ms=4, lw=1.3, capsize=2, **style)


def phases_figure(groups: Sequence[Group]) -> Figure:
    """Returns a figure of the time of each phase in a step, stacked, with a bar for each point."""
    measured = (name for group in groups for run in group.runs for name in run.measured)
    names = [name for name in dict.fromkeys(measured) if name.startswith(PHASE)]
    bars = [[(group.spread(name) or (0.0,))[0] for name in names] for group in groups]
    figure = new_figure(7.6, 1.4 + 0.34 * len(groups))
    axes = figure.add_subplot()
    left = np.zeros(len(groups))
    places = np.arange(len(groups))[::-1]
    for number, (name, widths) in enumerate(zip(names, np.array(bars).T, strict=True)):
        if not widths.any():
            continue
        shade: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "hatch": "//" * (number // len(COLOURS)),
        }
        axes.barh(places, widths, left=left, label=name.removeprefix(PHASE), edgecolor="w", **shade)
        left += widths
    labels = [", ".join(filter(None, [group.label, ranks_of(group.ranks)])) for group in groups]
    axes.set_yticks(places, labels)
    axes.set(xlabel="time in a step [s]")
    style_axes(axes)
    figure.legend(loc="outside upper center", ncols=min(4, len(names)), **PLAIN_LEGEND)
    return figure


def numeric_keys(groups: Sequence[Group]) -> list[str]:
    """Returns the keys with several values, all of them numbers."""
    keys = dict.fromkeys(key for group in groups for key in group.varied)
    values = {key: [group.varied[key] for group in groups if key in group.varied] for key in keys}
    return [key for key in keys if all(map(_number, values[key])) and len({*values[key]}) > 1]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def keys_figure(groups: Sequence[Group], keys: Sequence[str]) -> Figure:
    """Returns a figure of times, losses and accuracies against each key, with a curve a setting."""
    names = [n for n in (EPOCH, STEP, *TRAINED, *VALIDATED) if any(g.values(n) for g in groups)]
    if EPOCH in names:
        names.remove(STEP)
    figure = new_figure(3.5 * len(names), 3.1 * len(keys) + 0.6)
    panels = figure.subplots(len(keys), len(names), squeeze=False)
    for row, key in zip(panels, keys, strict=True):
        values = sorted({group.varied[key] for group in groups})
        for axes, name in zip(row, names, strict=True):
            for number, curve in enumerate(_by_values(groups, key)):
                first = curve[0]
                others = {k: v for k, v in first.varied.items() if k in first.keys and k != key}
                label = ", ".join(filter(None, [label_of(others), ranks_of(first.ranks)]))
                _draw(axes, curve, name, number, label, key)
            axes.set(xlabel=key.rpartition(".")[2].replace("_", " "))
            if values[0] > 0 and values[-1] >= 4 * values[0]:
                axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.set_title(name.replace("_", " "), **SMALL_TITLE)
            style_axes(axes)
        if len(row[-1].get_legend_handles_labels()[1]) > 1:
            row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), **PLAIN_LEGEND)
    return figure


def energy_figure(groups: Sequence[Group]) -> Figure:
    """Returns a figure of the energy of a run and its mean power against the ranks."""
    figure = new_figure(8.4, 3.6)
    for axes, name in zip(figure.subplots(1, 2), (ENERGY, POWER), strict=True):
        for number, curve in enumerate(_by_values(groups)):
            _draw(axes, curve, name, number, curve[0].label)
        ranks = sorted({group.ranks for group in groups})
        axes.set_xticks(ranks)
        axes.set(xlabel="ranks", ylabel=name)
        axes.set_ylim(bottom=0)
        style_axes(axes)
        if any(group.label for group in groups):
            axes.legend(**PLAIN_LEGEND)
    return figure


def _by_values(groups: Sequence[Group], key: str = "") -> list[list[Group]]:
    """Returns the groups of each curve, of the first `MOST_CURVES`.

    Args:
        groups: all groups.
        key: the key along the axis; by default the ranks are.
    """
    curves: dict[Any, list[Group]] = {}
    for group in groups:
        others = repr({name: value for name, value in group.varied.items() if name != key})
        curves.setdefault((others, group.ranks if key else 0), []).append(group)
    several = [*curves.values()][:MOST_CURVES]
    for curve in several:
        curve.sort(key=lambda group: group.varied[key] if key else group.ranks)
    return several
