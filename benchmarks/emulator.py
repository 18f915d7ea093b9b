"""Judges a correction of the force by TreePM runs that it was not trained on.

    python benchmarks/emulator.py [--correction default] [--output emulator] [--repeat 3]

The truth is the same as in benchmarks/accuracy.py: MP-Gadget's runs from the same particles, 64^3
in 128 Mpc/h, at a = 0.5 and 1. Each row is ten BullFrog steps: plain, with `deconvolve`, corrected,
and on finer force meshes. The cost is the median of runs in turns, divided by the plain run's. The
results are OUTPUT.csv, OUTPUT.md and OUTPUT.png. On one rank.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from accuracy import FOLDER, GRID, near

import flowpm_dist as fpm
from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    new_figure,
    plain_log_ticks,
    save_figure,
    style_axes,
)
from flowpm_dist.observables.lensing import SourcePlane
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.statistics import Comparison, bispectrum, compare, density_histogram
from flowpm_dist.statistics.angular_power import angular_power

AT = (0.2, 0.5, 1.0, 1.5)
TIMES = (0.5, 1.0)
DENSITIES = np.geomspace(0.2, 10.0, 9)
TRIANGLES = [0.2, 0.5, 0.8]
EDGES = [200, 400, 700, 1000, 1400, 2000, 2800]
NAMES = ("Omega_m", "Omega_b", "h", "n_s", "sigma8")


class Universe:
    """A TreePM run at two times, and runs from its particles.

    Args:
        path: file of the reference data.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as data:
            self.cosmology = fpm.Cosmology(**{name: float(data[name]) for name in NAMES})
            self.size = float(data["box_size"])
            self.start = (data["displacement_initial"], data["velocity_initial"])
            finals = data["displacement_final"]
        plain = self.run({})
        self.truth = [
            Measured(replace(state, displacement=Field(tf.constant(final), state.box)))
            for state, final in zip(plain, finals, strict=True)
        ]

    def simulation(self, options: Mapping[str, Any]) -> fpm.Simulation:
        """Returns the simulation of a row."""
        steps = fpm.scale_factor_steps(0.1, 1.0, 10)
        more = {"integrator": "bullfrog", **options}
        return fpm.Simulation(self.cosmology, GRID, self.size, steps, **more)

    def run(self, options: Mapping[str, Any]) -> list[fpm.State]:
        """Returns the states at the times of the truth."""
        return self.simulation(options).run(particles=self.start, outputs=TIMES)

    def seconds(self, options: Mapping[str, Any]) -> float:
        """Returns the duration of the steps of a run [s]."""
        return float(sum(self.simulation(options).run(particles=self.start).timings["steps"]))


class Measured:
    """Densities of a state, and what is measured of them."""

    def __init__(self, state: fpm.State) -> None:
        self.densities = state.density(4), state.density(4, shift=0.5)
        coarse = state.density(1)
        self.histogram = density_histogram(coarse, DENSITIES).counts / coarse.box.cells
        found = bispectrum(coarse, bins=TRIANGLES)
        self.bispectrum = np.asarray(found.bispectrum)

    def against(self, truth: Measured) -> Comparison:
        """Returns P(k) and r(k) of this and of the truth."""
        both = (self.densities[1], truth.densities[1])
        return compare(self.densities[0], truth.densities[0], window="cic", interlaced=both)


def light_cone(correction: str) -> None:
    """Prints C_l of the convergence, divided by C_l of a converged run; means of two seeds."""
    cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.81)
    cone = LightCone(FlatField(field_of_view=5.0, pixels=256, z_max=0.5))
    rows: dict[str, dict[str, Any]] = {
        "converged": {"mesh_factor": 3, "steps": 40},
        "plain": {},
        "deconvolve": {"deconvolve": True},
        "corrected": {"deconvolve": True, "correction": correction},
        "B = 2": {"mesh_factor": 2},
    }
    found = {}
    for name, options in rows.items():
        steps = fpm.scale_factor_steps(0.1, 1.0, options.pop("steps", 10))
        more = {"integrator": "bullfrog", **options}
        simulation = fpm.Simulation(cosmology, GRID, 128.0, steps, **more)
        maps = [cone.convergence(simulation, [SourcePlane(0.5)], seed=seed) for seed in (1, 2)]
        spectra = [angular_power(m.kappa, m.sky.fov, EDGES, window="bilinear") for m in maps]
        found[name] = np.array([np.asarray(spectrum.power).reshape(-1) for spectrum in spectra])
        print(name, np.round((found[name] / found["converged"]).mean(axis=0), 3), flush=True)
    print("at l =", np.round(spectra[0].ell))


def main() -> None:
    """Measure, and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--correction", default="default", help="its file")
    parser.add_argument("--output", type=Path, default=Path("emulator"), help="stem of the files")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are timed")
    parser.add_argument("--light-cone", action="store_true", help="C_l of maps instead")
    parser.add_argument("--meshes", type=float, nargs="+", default=[2], help="finer meshes")
    arguments = parser.parse_args()
    if arguments.light_cone:
        return light_cone(arguments.correction)
    rows = {
        "plain": {},
        "`deconvolve`": {"deconvolve": True},
        "corrected": {"deconvolve": True, "correction": arguments.correction},
    }
    for mesh in arguments.meshes:
        whole = int(mesh) if mesh == int(mesh) else mesh
        rows[f"B = {mesh:g}, `deconvolve`"] = {"mesh_factor": whole, "deconvolve": True}
    universes = [Universe(FOLDER / f"treepm_P{number}.npz") for number in (1, 2)]
    found: list[dict[str, Any]] = []
    for name, options in rows.items():
        for number, universe in enumerate(universes, start=1):
            for a, state, truth in zip(TIMES, universe.run(options), universe.truth, strict=True):
                measured = Measured(state)
                spectra = measured.against(truth)
                row: dict[str, Any] = {"run": name, "universe": f"P{number}", "a": a}
                for k in AT:
                    row[f"P {k}"] = near(spectra, spectra.transfer**2, k)
                    row[f"1 - r {k}"] = 1 - near(spectra, spectra.correlation, k)
                row["histogram"] = float(np.abs(measured.histogram / truth.histogram - 1).max())
                row["bispectrum"] = float(
                    np.nanmedian(np.abs(measured.bispectrum / truth.bispectrum - 1))
                )
                row["curves"] = spectra.k, spectra.transfer**2, 1 - spectra.correlation
                found.append(row)
                print({k: v for k, v in row.items() if k != "curves"}, flush=True)
    seconds = {name: [] for name in rows}
    for _ in range(arguments.repeat):
        for name, options in rows.items():
            seconds[name].append(universes[0].seconds(options))
    cost = {name: float(np.median(each)) for name, each in seconds.items()}
    write(found, {name: each / cost["plain"] for name, each in cost.items()}, arguments.output)


def write(found: list[dict[str, Any]], cost: Mapping[str, float], output: Path) -> None:
    """Writes the tables and the figure."""
    columns = [name for name in found[0] if name != "curves"]
    with output.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*columns, "cost"], extrasaction="ignore")
        table.writeheader()
        table.writerows([{**row, "cost": cost[row["run"]]} for row in found])
    heads = [f"P, k = {k:g}" for k in AT] + [f"1 - r, k = {k:g}" for k in AT]
    lines = [f"| | a | cost | {' | '.join(heads)} | histogram | bispectrum |"]
    lines.append("|---" * (len(heads) + 5) + "|")
    for name, factor in cost.items():
        for a in TIMES:
            here = [row for row in found if row["run"] == name and row["a"] == a]
            mean = {c: np.mean([row[c] for row in here]) for c in columns if c[0] in "P1hb"}
            cells = [f"{100 * (mean[f'P {k}'] - 1):+.1f}" for k in AT]
            cells += [f"{mean[f'1 - r {k}']:.1e}" for k in AT]
            cells += [f"{100 * mean[name_]:.0f} %" for name_ in ("histogram", "bispectrum")]
            lines.append(f"| {name} | {a:g} | {factor:.2f} | {' | '.join(cells)} |")
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    figure = new_figure(9.6, 6.4)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, a in zip(panels.T, TIMES, strict=True):
        for name, colour in zip(cost, (MUTED, *COLOURS), strict=False):
            here = [row["curves"] for row in found if row["run"] == name and row["a"] == a]
            k = here[0][0]
            column[0].plot(k, np.mean([c[1] for c in here], axis=0), color=colour, label=name)
            column[1].plot(k, np.mean([c[2] for c in here], axis=0), color=colour)
        column[0].set_title(f"a = {a:g}")
        column[0].axhspan(0.99, 1.01, color=MUTED, alpha=0.15, linewidth=0)
        column[0].set_ylim(0.6, 1.1)
        column[0].set_xlim(0.05, 1.6)
        column[1].set_yscale("log")
        column[1].set_ylim(1e-6, 0.1)
        column[1].set_xlabel("k [h/Mpc]")
        for panel in column:
            style_axes(panel)
            panel.set_xscale("log")
            plain_log_ticks(panel.xaxis)
    panels[0, 0].set_ylabel("P over TreePM's")
    panels[1, 0].set_ylabel("1 - r with TreePM")
    panels[0, 0].legend(frameon=False, fontsize=9)
    save_figure(figure, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
