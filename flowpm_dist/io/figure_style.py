"""The look that all figures share: colours, sizes, ticks.

Figures are drawn without a display and without touching matplotlib's global state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

MEASURED, THEORY, MUTED = "#1f3a5f", "#d1495b", "#7a7a7a"

COLOURS = (MEASURED, THEORY, "#2a9d8f", "#e9a03b", "#8d6a9f", "#5b8e3e")
"""Colours of several curves in one panel."""

SMALL_TITLE: dict[str, Any] = {"fontsize": 11}
PLAIN_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9}
SYMBOLS = {"Omega_m": r"$\Omega_m$", "sigma8": r"$\sigma_8$", "n_s": r"$n_s$"}


def symbol(name: str) -> str:
    """Returns how figures write the name of a parameter."""
    return SYMBOLS.get(name, name)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure whose layout keeps labels apart.

    Args:
        width, height: [inches].
    """
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def style_axes(axes: Axes) -> None:
    """Give a panel a faint grid behind the data, and ticks that point inwards on all sides."""
    axes.grid(alpha=0.25, lw=0.6, which="major")
    axes.tick_params(which="both", direction="in", top=True, right=True)
    axes.set_axisbelow(True)


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, and with more than one of them.

    Args:
        axis: whose limits are set, or follow from what has been plotted.
    """
    low, high = sorted(axis.get_view_interval())
    if high < 4 * low:
        axis.set_major_locator(MaxNLocator(5))
    else:
        crowded = high > 150 * low
        axis.set_major_locator(LogLocator(subs=(1,) if crowded else (1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", metadata={"Software": "flowpm-dist"})
