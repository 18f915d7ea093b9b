"""Draws how a particle lattice responds to its own force, by the formulas of the package.

    python benchmarks/lattice_response.py [--output lattice_response.png]

A wave displaces the particles by a little. In a fluid its acceleration, over 1.5 Omega_m, is its
displacement: a response of 1. The figure has the response of a lattice under each force, averaged
over directions and over places of the lattice on the mesh, and that of exact forces between the
particles. The table has the response at two wavenumbers, and how fast the fastest wave grows while
the particles rest on points of the mesh. A minute on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    PLAIN_LEGEND,
    new_figure,
    save_figure,
    style_axes,
)
from flowpm_dist.particle_mesh.lattice import lattice_gravity, mean_response, rest_growth
from flowpm_dist.particle_mesh.options import ForceOptions

FRACTIONS = np.linspace(0.04, 0.96, 24)
"""Wavenumbers, over the particles' Nyquist wavenumber."""
SHOWN = (0.32, 0.64)
MESHES = (1, 1.5, 2, 3, 4)
DIRECTIONS = 60


def longitudinal(response: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns the response to waves along k, averaged over directions, at each of `FRACTIONS`."""
    unit = np.random.default_rng(1).normal(size=(DIRECTIONS, 3))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    found = response(np.pi * FRACTIONS[:, None, None] * unit)
    return np.asarray(np.einsum("ni,knij,nj->kn", unit, found, unit).mean(axis=1))


def main() -> None:
    """Computes all curves, prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("lattice_response.png"))
    arguments = parser.parse_args()
    figure = new_figure(10.5, 4.4)
    exact = longitudinal(lattice_gravity)
    print("| gradient | B | `deconvolve` | 0.32 | 0.64 | growth at rest |\n" + "|---" * 6 + "|")
    text = " | ".join(f"{np.interp(k, FRACTIONS, exact):.3f}" for k in SHOWN)
    print(f"| exact forces between the particles | | | {text} | 1 |")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, gradient in zip(panels, ("finite-difference", "spectral"), strict=True):
        axes.axhline(1, color=MUTED, lw=0.8)
        axes.plot(FRACTIONS, exact, color="black", lw=1.6, label="exact forces")
        for colour, mesh in zip(COLOURS, MESHES, strict=False):
            for divided in (False, True):
                force = ForceOptions(force_gradient=gradient, mesh_factor=mesh, deconvolve=divided)
                curve = longitudinal(lambda k, force=force: mean_response(k, force))
                label = "" if divided else f"B = {mesh:g}"
                axes.plot(FRACTIONS, curve, "--" if divided else "-", color=colour, label=label)
                text = " | ".join(f"{np.interp(k, FRACTIONS, curve):.3f}" for k in SHOWN)
                growth = rest_growth(force) if mesh == int(mesh) else None
                yes = "yes" if divided else "no"
                row = f"| {gradient} | {mesh:g} | {yes} | {text} | "
                print(row + ("|" if growth is None else f"$a^{{{growth:.2f}}}$ |"), flush=True)
        axes.set(xlim=(0, 1), ylim=(0, 2), title=f"{gradient}; dashed: deconvolve")
        axes.set_xlabel("k / Nyquist wavenumber of the particles")
        style_axes(axes)
    panels[0].set_ylabel("response of the lattice / a fluid's")
    panels[0].legend(**PLAIN_LEGEND)
    save_figure(figure, arguments.output)


if __name__ == "__main__":
    main()
