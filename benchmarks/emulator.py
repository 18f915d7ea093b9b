"""Judges corrections by TreePM runs: what they repair, and what they must not change.

    python benchmarks/emulator.py --universes FILES [--correction network ...]
        [--rows "B = 2" "B = 3"] [--steps N] [--output emulator] [--repeat 3]

FILES are of benchmarks/treepm.py; by default P1 and P2 of tests/data/README.md. Each row is
BullFrog's steps from the same particles, ten of them or 20 with particles 1 Mpc/h apart: as a run
is without options, with a correction, or with options of its own. OUTPUT.csv has a line for each
run, universe and time, OUTPUT.md the means of universes of one grid and spacing, in brackets the
value that is furthest from the truth, and OUTPUT.png P and 1 - r. The cost is the time of a run of
the last file over that of the plain one. On one rank.

Wavenumbers are in units of the particles' Nyquist wavenumber. "P" is the power over TreePM's,
"1 - r" 1 minus the correlation with its density. "P0s" and "P2s" are monopole and quadrupole in
redshift space, the change of the latter over TreePM's monopole; means of three lines of sight.
"v rms" is the error of the particles' velocities [km/s], "Pv" and "1 - rv" power and correlation
of velocities on the particles' lattice.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from accuracy import near
from common import treepm_runs

import flowpm_dist as fpm
from flowpm_dist.evolution.corrections import SHIPPED, load_correction
from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    new_figure,
    plain_log_ticks,
    save_figure,
    style_axes,
)
from flowpm_dist.statistics import (
    Comparison,
    bispectrum,
    compare,
    density_histogram,
    multipoles,
)

AT = (0.13, 0.32, 0.64, 0.95)
"""Wavenumbers of the tables [Nyquist wavenumber of the particles]."""
WIDTH = 1.1
"""Ratio of the edges of a bin to its wavenumber."""
DENSITIES = np.geomspace(0.2, 10.0, 9)
TRIANGLES = np.array([0.4, 1.0, 1.6])
"""Edges of the bins of the bispectrum [1 / particle spacing]."""
RATIOS = ("P ", "P0s ", "P2s ", "Pv ")
"""Beginnings of the columns that are 1 where a run is the truth."""
PERCENTAGES = ("histogram", "bispectrum")
SHOWN = (0.5, 1.0)
"""Scale factors in the figure."""
H0 = 100.0
"""[km/s / (Mpc/h)]"""
ROWS: dict[str, dict[str, Any]] = {
    "deconvolve off": {"deconvolve": False},
    "B = 1.5": {"mesh_factor": 1.5},
    "B = 2": {"mesh_factor": 2},
    "B = 2, deconvolve": {"mesh_factor": 2, "deconvolve": True},
    "B = 3": {"mesh_factor": 3},
}
"""Runs without a correction that can be asked for."""
CLOSE = 1.5
"""Distance of particles below which ten steps are too few [Mpc/h]."""
NAMES = ("Omega_m", "Omega_b", "h", "n_s", "sigma8")


class Universe:
    """A TreePM run at several times, and runs from its particles.

    Args:
        path: file of the reference data.
        steps: the number of steps of runs from its particles; by default ten, and twice as many
            with particles closer than `CLOSE`.
    """

    def __init__(self, path: Path, steps: int | None = None) -> None:
        self.name = path.stem.removeprefix("treepm_")
        with np.load(path, allow_pickle=False) as data:
            self.cosmology = fpm.Cosmology(**{name: float(data[name]) for name in NAMES})
            self.size = float(data["box_size"])
            self.start = (data["displacement_initial"], data["velocity_initial"])
            finals = list(zip(data["displacement_final"], data["velocity_final"], strict=True))
            self.times = data["a_final"].tolist()
            self._seed = int(data["white_noise_seed"])
        self._grid = len(finals[0][0])
        self.spacing = self.size / self._grid
        self.steps = steps or (10 if self.spacing > CLOSE else 20)
        self._edges = fpm.scale_factor_steps(0.1, 1.0, self.steps)
        self.states = [
            replace(
                state,
                displacement=Field(tf.constant(displacement), state.box),
                velocity=Field(tf.constant(velocity), state.box),
            )
            for state, (displacement, velocity) in zip(self.run({}), finals, strict=True)
        ]

    def simulation(self, options: Mapping[str, Any]) -> fpm.Simulation:
        """Returns the simulation of a row."""
        more = {"integrator": "bullfrog", "lpt_order": 3, **options}
        return fpm.Simulation(self.cosmology, self._grid, self.size, self._edges, **more)

    def run(self, options: Mapping[str, Any]) -> list[fpm.State]:
        """Returns the states at the times of the truth."""
        return self.simulation(options).run(particles=self.start, outputs=self.times)

    def first(self) -> fpm.State:
        """Returns a state with the white noise and the linear overdensity from which it began."""
        return self.simulation({}).lpt(seed=self._seed)

    def seconds(self, options: Mapping[str, Any]) -> float:
        """Returns the duration of a run from the first particles, corrected [s]."""
        simulation, begin = self.simulation(options), time.perf_counter()
        simulation.run(particles=self.start).velocity.block.numpy()
        return time.perf_counter() - begin


class Measured:
    """Densities of a state, and what is measured of them."""

    def __init__(self, state: fpm.State) -> None:
        self._a = state.a
        self.densities = state.density(4), state.density(4, shift=0.5)
        coarse = state.density(1)
        self.histogram = density_histogram(coarse, DENSITIES).counts / coarse.box.cells
        spacing = coarse.box.cell[0]
        found = bispectrum(coarse, bins=(TRIANGLES / spacing).tolist())
        self.bispectrum = np.asarray(found.bispectrum)
        self._seen = [
            multipoles(state.density(2, redshift_space=axis), axis=axis, orders=(0, 2))
            for axis in ("x", "y", "z")
        ]
        self._velocity = np.fft.fftn(state.velocity.numpy(), axes=(0, 1, 2))
        sides = [2 * np.pi * np.fft.fftfreq(n) for n in self._velocity.shape[:3]]
        self._k = np.sqrt(sum(k**2 for k in np.meshgrid(*sides, indexing="ij")))

    def against(self, truth: Measured) -> Comparison:
        """Returns P(k) and r(k) of this and of the truth."""
        both = (self.densities[1], truth.densities[1])
        return compare(self.densities[0], truth.densities[0], window="cic", interlaced=both)

    def redshift_space_against(self, truth: Measured, k: float) -> tuple[float, float]:
        """Returns P0 in redshift space over the truth's, and the change of P2 over its P0.

        Args:
            k: the middle of the bin [h/Mpc].
        """
        own, true = (np.mean([m.power for m in seen], axis=0) for seen in (self._seen, truth._seen))
        here = (self._seen[0].k > k / WIDTH) & (self._seen[0].k < k * WIDTH)
        (p0, p2), (true0, true2) = own[:, here].mean(axis=1), true[:, here].mean(axis=1)
        return p0 / true0, (p2 - true2) / true0

    def velocity_error(self, truth: Measured) -> float:
        """Returns the rms of the particles' peculiar velocities less the truth's [km/s]."""
        parseval = np.sum(np.abs(self._velocity - truth._velocity) ** 2) / self._k.size**2
        return H0 / self._a * float(np.sqrt(parseval))

    def velocities_against(self, truth: Measured, k: float) -> tuple[float, float]:
        """Returns the power of the velocities over the truth's, and their correlation.

        Args:
            k: the middle of the bin [1 / particle spacing].
        """
        here = (self._k > k / WIDTH) & (self._k < k * WIDTH)
        own, true = self._velocity[here], truth._velocity[here]
        powers = [float(np.sum(np.abs(v) ** 2)) for v in (own, true)]
        both = float(np.sum(own * true.conj()).real)
        return powers[0] / powers[1], both / np.sqrt(powers[0] * powers[1])


def judged(name: str, universe: Universe, state: fpm.State, truth: Measured) -> dict[str, Any]:
    """Returns a line of the table."""
    measured, nyquist = Measured(state), np.pi / universe.spacing
    spectra = measured.against(truth)
    line: dict[str, Any] = {"run": name, "universe": universe.name}
    line |= {"grid": state.box.grid[0], "spacing": universe.spacing, "a": state.a}
    for at in AT:
        k = at * nyquist
        line[f"P {at:g}"] = near(spectra, spectra.transfer**2, k)
        line[f"1 - r {at:g}"] = 1 - near(spectra, spectra.correlation, k)
        p0, p2 = measured.redshift_space_against(truth, k)
        line |= {f"P0s {at:g}": p0, f"P2s {at:g}": 1 + p2}
        power, correlation = measured.velocities_against(truth, np.pi * at)
        line |= {f"Pv {at:g}": power, f"1 - rv {at:g}": 1 - correlation}
    line["v rms"] = measured.velocity_error(truth)
    line["histogram"] = float(np.abs(measured.histogram / truth.histogram - 1).max())
    line["bispectrum"] = float(np.nanmedian(np.abs(measured.bispectrum / truth.bispectrum - 1)))
    line["curves"] = spectra.k / nyquist, spectra.transfer**2, 1 - spectra.correlation
    return line


def options_of(correction: str) -> dict[str, Any]:
    """Returns the options of runs with a correction."""
    trained = load_correction(correction).trained
    force = {} if trained is None else trained.force
    return {"correction": correction, **force}


def main() -> None:
    """Measure, and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--universes", type=Path, nargs="+", help="files of TreePM runs")
    corrections = list(SHIPPED)
    parser.add_argument("--correction", nargs="*", default=corrections, help="names or files")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=["B = 2"], help="other runs")
    parser.add_argument("--steps", type=int, help="of each run, instead of 10 or 20")
    parser.add_argument("--output", type=Path, default=Path("emulator"), help="stem of the files")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are timed")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {"plain": {}}
    rows |= {each: options_of(each) for each in arguments.correction}
    rows |= {name: ROWS[name] for name in arguments.rows}
    paths = arguments.universes or treepm_runs()
    lines: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for path in paths:
        universe = Universe(path, arguments.steps)
        truths = [Measured(state) for state in universe.states]
        for name, options in rows.items():
            for state, truth in zip(universe.run(options), truths, strict=True):
                lines.append(judged(name, universe, state, truth))
        print(universe.name, "is judged", flush=True)
    for _ in range(arguments.repeat + 1):
        for name, options in rows.items():
            seconds[name].append(universe.seconds(options))
    cost = {name: float(np.median(each[1:])) for name, each in seconds.items()}
    write(lines, {name: each / cost["plain"] for name, each in cost.items()}, arguments.output)


def cell(column: str, values: list[float]) -> str:
    """Returns the mean of universes as a table has it; of several, with the worst in brackets."""
    if column.startswith(RATIOS):
        errors, form = [100 * (value - 1) for value in values], "{:+.1f}"
    elif column in PERCENTAGES:
        errors, form = [100 * value for value in values], "{:.0f} %"
    elif column == "v rms":
        errors, form = values, "{:.0f}"
    else:
        errors, form = values, "{:.1e}"
    text = form.format(np.mean(errors))
    return text if len(errors) < 2 else f"{text} ({form.format(max(errors, key=abs))})"


def write(lines: list[dict[str, Any]], cost: Mapping[str, float], output: Path) -> None:
    """Writes the tables and the figure."""
    about = ("run", "universe", "grid", "spacing", "a")
    columns = [name for name in lines[0] if name not in (*about, "curves")]
    columns.sort(key=lambda name: name.rstrip("0123456789."))
    with output.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*about, *columns, "cost"], extrasaction="ignore")
        table.writeheader()
        table.writerows([{**line, "cost": cost[line["run"]]} for line in lines])
    text = [f"| particles | cells | a | run | cost | {' | '.join(columns)} |"]
    text.append("|---" * (len(columns) + 5) + "|")
    groups = sorted({(line["grid"], line["spacing"], line["a"]) for line in lines})

    def lines_of(name: str, group: tuple[int, float, float]) -> list[dict[str, Any]]:
        keys = ("run", "grid", "spacing", "a")
        return [line for line in lines if tuple(line[key] for key in keys) == (name, *group)]

    for grid, spacing, a in groups:
        for name, factor in cost.items():
            here = lines_of(name, (grid, spacing, a))
            cells = [cell(column, [line[column] for line in here]) for column in columns]
            text.append(
                f"| {grid}^3 | {spacing:g} | {a:g} | {name} | {factor:.2f} | {' | '.join(cells)} |"
            )
    output.with_suffix(".md").write_text("\n".join(text) + "\n")
    print("\n".join(text))
    groups = [group for group in groups if group[-1] in SHOWN] or groups
    figure = new_figure(3.2 * len(groups), 6.4)
    panels = figure.subplots(2, len(groups), sharex=True, sharey="row", squeeze=False)
    for column, (grid, spacing, a) in zip(panels.T, groups, strict=True):
        for name, colour in zip(cost, (MUTED, *COLOURS), strict=False):
            here = lines_of(name, (grid, spacing, a))
            k, power, phases = (
                np.mean(x, axis=0) for x in zip(*(x["curves"] for x in here), strict=True)
            )
            column[0].plot(k, power, color=colour, label=name)
            column[1].plot(k, phases, color=colour)
        column[0].set_title(f"{grid}^3, {spacing:g} Mpc/h, a = {a:g}")
        column[0].axhspan(0.99, 1.01, color=MUTED, alpha=0.15, linewidth=0)
        column[0].set_ylim(0.6, 1.1)
        column[0].set_xlim(k[0], 1.0)
        column[1].set_yscale("log")
        column[1].set_ylim(1e-6, 0.1)
        column[1].set_xlabel("k / Nyquist")
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
