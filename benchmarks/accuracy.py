"""Compares each integrator with TreePM runs from the same particles: P(k) and r(k).

    python benchmarks/accuracy.py [--output accuracy] [--quick]
    taskset -c 0 python benchmarks/accuracy.py --force-mesh

The truth is MP-Gadget's (`treepm_P1.npz` and `treepm_P2.npz` in the folder FLOWPM_REFERENCE, see
tests/data/README.md): 64^3 particles in 128 Mpc/h, two cosmologies and seeds, from third-order LPT
at a = 0.1. FastPM, BullFrog and COLA run from the same particles with 5 to 40 steps of equal length
in a. The force mesh is as fine as the particle lattice (B = 1) or twice as fine (B = 2). Further
rows show what mesh, start, steps, gradient and deconvolution of the force change. All figures are
means of the two universes. The results are OUTPUT.csv, OUTPUT.md and OUTPUT.png. On one rank.

`--force-mesh` prints another table: the errors and the processor time of ten BullFrog steps of the
first universe, on force meshes from as fine as the particles to twice as fine, on one thread.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from common import treepm_runs

import flowpm_dist as fpm
from flowpm_dist.grid.field import Field
from flowpm_dist.statistics import Comparison, compare

AT = (0.1, 0.2, 0.5, 1.0)  # [h/Mpc]
GRID = 64


@dataclass(frozen=True)
class Scheme:
    """A run: the integrator, its steps equal in a, the force mesh and the start."""

    integrator: str
    steps: int
    mesh_factor: float
    start: float = 0.1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The name of its row."""
        notes = [f"from a = {self.start:g}"] if self.start != 0.1 else []
        notes += [name if value is True else value for name, value in self.options]
        return ", ".join(
            [{"fastpm": "FastPM", "bullfrog": "BullFrog"}.get(self.integrator, "COLA")] + notes
        )


DIVIDED = ("deconvolve", True)
SPECTRAL = (("force_gradient", "spectral"),)
TABLE = [
    Scheme(name, steps, mesh)
    for name in ("fastpm", "bullfrog", "cola")
    for mesh in (1, 2)
    for steps in (5, *([6] if name == "bullfrog" else []), 10, 20, 40)
]
FORCE_MESHES = [
    Scheme("bullfrog", 10, mesh, options=options)
    for options in ((), (DIVIDED,))
    for mesh in (1, 1.25, 1.5, 1.75, 2)
]
LIMITS = [
    *(Scheme("bullfrog", 40, mesh) for mesh in (3, 4)),
    *(Scheme(name, 80, 4) for name in ("bullfrog", "fastpm")),
    *(Scheme("bullfrog", 80, 4, start) for start in (0.02, 0.05)),
    *(Scheme("bullfrog", 6, 1, start) for start in (0.0, 0.02)),
    *(Scheme("bullfrog", 6, mesh, options=SPECTRAL) for mesh in (1, 2)),
    *(Scheme("bullfrog", 10, 1, options=options) for options in (SPECTRAL, (*SPECTRAL, DIVIDED))),
    *(Scheme("bullfrog", 10, 3, options=options) for options in ((), (DIVIDED,))),
    *(Scheme("bullfrog", 10, mesh, options=(DIVIDED,)) for mesh in (1, 2)),
]


class Universe:
    """A TreePM run, and runs from its particles.

    Args:
        path: file of the reference data.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as data:
            names = ("Omega_m", "Omega_b", "h", "n_s", "sigma8")
            self.cosmology = fpm.Cosmology(**{name: float(data[name]) for name in names})
            self.size, self.seed = float(data["box_size"]), int(data["white_noise_seed"])
            initial, final = data["displacement_initial"], data["displacement_final"][-1]
        begin = self.simulation(Scheme("bullfrog", 1, 1)).lpt(seed=self.seed, a=0.1)
        # The file has float32 numbers.
        np.testing.assert_allclose(begin.displacement.block, initial, atol=1e-5)
        self.start = begin.displacement, begin.velocity
        self.truth = self.densities(
            replace(begin, displacement=Field(tf.constant(final, begin.box.dtype), begin.box))
        )

    def simulation(self, scheme: Scheme) -> fpm.Simulation:
        """Returns the simulation of a scheme."""
        return fpm.Simulation(
            self.cosmology,
            GRID,
            self.size,
            fpm.scale_factor_steps(scheme.start, 1.0, scheme.steps),
            integrator=scheme.integrator,
            mesh_factor=scheme.mesh_factor,
            lpt_order=3,
            **{"deconvolve": False, **dict(scheme.options)},
        )

    def compared(self, scheme: Scheme) -> Comparison:
        """Returns P(k) and r(k) of a run and of the TreePM run at a = 1."""
        plain, shifted = self.densities(self.simulation(scheme).run(seed=self.seed))
        return compare(plain, self.truth[0], window="cic", interlaced=(shifted, self.truth[1]))

    def nanoseconds(self, scheme: Scheme) -> float:
        """Returns the processor time of the steps after the first, per particle and step [ns]."""
        ends: list[float] = []
        self.simulation(scheme).run(
            particles=self.start, progress=lambda *_: ends.append(time.process_time())
        )
        return (ends[-1] - ends[0]) * 1e9 / ((scheme.steps - 1) * GRID**3)

    @staticmethod
    def densities(state: fpm.State) -> tuple[Field, Field]:
        """Returns the density on a mesh of 256^3, and shifted by half a cell."""
        return state.density(4), state.density(4, shift=0.5)


def near(found: Comparison, values: np.ndarray, at: float) -> float:
    """Returns the mean over the bins within 5 % of a wavenumber, or the nearest bin."""
    inside = np.abs(found.k / at - 1) < 0.05
    inside[np.argmin(np.abs(found.k - at))] = True
    return float(values[inside].mean())


def row(scheme: Scheme, universes: list[Universe]) -> tuple[list[Any], list[Comparison]]:
    """Returns a row of the table, and the comparisons behind it."""
    found = [universe.compared(scheme) for universe in universes]
    errors = [
        100 * np.array([near(each, each.power_a / each.power_b - 1, k) for k in AT])
        for each in found
    ]
    lost = np.mean([[near(each, 1 - each.correlation, k) for k in AT] for each in found], axis=0)
    spread = float(np.ptp(errors, axis=0)[-1]) / 2
    words = [scheme.label, scheme.steps, scheme.mesh_factor]
    return [*words, *np.mean(errors, axis=0), *lost, spread], found


def print_force_meshes(universe: Universe) -> None:
    """Prints errors and processor time of the force meshes; the median of three runs in turns."""
    errors = {scheme: universe.compared(scheme) for scheme in FORCE_MESHES}
    times = [[universe.nanoseconds(scheme) for scheme in FORCE_MESHES] for _ in range(3)]
    at = AT[2:]
    header = ["B", "deconvolve", *(f"P error at {k} [%]" for k in at)]
    header += [*(f"1 - r at {k}" for k in at), "ns per particle and step"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for (scheme, found), ns in zip(errors.items(), np.median(times, axis=0), strict=True):
        power = [100 * near(found, found.power_a / found.power_b - 1, k) for k in at]
        lost = [near(found, 1 - found.correlation, k) for k in at]
        words = [f"{scheme.mesh_factor:g}", "yes" if scheme.options else "no"]
        words += [*(f"{x:+.1f}" for x in power), *(f"{x:.1e}" for x in lost), f"{ns:.0f}"]
        print("| " + " | ".join(words) + " |")


def draw(results: dict[Scheme, list[Comparison]], path: Path) -> None:
    """Draws P(k) over TreePM's, and 1 - r(k); means of the universes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    names = list(dict.fromkeys(scheme.integrator for scheme in results))
    axes = figure.subplots(len(names), 2, sharex=True, squeeze=False)
    colours = {5: "#d1495b", 6: "#b07aa1", 10: "#edae49", 20: "#00798c", 40: "#1f3a5f"}
    for line, name in zip(axes, names, strict=True):
        for scheme, found in results.items():
            if scheme.integrator != name:
                continue
            k = found[0].k
            style = {"color": colours[scheme.steps], "ls": "-" if scheme.mesh_factor == 2 else "--"}
            label = f"{scheme.steps} steps, B = {scheme.mesh_factor}"
            ratio = np.mean([each.power_a / each.power_b for each in found], axis=0)
            line[0].plot(k, ratio, label=label, lw=1.2, **style)
            lost = np.mean([1 - each.correlation for each in found], axis=0)
            line[1].plot(k, np.maximum(lost, 1e-8), lw=1.2, **style)
        line[0].axhspan(0.99, 1.01, color="0.9", zorder=0)
        line[0].set(ylim=(0.6, 1.08), ylabel="P / P of TreePM", title=scheme_title(name))
        line[1].set(yscale="log", ylim=(1e-6, 0.3), ylabel="1 - r", title=scheme_title(name))
        line[0].legend(fontsize=6.5, ncols=2, loc="lower left")
    for axis in axes[-1]:
        axis.set(xscale="log", xlim=(0.08, 1.6), xlabel="k [h/Mpc]")
    figure.savefig(path, dpi=130)


def scheme_title(integrator: str) -> str:
    """Returns the label of an integrator in tables and figures."""
    return Scheme(integrator, 1, 1).label


def main() -> None:
    """Runs everything, prints the table, and writes table and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("accuracy"), help="stem of the files")
    parser.add_argument("--quick", action="store_true", help="B = 1 and up to ten steps only")
    parser.add_argument("--force-mesh", action="store_true", help="errors and time of force meshes")
    options = parser.parse_args()
    paths = treepm_runs()
    if options.force_mesh:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        print_force_meshes(Universe(paths[0]))
        return
    universes = [Universe(path) for path in paths]
    schemes = TABLE + LIMITS
    if options.quick:
        schemes = [s for s in TABLE if s.mesh_factor == 1 and s.steps <= 10]
    header = ["integrator", "steps", "B"]
    header += [f"P error at {k} [%]" for k in AT] + [f"1 - r at {k}" for k in AT]
    header += [f"half difference of the two P errors at {AT[-1]} [%]"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    rows, lines, drawn = [], [], {}
    for scheme in schemes:
        numbers, found = row(scheme, universes)
        rows.append(numbers)
        if scheme in TABLE:
            drawn[scheme] = found
        texts = [f"{x:+.2f}" for x in numbers[3:7]] + [f"{x:.1e}" for x in numbers[7:11]]
        lines.append(
            "| " + " | ".join([*map(str, numbers[:3]), *texts, f"{numbers[11]:.1f}"]) + " |"
        )
        print(lines[-1], flush=True)
    with options.output.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    draw(drawn, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
