"""Figures of a run: the projected density and the power spectrum.

The figures are drawn without a display and without touching matplotlib's global state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from flowpm_dist.grid.field import Field

MEASURED, THEORY, MUTED = "#1f3a5f", "#d1495b", "#7a7a7a"


def project(field: Field, cells: int) -> np.ndarray | None:
    """Mean of a field over the first `cells` layers of z. On all ranks.

    Each rank averages its own block; only the map travels.

    Args:
        field: [nx, ny, nz].
        cells: thickness of the slab, from 1 to nz.

    Returns:
        [nx, ny], float64, on rank 0; None on the others.

    Raises:
        ValueError: `cells` out of range.
    """
    if not 1 <= cells <= field.grid[2]:
        raise ValueError(f"a slab of {cells} cells; the field has {field.grid[2]} along z")
    part = np.asarray(field.block[:, :, :cells], dtype=np.float64).mean(axis=2)
    parts = field.mesh.gather_to_root(part)
    places = field.mesh.gather_to_root(np.asarray(field.offset[:2], dtype=np.int64))
    if parts is None or places is None:
        return None
    whole = np.empty(tuple(field.grid[:2]))
    for (x, y), values in zip(places, parts, strict=True):
        whole[x : x + values.shape[0], y : y + values.shape[1]] = values
    return whole


def density_figure(
    slab: np.ndarray, box_size: tuple[float, float, float], thickness: float, a: float
) -> Figure:
    """A projected density, in log colour.

    Args:
        slab: [nx, ny], mean density 1.
        box_size: [Mpc/h].
        thickness: of the slab [Mpc/h].
        a: scale factor.
    """
    aspect = box_size[1] / box_size[0]
    width = 6.0
    figure = Figure(figsize=(width + 1.4, float(np.clip(width * aspect, 2.5, 14)) + 0.9), dpi=160)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    positive = slab[slab > 0]
    low, high = np.percentile(positive, [0.5, 99.9]) if positive.size else (0.5, 2.0)
    norm = LogNorm(vmin=low, vmax=max(high, 1.001 * low))
    image = axes.imshow(
        np.maximum(slab, low).T,
        origin="lower",
        extent=(0, box_size[0], 0, box_size[1]),
        norm=norm,
        cmap="inferno",
    )
    axes.set_xlabel(r"$x$  [Mpc/$h$]")
    axes.set_ylabel(r"$y$  [Mpc/$h$]")
    axes.set_title(f"a slab of {thickness:.3g} Mpc/$h$ at $z = {1 / a - 1:.3g}$", fontsize=11)
    bar = figure.colorbar(image, ax=axes, extend="both", fraction=0.046 * aspect, pad=0.02)
    bar.set_label("density / mean density")
    _plain_log(bar.ax.yaxis, float(norm.vmin or low), float(norm.vmax or high))
    return figure


def power_spectrum_figure(
    k: np.ndarray,
    power: np.ndarray,
    modes: np.ndarray,
    linear: Callable[[np.ndarray], np.ndarray],
    *,
    nyquist: float,
    a: float,
) -> Figure:
    """A measured power spectrum above the linear theory, and their ratio below.

    Args:
        k: bin means [h/Mpc].
        power: measured [(Mpc/h)^3].
        modes: Fourier modes in each bin; a mode and its conjugate count as two.
        linear: linear theory at the same time [(Mpc/h)^3], of k [h/Mpc].
        nyquist: of the grid [h/Mpc].
        a: scale factor.
    """
    figure = Figure(figsize=(6.8, 6.4), dpi=160)
    figure.set_layout_engine("constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    error = np.sqrt(2 / np.maximum(modes, 1))
    style = {"fmt": "o", "ms": 3, "lw": 0.9, "color": MEASURED}
    fine = np.geomspace(k[0], k[-1], 400)
    top.plot(fine, linear(fine), color=THEORY, lw=1.6, label="linear theory", zorder=1)
    top.errorbar(k, power, power * error, **style, label="measured, with cosmic variance")
    top.set(xscale="log", yscale="log", ylabel=r"$P(k)$  [(Mpc/$h$)$^3$]")
    top.set_title(f"matter power spectrum at $z = {1 / a - 1:.3g}$", fontsize=11)
    ratio = power / linear(k)
    below.axhline(1, color=THEORY, lw=1.6, zorder=1)
    below.errorbar(k, ratio, ratio * error, **style)
    below.set(yscale="log", xlabel=r"$k$  [$h$/Mpc]", ylabel="measured / linear")
    low, high = 0.9 * min(ratio.min(), 0.6), 1.1 * max(ratio.max(), 1.6)
    below.set_ylim(max(low, 0.05), min(high, 50))
    _plain_log(below.yaxis, *below.get_ylim())
    for axes in (top, below):
        axes.axvline(nyquist, color=MUTED, lw=1, ls=":", label="Nyquist of the grid")
        axes.grid(alpha=0.25, lw=0.6, which="major")
        axes.tick_params(which="both", direction="in", top=True, right=True)
    top.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def _plain_log(axis: Axis, low: float, high: float) -> None:
    """Ticks on a short logarithmic axis, written as plain numbers."""
    wanted = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)]
    ticks = [t for t in wanted if low <= t <= high]
    if len(ticks) > 7:
        ticks = [t for t in ticks if np.isclose(np.log10(t) % 1, 0)]
    if len(ticks) < 2:
        ticks = [t for t in MaxNLocator(5).tick_values(low, high) if low <= t <= high]
    axis.set_ticks(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: Path) -> None:
    """Draw the figure into a PNG file."""
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", metadata={"Software": "flowpm-dist"})
