"""Figures of halos and galaxies."""

from __future__ import annotations

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from flowpm_dist.catalogues.abundance import FITS, MassFunction, predicted
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.clustering import TracerPower
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.io.figures import (
    COLOURS,
    MEASURED,
    THEORY,
    density_figure,
    draw_measured,
    new_figure,
    plain_log_ticks,
    style_axes,
)
from flowpm_dist.io.labels import WAVENUMBER

OVERDENSITY = 200
"""Mean density of the spheres that are drawn [mean density of matter]."""


def halos_figure(slab: np.ndarray, thickness: float, halos: Catalogue) -> Figure:
    """Returns a figure of halos over the density of a slab.

    Args:
        slab: density [x, y], in units of the mean.
        thickness: thickness of the slab [Mpc/h].
        halos: those in the slab, with `is_whole`. Each is a circle, as large as a sphere of 200
            times the mean density with its mass.
    """
    figure = density_figure(slab, halos.box_size, thickness, halos.a)
    axes = figure.axes[0]
    density = OVERDENSITY * halos.header.matter_density
    radius = np.cbrt(3 * halos["mass"] / (4 * np.pi * density))
    circles = [Circle((x, y), r) for (x, y, _), r in zip(halos["position"], radius, strict=True)]
    axes.add_collection(
        PatchCollection(circles, facecolor="none", edgecolor="white", linewidth=0.7)
    )
    axes.set_title(f"{halos.total:,} halos in {axes.get_title()}", fontsize=9)
    return figure


def abundance_figure(abundance: MassFunction, theory: Theory, halos: Catalogue) -> Figure:
    """Returns a figure of the abundance of halos by mass, with fits to other simulations.

    Args:
        abundance: measured.
        theory: theory of the universe.
        halos: the catalogue that was counted.
    """
    figure = new_figure(6.4, 4.6)
    axes = figure.add_subplot()
    held = abundance.count > 0
    lowest = abundance.abundance[held].min(initial=np.inf) / 5
    mass = np.geomspace(abundance.edges[0], abundance.edges[-1], 100)
    for colour, (name, fit) in zip((THEORY, COLOURS[2]), FITS.items(), strict=True):
        values = predicted(theory, mass, halos.a, fit)
        shown = (values > lowest) | (np.isinf(lowest))
        axes.plot(mass[shown], values[shown], color=colour, lw=1.4, label=name)
    draw_measured(
        axes,
        abundance.mass[held],
        abundance.abundance[held],
        abundance.error[held],
        label="halos, with Poisson errors",
    )
    axes.set(xscale="log", yscale="log", xlabel=r"$M$  [$M_\odot/h$]")
    axes.set_ylabel(r"$dn/d\ln M$  [$(h/\mathrm{Mpc})^3$]")
    axes.set_title(f"{halos.total:,} halos at $z = {1 / halos.a - 1:.3g}$", fontsize=9)
    style_axes(axes)
    axes.legend(fontsize=8)
    return figure


def tracer_figure(power: TracerPower, a: float, of: str = "halos") -> Figure:
    """Returns a figure of the power of objects and of matter, with the bias below.

    Args:
        power: measured.
        a: scale factor.
        of: what the objects are.
    """
    figure = new_figure(6.4, 6.0)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    curves = ((of, power.power, MEASURED), (f"{of} and matter", power.cross, COLOURS[2]))
    for label, values, colour in (*curves, ("matter", power.matter, THEORY)):
        shown = values > 0
        top.plot(power.k[shown], values[shown], "o-", ms=3, lw=1, color=colour, label=label)
    top.axhline(power.shot_noise, color="0.5", ls=":", lw=1, label=f"shot noise of {of}")
    top.set(xscale="log", yscale="log", ylabel=r"$P$  [$(\mathrm{Mpc}/h)^3$]")
    top.set_title(f"{of} at $z = {1 / a - 1:.3g}$, without their shot noise", fontsize=9)
    top.legend(fontsize=8)
    draw_measured(below, power.k, power.bias, power.error)
    below.set(xlabel=WAVENUMBER, ylabel="bias")
    for axes in (top, below):
        style_axes(axes)
    plain_log_ticks(below.xaxis)
    return figure
