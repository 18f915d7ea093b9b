"""Figures of an emulation: what was held out, and how it was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flowpm_dist.corrections.options import SPACING
from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    PLAIN_LEGEND,
    new_figure,
    plain_log_ticks,
    style_axes,
)

LABELS = {
    "P": "P over the truth's",
    "1 - r": "1 - r with the truth",
    "redshift space P": "redshift space: P over the truth's",
    "velocity P": "velocities: P over the truth's",
}
"""Quantity of scores.csv -> what its axis says."""


def correction_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Returns a figure of P over the truth's and of 1 - r by k, for each time a column.

    If velocities were learned, two more rows have P in redshift space and of velocities. Each
    spacing of particles has a colour.

    Args:
        rows: of scores.csv.
    """
    times = sorted({row["a"] for row in rows})
    quantities = [name for name in LABELS if f"{name} plain" in rows[0]]
    figure = new_figure(4.6 * len(times) + 0.4, 3.2 * len(quantities))
    axes = figure.subplots(len(quantities), len(times), squeeze=False, sharex=True, sharey="row")
    cells = sorted({row[SPACING] for row in rows})
    for column, a in zip(axes.T, times, strict=True):
        for panel, quantity in zip(column, quantities, strict=True):
            for number, cell in enumerate(cells):
                of = f", {cell:g} Mpc/h" if len(cells) > 1 else ""
                here = [row for row in rows if row["a"] == a and row[SPACING] == cell]
                corrected = {"color": COLOURS[number % len(COLOURS)]}
                plain = {**corrected, "linestyle": ":"} if of else {"color": MUTED}
                for name, style in (("plain", plain), ("corrected", corrected)):
                    k, each = _curves(here, f"{quantity} {name}")
                    for values in each:
                        panel.plot(k, values, **style, alpha=0.35, linewidth=0.8)
                    panel.plot(k, np.mean(each, axis=0), **style, linewidth=2.0, label=name + of)
            style_axes(panel)
            panel.set_xscale("log")
            plain_log_ticks(panel.xaxis)
            if quantity == "1 - r":
                panel.set_yscale("log")
            else:
                panel.axhspan(0.99, 1.01, color=MUTED, alpha=0.15, linewidth=0)
        column[0].set_title(f"a = {a:g}")
        column[-1].set_xlabel("k [h/Mpc]")
    values = [row[f"P {name}"] for row in rows for name in ("plain", "corrected")]
    axes[0, 0].set_ylim(min(0.5, 0.98 * min(values)), max(1.15, 1.02 * max(values)))
    for panel, quantity in zip(axes[:, 0], quantities, strict=True):
        panel.set_ylabel(LABELS[quantity])
    axes[0, 0].legend(**PLAIN_LEGEND)
    return figure


def learning_figure(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Returns a figure of the loss of each iteration, and of the universes held out.

    Args:
        rows: of iterations.csv.
    """
    figure = new_figure(6.4, 4.0)
    panel = figure.subplots()
    for name, style in (
        ("loss", {"color": MUTED, "linewidth": 0.8, "label": "each"}),
        ("held out", {"color": COLOURS[0], "marker": "o", "label": "held out"}),
    ):
        points = [(int(row["iteration"]), float(row[name])) for row in rows if row[name]]
        panel.plot(*zip(*points, strict=True), **style)
    style_axes(panel)
    panel.set_yscale("log")
    panel.set_xlabel("iteration")
    panel.set_ylabel("loss")
    panel.legend(**PLAIN_LEGEND)
    return figure


def _curves(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns k and a quantity of each universe [universe, k], of one time and spacing."""
    k = sorted({row["k [h/Mpc]"] for row in rows})
    universes = dict.fromkeys(row["universe"] for row in rows)
    values = [[row[name] for row in rows if row["universe"] == u] for u in universes]
    return np.array(k), np.array(values)
