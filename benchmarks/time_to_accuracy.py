"""The error of whole runs against their time, compared with PM++ and JaxPM.

    python benchmarks/time_to_accuracy.py [--repeats 3] [--threads 2] [--steps 10 20]
        [--output time_to_accuracy]

The truth are the two TreePM runs of benchmarks/accuracy.py, 64^3 particles in 128 Mpc/h, at a = 1.
Every code begins with their particles at a = 0.1 and makes steps of equal length in a. A row is a
code, a scheme, and a number of steps. The time is the median of whole runs, from the particles in
memory to positions and density in memory, without compilation, in float32 on the same cores. The
errors of the power are the root mean squares of P / P(TreePM) - 1 over the two universes and the
bins of two bands of k, `BANDS`. The error of phases is the mean of 1 - r with TreePM's density in
the upper one.

flowpm_dist makes FastPM or BullFrog steps with finite-difference forces, on force meshes B times as
fine as the lattice. PM++ makes its leapfrog on such meshes, JaxPM diffrax's LeapfrogMidpoint on one
as fine as the lattice, its main branch FastPM factors. The other codes are installed, and checkouts
named, as by benchmarks/peers.py. The results are
OUTPUT.csv, OUTPUT.md and OUTPUT.png; rows that OUTPUT.csv has are not made again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# This process measures; the workers print for themselves what they need.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from common import treepm_runs
from emulator import Measured, Universe, options_of
from peers import CHECKOUTS, OURS, REQUIREMENTS, Worker, add_checkouts, environment, pin, say

from flowpm_dist.cosmology import LinearPower
from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    new_figure,
    plain_log_ticks,
    save_figure,
    style_axes,
)

BANDS = ((0.3, 0.7), (0.7, 1.3))
"""Wavenumbers [h/Mpc]."""
COLUMNS = ("scheme", "steps", "ns", "P low", "P high", "1 - r high")
GOALS = (0.01, 0.02, 0.05, 0.1)
"""Errors of P at which times are compared."""


@dataclass(frozen=True)
class Scheme:
    """A line of the figure: a code and its options, with several numbers of steps."""

    label: str
    code: str
    steps: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


BULLFROG = {"integrator": "bullfrog"}  # workers have deconvolve = False if nothing is said
SHARP = {**BULLFROG, "deconvolve": True}
FINER = {**SHARP, "mesh_factor": 2}
SCHEMES = [
    Scheme("FastPM", OURS, (5, 10, 20, 40)),
    Scheme("BullFrog", OURS, (5, 10, 20), BULLFROG),
    Scheme("deconvolve", OURS, (5, 10, 20, 40), SHARP),
    Scheme("deconvolve, B = 1.5", OURS, (10, 20), {**SHARP, "mesh_factor": 1.5}),
    Scheme("deconvolve, B = 2", OURS, (10, 20, 40), FINER),
    Scheme("filter", OURS, (5, 10), options_of("default")),
    Scheme("filter, B = 2", OURS, (5, 10), options_of("default-2")),
    Scheme("network", OURS, (10,), options_of("network")),
    Scheme("network, B = 2", OURS, (10,), options_of("network-2")),
    Scheme("PM++", "pmpp", (10, 20, 40)),
    Scheme("PM++, B = 2", "pmpp", (10, 20, 40), {"mesh_factor": 2}),
    Scheme("JaxPM", "jaxpm", (10, 20, 40)),
    Scheme("JaxPM main", "jaxpm_main", (10, 20, 40)),
]


class Judge:
    """A TreePM run, and the folder through which workers get its noise.

    Args:
        path: file of the reference data.
        folder: a new folder.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._universe = Universe(path, 10)
        self._truth = Measured(self._universe.states[-1])
        self._folder = folder
        folder.mkdir()
        noise = self._universe.first().white_noise.numpy().astype(np.float32)
        np.save(folder / "noise.npy", noise)
        names = ("displacement", "velocity")
        begin = dict(zip(names, map(np.float32, self._universe.start), strict=True))
        np.savez(folder / "particles.npz", **begin)
        np.save(folder / "weight.npy", np.zeros_like(noise))
        cosmology = self._universe.cosmology
        names = ("Omega_m", "Omega_b", "h", "n_s")
        self._sigma8 = float(cosmology.sigma8)
        given = {name: float(getattr(cosmology, name)) for name in names}
        trial = LinearPower(type(cosmology)(**given, A_s=2e-9))
        ratio = self._sigma8 / float(trial.sigma8())
        self._cosmology = {**given, "A_s": 2e-9 * ratio**2}

    @property
    def particles(self) -> int:
        """Number of particles."""
        return int(np.prod(self._universe.states[-1].box.grid))

    def run(
        self, scheme: Scheme, steps: int, python: Path, options: argparse.Namespace
    ) -> tuple[list[float], list[float]]:
        """Returns the durations of whole runs [s], and the errors of the last one."""
        words = [str(self._folder), "--steps", str(steps), "--threads", str(options.threads)]
        words += ["--sigma8", repr(self._sigma8), "--cosmology", json.dumps(self._cosmology)]
        words += ["--scheme", json.dumps(scheme.options), "--particles"]
        interpreter = sys.executable if scheme.code == OURS else python
        checkout = getattr(options, scheme.code, None)
        worker = Worker(scheme.code, "forward", interpreter, words, checkout)
        try:
            for _ in range(options.repeats):
                worker.run()
            worker.ask("save")
        finally:
            worker.stop()
        moved = np.load(self._folder / f"{scheme.code}-displacement.npy")
        state = self._universe.states[-1]
        moved = tf.constant(moved.reshape(state.displacement.block.shape))
        found = Measured(replace(state, displacement=Field(moved, state.box)))
        both = found.against(self._truth)
        k, excess = np.asarray(both.k), np.asarray(both.transfer) ** 2 - 1
        inside = [(k >= low) & (k < high) for low, high in BANDS]
        errors = [float(np.mean(excess[band] ** 2)) for band in inside]
        return worker.seconds, [*errors, float(np.mean(1 - both.correlation[inside[-1]]))]


def measured(
    scheme: Scheme, steps: int, judges: list[Judge], python: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns a row of the table."""
    found = [judge.run(scheme, steps, python, options) for judge in judges]
    seconds = np.median([time for times, _ in found for time in times])
    errors = np.array([each for _, each in found])
    values = [*np.sqrt(errors[:, :2].mean(axis=0)), errors[:, 2].mean()]
    numbers = [1e9 * seconds / judges[0].particles, *values]
    return dict(zip(COLUMNS, [scheme.label, steps, *map(float, numbers)], strict=True))


def fastest(rows: list[dict[str, Any]], column: str, goal: float) -> str:
    """Returns the row that takes the least time of those with at most this error, as a text."""
    found = [row for row in rows if row[column] <= goal]
    if not found:
        return "none"
    best = min(found, key=lambda row: row["ns"])
    return f"{best['ns']:.0f} ns ({best['scheme']}, {best['steps']} steps)"


def write(rows: list[dict[str, Any]], output: Path) -> None:
    """Writes the table and the figure."""
    bands = [f"{low:g} to {high:g}" for low, high in BANDS]
    heads = ["scheme", "steps", "ns a particle", f"error of P, k = {bands[0]}", f"k = {bands[1]}"]
    lines = [f"| {' | '.join([*heads, f'1 - r, k = {bands[1]}'])} |"]
    lines.append("|---" * 6 + "|")
    for row in rows:
        cells = [row["scheme"], f"{row['steps']}", f"{row['ns']:.0f}"]
        cells += [f"{100 * row[name]:.2g} %" for name in COLUMNS[3:5]]
        lines.append(f"| {' | '.join(cells)} | {row[COLUMNS[5]]:.1e} |")
    peers = {scheme.label for scheme in SCHEMES if scheme.code != OURS}
    lines += ["", "| P within | at k [h/Mpc] | flowpm_dist | the others |", "|---|---|---|---|"]
    for column, band in zip(COLUMNS[3:5], bands, strict=True):
        for goal in GOALS:
            both = [
                fastest([row for row in rows if (row["scheme"] in peers) == of_peers], column, goal)
                for of_peers in (False, True)
            ]
            lines.append(f"| {goal:.0%} | {band} | {' | '.join(both)} |")
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    figure = new_figure(13.6, 4.2)
    for panel, column in zip(figure.subplots(1, 3), COLUMNS[3:], strict=True):
        for number, scheme in enumerate(SCHEMES):
            here = [row for row in rows if row["scheme"] == scheme.label]
            times, values = ([row[name] for row in here] for name in ("ns", column))
            dashes = "--" if "B =" in scheme.label else ":" if "jaxpm" in scheme.code else "-"
            marker = "D" if "correction" in scheme.options else "o"
            colour = COLOURS[number % len(COLOURS)]
            if scheme.code != OURS:
                colour, marker = MUTED, "s"
            panel.loglog(times, values, dashes, color=colour, marker=marker, label=scheme.label)
            for row in here if number == 0 else []:
                at = (row["ns"], row[column])
                panel.annotate(f"{row['steps']}", at, (4, 4), textcoords="offset points", size=7)
        band = bands[column.endswith("high")]
        what = "1 - r" if column.startswith("1") else "error of P"
        panel.set_ylabel(f"{what}, k = {band} h/Mpc")
        panel.set_xlabel("ns a particle, whole run")
        style_axes(panel)
        plain_log_ticks(panel.xaxis)
        plain_log_ticks(panel.yaxis)
    figure.axes[2].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    save_figure(figure, output.with_suffix(".png"))


def main() -> None:
    """Measure what is missing, and write tables and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each universe")
    parser.add_argument("--threads", type=int, default=2, help="cores that all codes share")
    parser.add_argument("--steps", type=int, nargs="*", help="only these numbers of steps")
    add_checkouts(parser)
    parser.add_argument("--output", type=Path, default=Path("time_to_accuracy"))
    options = parser.parse_args()
    python = environment(REQUIREMENTS, "peers")
    pin(options.threads)
    file, rows = options.output.with_suffix(".csv"), []
    if file.exists():
        with file.open() as table:
            kept = list(csv.DictReader(table))
        if kept and tuple(kept[0]) != COLUMNS:
            raise SystemExit(f"{file} is of another version: it has {', '.join(kept[0])}")
        rows = [{k: v if k == "scheme" else float(v) for k, v in row.items()} for row in kept]
        rows = [{**row, "steps": int(row["steps"])} for row in rows]
    done = {(row["scheme"], row["steps"]) for row in rows}
    wanted = [
        (scheme, steps)
        for scheme in SCHEMES
        for steps in scheme.steps
        if (scheme.label, steps) not in done
        and (not options.steps or steps in options.steps)
        and (scheme.code not in CHECKOUTS or getattr(options, scheme.code))
    ]
    with tempfile.TemporaryDirectory() as name:
        paths = treepm_runs() if wanted else []
        judges = [Judge(path, Path(name, path.stem)) for path in paths]
        for scheme, steps in wanted:
            rows.append(measured(scheme, steps, judges, python, options))
            say(str(rows[-1]))
            with file.open("w", newline="") as table:
                writer = csv.DictWriter(table, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    write(rows, options.output)


if __name__ == "__main__":
    main()
