"""Figures of weak lensing: a map of convergence with its shear, and angular power spectra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from flowpm_dist.io.figure_style import (
    COLOURS,
    MUTED,
    PLAIN_LEGEND,
    SMALL_TITLE,
    new_figure,
    plain_log_ticks,
    style_axes,
)

STICKS = 24
"""Sticks of shear along a side of the map."""


def convergence_figure(
    kappa: np.ndarray, gamma1: np.ndarray, gamma2: np.ndarray, field_of_view: float, name: str
) -> Figure:
    """Returns a figure of a map of convergence, with sticks along the shear.

    Args:
        kappa: [y, x] [1].
        gamma1, gamma2: shear [y, x] [1], with 1 along x.
        field_of_view: side of the map [deg].
        name: of the sources.
    """
    figure = new_figure(7.9, 6.4)
    axes = figure.add_subplot()
    low, high = np.percentile(kappa, [1, 99.7])
    image = axes.imshow(
        kappa,
        origin="lower",
        extent=(0, field_of_view, 0, field_of_view),
        vmin=low,
        vmax=max(high, low + 1e-12),
        cmap="inferno",
    )
    block = -(-len(kappa) // STICKS)
    first, second = (_means(gamma, block) for gamma in (gamma1, gamma2))
    size, angle = np.hypot(first, second), 0.5 * np.arctan2(second, first)
    spacing = block * field_of_view / len(kappa)
    centres = (np.arange(len(size)) + 0.5) * spacing
    longest = float(np.percentile(size, 99)) or 1.0
    scale = 0.95 * spacing / longest * np.minimum(1.0, longest / np.maximum(size, 1e-30))
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
    axes.set(xlabel=r"$x$  [deg]", ylabel=r"$y$  [deg]")
    axes.set(xlim=(0, field_of_view), ylim=(0, field_of_view))
    told = f"sources: {name}; the longest sticks are a shear of {longest:.2g}"
    axes.set_title(told, **SMALL_TITLE)
    bar = figure.colorbar(image, ax=axes, extend="both", fraction=0.046, pad=0.02)
    bar.set_label(r"convergence $\kappa$")
    return figure


def _means(values: np.ndarray, block: int) -> np.ndarray:
    """Returns the means over whole squares of pixels."""
    count = len(values) // block
    whole = values[: count * block, : count * block]
    return whole.reshape(count, block, count, block).mean(axis=(1, 3))


@dataclass(frozen=True)
class AutoSpectrum:
    """The angular power of the convergence of one population of sources, [1].

    Attributes:
        name: of the sources.
        power: measured [bin].
        expected: of halofit at the same l [bin].
        linear, halofit: theory at the l of a fine grid [ell].
    """

    name: str
    power: np.ndarray
    expected: np.ndarray
    linear: np.ndarray
    halofit: np.ndarray


def convergence_power_figure(
    ell: np.ndarray, modes: np.ndarray, fine: np.ndarray, spectra: Sequence[AutoSpectrum]
) -> Figure:
    """Returns a figure of angular power spectra and theory, with their ratio below.

    Args:
        ell: mean |l| of the bins [bin].
        modes: number of modes in each bin [bin]; l and -l count as two.
        fine: l of the theory [ell].
        spectra: one for each population.
    """
    figure = new_figure(6.8, 6.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    error = np.sqrt(2 / np.maximum(modes, 1))
    per_log, per_log_fine = (x * (x + 1) / (2 * np.pi) for x in (ell, fine))
    below.axhline(1, color=MUTED, lw=1.2, zorder=1)
    ratios = []
    for n, spectrum in enumerate(spectra):
        colour = COLOURS[n % len(COLOURS)]
        style = {"fmt": "o", "ms": 3, "lw": 0.9, "color": colour}
        top.plot(fine, per_log_fine * spectrum.halofit, color=colour, lw=1.4)
        top.plot(fine, per_log_fine * spectrum.linear, color=colour, lw=1.0, ls="--")
        beside = ell * 1.012 ** (n - (len(spectra) - 1) / 2)  # so that no point hides another
        measured = per_log * spectrum.power
        top.errorbar(beside, measured, measured * error, **style, label=spectrum.name)
        ratio = spectrum.power / spectrum.expected
        below.errorbar(beside, ratio, ratio * error, **style)
        ratios.append(ratio)
    top.plot([], [], color=MUTED, lw=1.4, label="Limber, halofit")
    top.plot([], [], color=MUTED, lw=1.0, ls="--", label="Limber, linear")
    top.set(xscale="log", yscale="log", ylabel=r"$l\,(l+1)\,C_l\,/\,2\pi$")
    top.set_title("power of the convergence; bars: scatter of a Gaussian field", **SMALL_TITLE)
    below.set(xlabel=r"multipole $l$", ylabel="measured / halofit")
    below.set_ylim(0, min(2.5, max(1.6, 1.1 * float(np.max(ratios)))))
    plain_log_ticks(below.xaxis)
    for axes in (top, below):
        style_axes(axes)
    top.legend(loc="best", **PLAIN_LEGEND)
    return figure
