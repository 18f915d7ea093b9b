"""Figures of a density field: a slab of it, and its power spectrum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from flowpm_dist.io.figure_style import (
    MEASURED,
    MUTED,
    PLAIN_LEGEND,
    SMALL_TITLE,
    THEORY,
    new_figure,
    plain_log_ticks,
    style_axes,
)

if TYPE_CHECKING:
    from flowpm_dist.grid.field import Field


def project(field: Field, cells: int) -> np.ndarray | None:
    """Returns the mean of a field over the first `cells` layers of z. On all ranks.

    Each rank averages its own block, so that only maps are sent.

    Args:
        field: [nx, ny, nz].
        cells: thickness of the slab, from 1 to nz.

    Returns:
        [nx, ny], float64, on rank 0; None on the others.

    Raises:
        ValueError: the field has fewer layers than `cells`, or `cells` is below 1.
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
    """Returns a figure of a projected density, in logarithmic colour.

    Args:
        slab: projected density [nx, ny], in units of the mean density.
        box_size: sides of the box [Mpc/h].
        thickness: of the slab [Mpc/h].
        a: scale factor.
    """
    aspect = box_size[1] / box_size[0]
    width = 6.0
    figure = new_figure(width + 1.4, float(np.clip(width * aspect, 2.5, 14)) + 0.9)
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
    axes.set_title(f"a slab of {thickness:.3g} Mpc/$h$ at $z = {1 / a - 1:.3g}$", **SMALL_TITLE)
    bar = figure.colorbar(image, ax=axes, extend="both", fraction=0.046 * aspect, pad=0.02)
    bar.set_label("density / mean density")
    plain_log_ticks(bar.ax.yaxis)
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
    """Returns a figure of a measured power spectrum and linear theory, with their ratio below.

    Args:
        k: bin means [h/Mpc].
        power: measured [(Mpc/h)^3].
        modes: number of Fourier modes in each bin; a mode and its conjugate count as two.
        linear: power spectrum of linear theory at the same time [(Mpc/h)^3], given k [h/Mpc].
        nyquist: Nyquist wave number of the grid [h/Mpc].
        a: scale factor.
    """
    figure = new_figure(6.8, 6.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    error = np.sqrt(2 / np.maximum(modes, 1))
    style = {"fmt": "o", "ms": 3, "lw": 0.9, "color": MEASURED}
    fine = np.geomspace(k[0], k[-1], 400)
    top.plot(fine, linear(fine), color=THEORY, lw=1.6, label="linear theory", zorder=1)
    top.errorbar(k, power, power * error, **style, label="measured, with cosmic variance")
    top.set(xscale="log", yscale="log", ylabel=r"$P(k)$  [(Mpc/$h$)$^3$]")
    top.set_title(f"matter power spectrum at $z = {1 / a - 1:.3g}$", **SMALL_TITLE)
    ratio = power / linear(k)
    below.axhline(1, color=THEORY, lw=1.6, zorder=1)
    below.errorbar(k, ratio, ratio * error, **style)
    below.set(yscale="log", xlabel=r"$k$  [$h$/Mpc]", ylabel="measured / linear")
    low, high = 0.9 * min(ratio.min(), 0.6), 1.1 * max(ratio.max(), 1.6)
    below.set_ylim(max(low, 0.05), min(high, 50))
    plain_log_ticks(below.yaxis)
    for axes in (top, below):
        axes.axvline(nyquist, color=MUTED, lw=1, ls=":", label="Nyquist of the grid")
        style_axes(axes)
    top.legend(loc="lower left", **PLAIN_LEGEND)
    return figure
