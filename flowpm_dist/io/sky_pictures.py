"""Figures of maps of the whole sky, in Mollweide's projection."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io.figure_style import SMALL_TITLE, new_figure

WIDTH = 1600
"""Pixels of a picture across."""


def sky_figure(values: np.ndarray, label: str, title: str) -> Figure:
    """Returns a figure of a map, the north pole above, the longitude 0 in the middle.

    Longitudes grow to the left, as those of the sky are drawn.

    Args:
        values: [pixel], in HEALPix's order of rings.
        label: what they are, with the unit.
        title: of the figure.
    """
    figure = new_figure(9.0, 5.2)
    axes = figure.add_subplot()
    low, high = np.percentile(values, [1, 99.7])
    image = axes.imshow(
        mollweide(values, WIDTH),
        origin="lower",
        extent=(-2, 2, -1, 1),
        vmin=low,
        vmax=max(high, low + 1e-12),
        cmap="inferno",
        interpolation="antialiased",
    )
    border = Ellipse((0, 0), 4, 2, fill=False, lw=1.0, color="black")
    axes.add_patch(border)
    image.set_clip_path(border)
    axes.set(xlim=(-2.02, 2.02), ylim=(-1.02, 1.02))
    axes.set_axis_off()
    axes.set_title(title, **SMALL_TITLE)
    bar = figure.colorbar(
        image, ax=axes, extend="both", orientation="horizontal", fraction=0.05, pad=0.03, aspect=40
    )
    bar.set_label(label)
    return figure


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
    found = np.full(inside.shape, np.nan)
    found[inside] = sphere.interpolated(values, theta, longitude[inside])
    return found
