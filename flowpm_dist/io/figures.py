"""The style that all figures share, and the figures of a density and of its power spectrum.

Figures are drawn without a display and without touching matplotlib's global state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage, imsave
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from flowpm_dist.cosmology.parameters import PARAMETERS
from flowpm_dist.io.files import written_whole
from flowpm_dist.io.labels import POWER_OF_K, WAVENUMBER, gaussian_scatter

MEASURED, THEORY, MUTED = "#1f3a5f", "#d1495b", "#7a7a7a"

COLOURS = (MEASURED, THEORY, "#2a9d8f", "#e9a03b", "#8d6a9f", "#5b8e3e")
"""Colours of several curves in one panel."""

SMALL_TITLE: dict[str, Any] = {"fontsize": 11, "wrap": True}
"""Titles are broken into lines where they are longer than the figure is wide."""
PLAIN_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9}
NOISE = "particles at random"


LOW_MAP = 0.5
"""A map is wide and low below this ratio of its height to its width."""


def symbol(name: str) -> str:
    """Returns the symbol of a parameter for figures."""
    return PARAMETERS[name].symbol if name in PARAMETERS else name


def new_figure(width: float, height: float, *, shown: bool = False) -> Figure:
    """Returns an empty figure whose layout keeps labels apart.

    Args:
        width, height: [inches].
        shown: whether it is a figure of pyplot, which a notebook shows.
    """
    if shown:
        from matplotlib import pyplot

        return pyplot.figure(figsize=(width, height), layout="constrained")
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def style_axes(axes: Axes) -> None:
    """Draws a faint grid behind the data of a panel, and ticks that point inwards on all sides."""
    axes.grid(alpha=0.25, lw=0.6, which="major")
    axes.tick_params(which="both", direction="in", top=True, right=True)
    axes.set_axisbelow(True)


def plain_log_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis with at least two plain numbers; call it after plotting."""
    low, high = sorted(axis.get_view_interval())
    if high < 4 * low:
        axis.set_major_locator(MaxNLocator(5))
    else:
        crowded = high > 150 * low
        axis.set_major_locator(LogLocator(subs=(1,) if crowded else (1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axis.set_minor_formatter(NullFormatter())


def add_colour_bar(axes: Axes, image: AxesImage, label: str, aspect: float) -> None:
    """Adds the bar of colours of a map: below a map that is wide and low, otherwise at its right.

    Args:
        axes: the panel of the map.
        image: the map.
        label: the label of the bar.
        aspect: height of the map divided by its width.
    """
    below = aspect < LOW_MAP
    placement: dict[str, Any] = {"fraction": 0.046 * min(aspect, 1), "pad": 0.02}
    if below:
        placement = {"location": "bottom", "aspect": 40}
    elif aspect > 1:
        placement["aspect"] = 20 * aspect
    bar = axes.figure.colorbar(image, ax=axes, extend="both", label=label, **placement)
    if isinstance(image.norm, LogNorm):
        plain_log_ticks(bar.ax.xaxis if below else bar.ax.yaxis)


def draw_measured(
    axes: Axes,
    x: np.ndarray,
    values: np.ndarray,
    scatter: np.ndarray | None = None,
    *,
    colour: str = MEASURED,
    label: str = "",
) -> None:
    """Draws a measured curve: joined points, or points with error bars.

    Args:
        axes: what to draw on.
        x, values: [bin].
        scatter: the standard deviation of each value [bin]; None for no error bars.
        colour, label: the curve's colour and label.
    """
    if scatter is None:
        axes.plot(x, values, "o-", ms=3, lw=1.2, color=colour, label=label)
        return
    axes.errorbar(x, values, scatter, fmt="o", ms=3, lw=0.9, color=colour, label=label)


def draw_curves(
    axes: Axes | None,
    x: np.ndarray,
    curves: np.ndarray,
    names: tuple[str, str],
    *,
    scatter: np.ndarray | None = None,
    labels: Sequence[str] = ("",),
    logarithmic: str = "x",
) -> Axes:
    """Draws the curves of a result, and returns the axes.

    Args:
        axes: what to draw on; None for a new figure of pyplot.
        x: [..., bin], which broadcasts with the curves.
        curves: [..., bin].
        names: labels of the two axes.
        scatter: standard deviations [..., bin], which broadcast with the curves; None for no error
            bars.
        labels: the label of each curve [...], which broadcasts; curves of one label share a colour.
        logarithmic: "", "x" or "xy", the axes with a logarithmic scale.
    """
    axes = new_figure(6.4, 4.4, shown=True).add_subplot() if axes is None else axes
    used = len({line.get_color() for line in axes.lines})
    curves = np.atleast_2d(curves)
    of_curves = np.broadcast_to(labels, curves.shape[:-1]).ravel().tolist()
    colours = {name: COLOURS[(used + n) % 6] for n, name in enumerate(dict.fromkeys(of_curves))}
    rows = [
        np.broadcast_to(each, curves.shape).reshape(len(of_curves), -1)
        for each in (x, curves, *(() if scatter is None else (scatter,)))
    ]
    for number, row in enumerate(zip(*rows, strict=True)):
        name = of_curves[number]
        label = "" if name in of_curves[:number] else name
        draw_measured(axes, *row, colour=colours[name], label=label)
    scales = {f"{axis}scale": "log" for axis in logarithmic}
    axes.set(xlabel=names[0], ylabel=names[1], **scales)
    style_axes(axes)
    if logarithmic:
        plain_log_ticks(axes.xaxis)
    if any(of_curves):
        axes.legend(**PLAIN_LEGEND)
    return axes


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG file, which appears when it is complete.

    Jobs call it by `flowpm_dist.io.drawing.drawing`.

    Raises:
        WriteError: the file cannot be written.
    """
    FigureCanvasAgg(figure)
    with written_whole(path) as aside:
        figure.savefig(aside, format="png", metadata={"Software": "flowpm-dist"})


def _shades(slab: np.ndarray) -> tuple[np.ndarray, LogNorm]:
    """Returns a projected density [y, x] without its lowest values, and its scale of colours."""
    positive = slab[slab > 0]
    low, high = np.percentile(positive, [0.5, 99.9]) if positive.size else (0.5, 2.0)
    return np.maximum(slab, low).T, LogNorm(vmin=low, vmax=max(high, 1.001 * low))


def density_picture(slab: np.ndarray) -> bytes:
    """Returns the map of `density_figure` alone, as a PNG file with a pixel for each cell.

    Args:
        slab: projected density [nx, ny].
    """
    shown, norm = _shades(slab)
    file = io.BytesIO()
    imsave(file, colormaps["inferno"](norm(shown)), origin="lower", format="png")
    return file.getvalue()


def density_figure(
    slab: np.ndarray, box_size: tuple[float, float, float], thickness: float, a: float
) -> Figure:
    """Returns a figure of a projected density, in logarithmic colour.

    Args:
        slab: projected density [nx, ny], in units of the mean density.
        box_size: sides of the box [Mpc/h].
        thickness: thickness of the slab [Mpc/h].
        a: scale factor.
    """
    aspect = box_size[1] / box_size[0]
    width = 6.0
    figure = new_figure(width + 1.4, float(np.clip(width * aspect, 2.5, 14)) + 0.9)
    axes = figure.add_subplot()
    shown, norm = _shades(slab)
    extent = (0, box_size[0], 0, box_size[1])
    image = axes.imshow(shown, origin="lower", extent=extent, norm=norm, cmap="inferno")
    axes.set(xlabel=r"$x$  [Mpc/$h$]", ylabel=r"$y$  [Mpc/$h$]")
    axes.set_title(f"a slab of {thickness:.3g} Mpc/$h$ at $z = {1 / a - 1:.3g}$", **SMALL_TITLE)
    add_colour_bar(axes, image, "density / mean density", aspect)
    return figure


def power_spectrum_figure(
    k: np.ndarray,
    power: np.ndarray,
    modes: np.ndarray,
    linear: Callable[[np.ndarray], np.ndarray],
    *,
    nyquist: float,
    a: float,
    noise: float | None = None,
) -> Figure:
    """Returns a figure of a measured power spectrum and linear theory, with their ratio below.

    Args:
        k: bin means [h/Mpc].
        power: measured [(Mpc/h)^3].
        modes: number of Fourier modes in each bin; k and -k are both counted.
        linear: power spectrum of linear theory at the same time [(Mpc/h)^3], given k [h/Mpc].
        nyquist: Nyquist wave number of the grid [h/Mpc].
        a: scale factor.
        noise: power of particles at random [(Mpc/h)^3], which is drawn as well; None for none.
    """
    figure = new_figure(6.8, 6.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    fine = np.geomspace(k[0], k[-1], 400)
    top.plot(fine, linear(fine), color=THEORY, lw=1.6, label="linear theory", zorder=1)
    draw_measured(
        top, k, power, gaussian_scatter(power, modes), label="measured, with cosmic variance"
    )
    if noise is not None:
        top.plot(fine[[0, -1]], [noise] * 2, color=MUTED, lw=1.0, ls="--", label=NOISE)
    top.set(xscale="log", yscale="log", ylabel=POWER_OF_K)
    top.set_title(f"matter power spectrum at $z = {1 / a - 1:.3g}$", **SMALL_TITLE)
    ratio = power / linear(k)
    above = ratio[ratio > 0]
    below.axhline(1, color=THEORY, lw=1.6, zorder=1)
    draw_measured(below, k, ratio, gaussian_scatter(ratio, modes))
    below.set(yscale="log", xlabel=WAVENUMBER, ylabel="measured / linear")
    below.set_ylim(0.9 * above.min(initial=0.6), 1.1 * above.max(initial=1.6))
    plain_log_ticks(below.yaxis)
    for axes in (top, below):
        axes.axvline(nyquist, color=MUTED, lw=1, ls=":", label="Nyquist of the grid")
        style_axes(axes)
    top.legend(loc="best", **PLAIN_LEGEND)
    return figure
