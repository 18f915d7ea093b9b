"""Figures of weak lensing: maps of convergence on the flat and the whole sky, and their power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Ellipse

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    NOISE,
    PLAIN_LEGEND,
    SMALL_TITLE,
    draw_measured,
    new_figure,
    plain_log_ticks,
    style_axes,
)
from flowpm_dist.io.labels import MULTIPOLE, POWER_PER_LOG, gaussian_scatter
from flowpm_dist.observables.light_cone.options import FlatField, SkyOptions

if TYPE_CHECKING:
    from flowpm_dist.observables.light_cone.results import ConvergenceSpectra

STICKS = 24
"""Sticks of shear along a side of the map."""
WIDTH = 1600
"""Pixels of a picture of the whole sky, across."""
KAPPA = r"convergence $\kappa$"
DELTA = r"overdensity $\delta$"


def _image(axes: Axes, kappa: np.ndarray, shown: np.ndarray, **how: Any) -> AxesImage:
    """Draws a map with colours for all but its most extreme values."""
    low, high = np.percentile(kappa, [1, 99.7])
    limits = {"vmin": low, "vmax": max(high, low + 1e-12)}
    return axes.imshow(shown, origin="lower", cmap="inferno", **limits, **how)


def field_figure(maps: Sequence[np.ndarray], field_of_view: float, name: str) -> Figure:
    """Returns a figure of a map of convergence on the flat sky, with sticks along the shear.

    Args:
        maps: convergence, and gamma1 and gamma2 of the shear, with 1 along x; [y, x] [1] each.
        field_of_view: side of the map [deg].
        name: name of the sources.
    """
    figure = new_figure(7.9, 6.4)
    draw_field(figure.add_subplot(), maps, field_of_view, name)
    return figure


def draw_field(axes: Axes, maps: Sequence[np.ndarray], field_of_view: float, name: str) -> None:
    """Draws a map of convergence as `field_figure` does, with its bar of colours."""
    kappa, *shear = maps
    image = _image(axes, kappa, kappa, extent=(0, field_of_view, 0, field_of_view))
    block = -(-len(kappa) // STICKS)
    first, second = (_means(gamma, block) for gamma in shear)
    size, angle = np.hypot(first, second), 0.5 * np.arctan2(second, first)
    spacing = block * field_of_view / len(kappa)
    centres = (np.arange(len(size)) + 0.5) * spacing
    max_shear = float(np.percentile(size, 99)) or 1.0
    scale = 0.95 * spacing / max_shear * np.minimum(1.0, max_shear / np.maximum(size, 1e-30))
    axes.quiver(
        *np.meshgrid(centres, centres),
        scale * size * np.cos(angle),
        scale * size * np.sin(angle),
        pivot="middle",
        angles="xy",
        scale_units="xy",
        scale=1,
        color="white",
        alpha=0.85,
        width=0.0026,
        headwidth=0,
        headlength=0,
        headaxislength=0,
    )
    title = f"sources: {name}; the longest sticks are a shear of {max_shear:.2g}"
    _frame_field(axes, image, field_of_view, title, KAPPA)


def new_axes(sky: SkyOptions) -> Axes:
    """Returns axes in a new figure of pyplot, for a map of a sky."""
    return new_figure(7.9, 6.4 if isinstance(sky, FlatField) else 5.15, shown=True).add_subplot()


def draw_plane(axes: Axes, delta: np.ndarray, field_of_view: float, title: str) -> None:
    """Draws the overdensity [y, x] of a plane of matter on the flat sky, as `draw_field` does."""
    image = _image(axes, delta, delta, extent=(0, field_of_view, 0, field_of_view))
    _frame_field(axes, image, field_of_view, title, DELTA)


def _frame_field(
    axes: Axes, image: AxesImage, field_of_view: float, title: str, label: str
) -> None:
    axes.set(xlabel=r"$x$  [deg]", ylabel=r"$y$  [deg]")
    axes.set(xlim=(0, field_of_view), ylim=(0, field_of_view))
    axes.set_title(title, **SMALL_TITLE)
    bar: dict[str, Any] = {"extend": "both", "fraction": 0.046, "pad": 0.02}
    axes.figure.colorbar(image, ax=axes, label=label, **bar)


def _means(values: np.ndarray, block: int) -> np.ndarray:
    """Returns the means over whole squares of pixels."""
    count = len(values) // block
    whole = values[: count * block, : count * block]
    return whole.reshape(count, block, count, block).mean(axis=(1, 3))


def sky_figure(kappa: np.ndarray, name: str) -> Figure:
    """Returns a figure of a map of convergence on the whole sky, in Mollweide's projection.

    The north pole is above, the longitude 0 in the middle. Longitudes grow to the left, as is
    usual for the sky.

    Args:
        kappa: [pixel] [1], in HEALPix's order of rings.
        name: name of the sources.
    """
    figure = new_figure(9.0, 5.7)
    draw_sky(figure.add_subplot(), kappa, f"convergence of sources: {name}")
    return figure


def draw_sky(axes: Axes, values: np.ndarray, title: str, label: str = KAPPA) -> None:
    """Draws a map [pixel] as `sky_figure` does, with its bar of colours."""
    shown = mollweide(values, WIDTH)
    image = _image(axes, values, shown, extent=(-2, 2, -1, 1), interpolation="antialiased")
    border = Ellipse((0, 0), 4, 2, fill=False, lw=1.0, color="black")
    axes.add_patch(border)
    image.set_clip_path(border)
    axes.set(xlim=(-2.02, 2.02), ylim=(-1.02, 1.02))
    axes.set_axis_off()
    axes.set_title(title, **SMALL_TITLE)
    below: dict[str, Any] = {"orientation": "horizontal", "fraction": 0.05, "pad": 0.03}
    axes.figure.colorbar(image, ax=axes, extend="both", aspect=40, label=label, **below)


def mollweide(values: np.ndarray, width: int) -> np.ndarray:
    """Returns a map in Mollweide's projection [y, x], bilinear, NaN outside of the sky.

    Args:
        values: [pixel], in HEALPix's order of rings.
        width: pixels across; half as many are high.
    """
    sphere = Healpix(round(math.sqrt(len(values) / 12)))
    x = (np.arange(width) + 0.5) / width * 4 - 2
    y = ((np.arange(width // 2) + 0.5) / (width // 2) * 2 - 1)[:, np.newaxis]
    across = np.sqrt(1 - y**2)
    inside = np.broadcast_to(np.abs(x) <= 2 * across, (width // 2, width))
    auxiliary = np.arcsin(y)
    latitude = np.arcsin((2 * auxiliary + np.sin(2 * auxiliary)) / np.pi)
    longitude = -np.pi * x / (2 * across)
    theta = np.broadcast_to(np.pi / 2 - latitude, inside.shape)[inside]
    pixels = np.full(inside.shape, np.nan)
    pixels[inside] = sphere.interpolated(values, theta, longitude[inside])
    return pixels


def power_figure(spectra: ConvergenceSpectra, names: Sequence[str]) -> Figure:
    """Returns a figure of auto spectra and theory, with their ratio below.

    Args:
        spectra: the spectra; l and -l count as two modes.
        names: names of the sources.
    """
    figure = new_figure(6.8, 6.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    ell, fine = spectra.ell, spectra.fine
    per_log, per_log_fine = (x * (x + 1) / (2 * np.pi) for x in (ell, fine))
    below.axhline(1, color=MUTED, lw=1.2, zorder=1)
    ratios = []
    for n, name in enumerate(names):
        pair = spectra.pairs.index((n, n))
        linear, halofit = per_log_fine * spectra.curves[:, n]
        colour = COLOURS[n % len(COLOURS)]
        top.plot(fine, halofit, color=colour, lw=1.4)
        top.plot(fine, linear, color=colour, lw=1.0, ls="--")
        shifted = ell * 1.012 ** (n - (len(names) - 1) / 2)  # so that no point hides another
        measured = per_log * spectra.power[pair]
        scatter = gaussian_scatter(measured, spectra.modes)
        draw_measured(top, shifted, measured, scatter, colour=colour, label=name)
        noise = per_log_fine * np.interp(fine, spectra.ell, spectra.noise[pair])
        top.plot(fine, noise, color=colour, lw=1.0, ls=":")
        ratio = spectra.power[pair] / spectra.halofit[pair]
        scatter = gaussian_scatter(ratio, spectra.modes)
        draw_measured(below, shifted, ratio, scatter, colour=colour)
        ratios.append(ratio)
    top.plot([], [], color=MUTED, lw=1.4, label="Limber, halofit")
    top.plot([], [], color=MUTED, lw=1.0, ls="--", label="Limber, linear")
    top.plot([], [], color=MUTED, lw=1.0, ls=":", label=NOISE)
    top.set(xscale="log", yscale="log", ylabel=POWER_PER_LOG)
    top.set_title("power of the convergence; bars: scatter of a Gaussian field", **SMALL_TITLE)
    below.set(xlabel=MULTIPOLE, ylabel="measured / halofit")
    below.set_ylim(0, max(1.6, 1.1 * float(np.max(ratios))))
    plain_log_ticks(below.xaxis)
    for axes in (top, below):
        style_axes(axes)
    top.legend(loc="best", **PLAIN_LEGEND)
    return figure
