"""The model of docs/explanations/scaling.md: time, memory and messages of a step on any ranks.

    python benchmarks/scaling.py                     the tables, and docs/images/scaling.png
    python benchmarks/scaling.py --reach             halos that are wide, and particles that migrate
    python benchmarks/scaling.py --measure 128 256   steps of whole runs here, on 1 and 2 ranks
    python benchmarks/scaling.py --pyramid           steps of the pyramid force, on four networks

In a step a rank works on its share of the particles and modes, at a rate fitted to one rank of one
thread. It sends what `StepTraffic` counts, with the bandwidth and latency of its machine. Other
machines' numbers are taken from publications; nothing was run on these machines.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import report, start_worker

from flowpm_dist.grid.decomposition import (
    PYRAMIDS,
    StepTraffic,
    default_mesh,
    fitting_shapes,
    parse_mesh,
)
from flowpm_dist.simulation.cost import process_bytes, simulation_bytes
from flowpm_dist.simulation.options import SolverOptions

HALO = 8
"""Cells of halo of the tables: displacements of 2LPT and ten steps in cells of 2 Mpc/h."""


@dataclass(frozen=True)
class Machine:
    """The costs of a step on a kind of rank.

    Attributes:
        particles: time of painting, reading, kick and drift [ns/particle].
        transform: time of a transform and its inverse, divided by log2 of the cells of the box
            [ns/cell].
        padding: time of joining halos to blocks, where the box is split [ns/cell of the padded
            block].
        bandwidth: bandwidth of a rank's messages [bytes/s].
        latency: time of a collective's negotiation and start [s].
        message: latency of each of its messages [s].
        rounding: time of rounding a number to float16 and restoring it [ns].
        joining: time of summing onto the coarse mesh of the pyramid force and of interpolating from
            it, times the cells of the force mesh to a coarse one along a side [ns/cell].
    """

    particles: float
    transform: float
    padding: float
    bandwidth: float
    latency: float
    message: float
    rounding: float
    joining: float

    def seconds(self, step: StepTraffic) -> float:
        """Returns the time of a step with one force."""
        return self.work(step) + self.messages(step)

    def work(self, step: StepTraffic) -> float:
        """Returns the time of a rank's own work."""
        cells, ranks = math.prod(step.grid), step.rows * step.cols
        own, padded = cells / ranks, step.padded_cells * (ranks > 1 or step.pyramid != "off")
        if step.pyramid == "off":
            transforms = own * math.log2(cells)
            joined = 0.0
        else:
            factor = PYRAMIDS[step.pyramid].factor
            coarse = own / factor**3
            transforms = padded * math.log2(padded) + coarse * math.log2(coarse * ranks)
            joined = padded / factor
        spent = self.particles * own + self.transform * transforms
        return 1e-9 * (spent + self.padding * padded + self.joining * joined)

    def messages(self, step: StepTraffic) -> float:
        """Returns the time of a rank's messages."""
        sent = step.total
        wait = self.latency * sent.collectives + self.message * sent.messages
        rounded = 1e-9 * self.rounding * sent.sent / 2 if step.half else 0.0
        return wait + rounded + sent.sent / self.bandwidth


MACHINES = {
    "here": Machine(32.0, 14.2 / 24, 0.8, 4.8e9, 1e-3, 1e-5, 3.0, 13.0),
    "cores": Machine(32.0, 14.2 / 24, 0.8, 12.5e9 / 64, 1e-3, 2e-6, 3.0, 13.0),
    "cores, InfiniBand": Machine(32.0, 14.2 / 24, 0.8, 25e9 / 64, 1e-3, 1e-6, 3.0, 13.0),
    "GPUs": Machine(0.36, 0.035 / 27, 0.03, 40e9, 1e-3, 1e-6, 0.03, 0.2),
    "GPUs, slow": Machine(0.36, 0.035 / 27, 0.03, 1.7e9, 1e-3, 1e-5, 0.03, 0.2),
}
"""A core of this machine; such cores, 64 to a node with a link of 100 Gbit/s, or with InfiniBand of
200; and GPUs, with the network of jaxDecomp's runs on H100s or that of two nodes of A100s.

docs/explanations/scaling.md gives the sources of the numbers.
"""
FITTED = (256, 1)
MEASURED = {
    "November 21": {(128, 2): 27.4, FITTED: 46.2, (256, 2): 26.0, (512, 2): 24.2},
    "November 23": {
        (128, 1): 52.7,
        (128, 2): 33.1,
        FITTED: 65.5,
        (256, 2): 37.7,
        (512, 1): 64.3,
        (512, 2): 35.7,
        (640, 2): 34.2,
    },
}
"""Steps by (grid, ranks), by the clock, when the machine did nothing else [ns/particle]."""
STEPS = 10
"""Steps from a = 0.1 to 1 of runs whose particles migrate."""
REACH = 36.5
"""The largest displacement that linear theory expects in a box of 4 Gpc/h [cells of 1 Mpc/h]."""
SPREAD = 6.0
"""The rms of a displacement along one axis [cells of 1 Mpc/h]."""
MATTER = 0.31
PARTICLE = 32
"""A particle that migrates: position, velocity and its number [bytes]."""
REACHED = (256, 512, 1024, 2048, 4096, 8192)
SIDES = (512, 1024, 2048, 4096, 8192)
RANKS = (1, 8, 64, 512, 1024, 4096, 8192)


def step_of(side: int, ranks: int, halo: int = HALO) -> StepTraffic:
    """Returns a step of a cubic grid on the default mesh of a number of ranks for this halo."""
    axes = parse_mesh(default_mesh(ranks, (side,) * 3, halo=halo))
    return StepTraffic((side,) * 3, axes["row"], axes["col"], halo)


def axes_of(step: StepTraffic) -> dict[str, int]:
    """Returns the axes of a step's mesh of ranks."""
    return {"row": step.rows, "col": step.cols}


def memory(step: StepTraffic) -> int:
    """Returns the memory of a rank [bytes]: the process and a run with such steps from 2LPT."""
    solver = SolverOptions(halo=step.halo, force_gradient=step.force_gradient, pyramid=step.pyramid)
    axes = axes_of(step)
    return process_bytes(axes, "simulate") + simulation_bytes(solver, step.grid, axes)


def worker(grid: int, steps: int) -> None:
    """Measure one run from the seed: its start, each step, and the memory of all ranks."""
    from meshimpl import launch

    launch.configure_threads()
    import resource

    import tensorflow as tf

    import flowpm_dist as fpm

    edges = fpm.scale_factor_steps(0.1, 1.0, steps)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 2.0 * grid, edges)
    moments: list[tuple[float, float]] = []

    def now(*_: object) -> None:
        moments.append((time.perf_counter(), time.process_time()))

    before = resource.getrusage(resource.RUSAGE_SELF)
    now()
    state = sim.run(seed=1, progress=now)
    after = resource.getrusage(resource.RUSAGE_SELF)
    pairs = list(zip(moments[1:], moments[2:], strict=False))
    wall, processor = ([b[i] - a[i] for a, b in pairs] for i in (0, 1))
    found = {
        "halo": state.halo,
        "wall": wall,
        "processor": processor,
        "initial": state.timings["initial"],
        "total": moments[-1][0] - moments[0][0],
        "all processor": moments[-1][1] - moments[0][1],
        "system": after.ru_stime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
    }
    peak = tf.constant(after.ru_maxrss * 1024, tf.int64)
    found["peak"] = int(sim.box.mesh.world.allreduce(peak))
    report(found)


def measure(grids: list[int], steps: int, ranks: list[int]) -> None:
    """Print medians of the steps after the first, and the model's."""
    print(
        "| grid | ranks | step: processor [s] | clock | fastest | model | model / processor |",
        end="",
    )
    print(" whole run [ns/particle/step] | initial [s] | system [s] | bytes/particle |", end="")
    print(" page faults | processor of rank 0 [ns/particle/step] |")
    print("|" + "---|" * 13, flush=True)
    for grid in grids:
        for number in ranks:
            found = start_worker(sys.argv[0], [str(grid), str(steps)], number, 1)
            processor, clock = (statistics.median(found[key]) for key in ("processor", "wall"))
            model = MACHINES["here"].seconds(step_of(grid, number, found["halo"]))
            cells = grid**3
            row = [f"{grid}^3", number, f"{processor:.3f}", f"{clock:.3f}"]
            row += [f"{min(found['wall']):.3f}", f"{model:.3f}", f"{model / processor:.2f}"]
            row += [f"{1e9 * found['total'] / cells / steps:.1f}", f"{found['initial']:.1f}"]
            row += [f"{found['system']:.1f}", f"{found['peak'] / cells:.1f}"]
            row += [found["faults"], f"{1e9 * found['all processor'] / cells / steps:.1f}"]
            print_row(row)


def print_row(cells: Sequence[object]) -> None:
    """Prints a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _nanoseconds(machine: Machine, side: int, ranks: int) -> float:
    return 1e9 * machine.seconds(step_of(side, ranks, 10)) / side**3


def tables() -> None:
    """Prints what the model gives, and how it compares with what was measured."""
    here = MACHINES["here"]
    print_row(["day", "grid", "ranks", "measured [ns/particle/step]", "model", "model / measured"])
    print_row(["---"] * 6)
    for day, steps in MEASURED.items():
        slower = steps[FITTED] / _nanoseconds(here, *FITTED)
        for (side, ranks), ns in steps.items():
            model = slower * _nanoseconds(here, side, ranks)
            print_row([day, f"{side}^3", ranks, ns, f"{model:.1f}", f"{model / ns:.2f}"])
    for name in ("cores", "GPUs"):
        titles = "grid, ranks, mesh, MiB sent, messages, GiB of memory, work [s], messages [s], "
        print(f"\n{name}")
        print_row((titles + "step [s], of 1 rank's speed").split(", "))
        print_row(["---"] * 10)
        for side in SIDES:
            for ranks in RANKS:
                print_row(predicted(MACHINES[name], side, ranks))


def predicted(machine: Machine, side: int, ranks: int) -> list[object]:
    """Returns a row of the table: a step of side^3 particles on a number of ranks."""
    step = step_of(side, ranks)
    sent, seconds = step.total, machine.seconds(step)
    alone = machine.work(step_of(side, 1)) / ranks
    return [
        f"{side}^3",
        ranks,
        f"`row:{step.rows},col:{step.cols}`",
        f"{sent.sent / 2**20:.3g}",
        sent.messages,
        f"{memory(step) / 2**30:.3g}",
        f"{machine.work(step):.3g}",
        f"{machine.messages(step):.3g}",
        f"{seconds:.3g}",
        f"{alone / seconds:.0%}",
    ]


def fastest(machine: Machine, side: int, ranks: int, **options: Any) -> StepTraffic:
    """Returns the step of a cubic grid on the mesh on which it takes least time."""
    pyramid = options.get("pyramid", "off")
    factor = 1 if pyramid == "off" else PYRAMIDS[pyramid].factor
    shapes = fitting_shapes(ranks, (side // factor,) * 3)
    return min((StepTraffic((side,) * 3, *s, HALO, **options) for s in shapes), key=machine.seconds)


def pyramid_tables() -> None:
    """Prints the model's steps with the pyramid force beside those with the whole mesh."""
    choices = ("off", *PYRAMIDS)
    titles = ["particles", "ranks"]
    for what in ("mesh", "MiB sent", "work [s]", "step [s]", "in float16 [s]"):
        titles += [f"{choice}: {what}" for choice in choices]
    titles += [f"{choice}: faster by{more}" for more in ("", ", float16") for choice in PYRAMIDS]
    for name in (name for name in MACHINES if name != "here"):
        print(f"\n{name}")
        print_row(titles)
        print_row(["---"] * len(titles))
        for side in SIDES:
            for ranks in (n for n in RANKS if n >= 64 and 2**18 <= side**3 // n <= 2**28):
                print_row(pyramid_row(MACHINES[name], side, ranks))


def pyramid_row(machine: Machine, side: int, ranks: int) -> list[object]:
    """Returns a row: steps with the whole mesh and with each pyramid, exact and in float16."""
    exact, half = (
        [fastest(machine, side, ranks, pyramid=p, half=half) for p in ("off", *PYRAMIDS)]
        for half in (False, True)
    )
    row: list[object] = [f"{side}^3", ranks, *(f"{s.rows} x {s.cols}" for s in exact)]
    row += [f"{s.total.sent / 2**20:.3g}" for s in exact]
    row += [f"{machine.work(s):.2g}" for s in exact]
    times = [[machine.seconds(s) for s in steps] for steps in (exact, half)]
    row += [f"{seconds:.2g}" for seconds in (*times[0], *times[1])]
    return row + [f"{whole / each:.2f}" for whole, *others in times for each in others]


@dataclass(frozen=True)
class Migration:
    """The model of particles that move to the rank that owns their cells, every few steps.

    Cells are of 1 Mpc/h. The halo holds what particles move in between: by linear theory, a fifth
    more and a cell, as with `halo="auto"`. Uneven numbers of particles on ranks are left out.

    Attributes:
        every: steps from one migration to the next.
    """

    every: int

    @property
    def share(self) -> float:
        """The largest part of a linear displacement today that particles move in between."""
        factors = [0.1 + 0.9 * step / STEPS for step in range(STEPS + 1)]
        starts_and_ends = zip(factors, factors[self.every :], strict=False)
        return max(growth(end) - growth(start) for start, end in starts_and_ends) / growth(1.0)

    @property
    def halo(self) -> int:
        """The halo in between [cells]."""
        return math.ceil(1.2 * REACH * self.share) + 1

    def step(self, side: int, ranks: int) -> StepTraffic:
        """Returns a step of a cubic grid on the default mesh for this halo."""
        return step_of(side, ranks, self.halo)

    def seconds(self, machine: Machine, side: int, ranks: int) -> float:
        """Returns the time of a step, with its share of a migration."""
        step = self.step(side, ranks)
        own = math.prod(step.grid) / ranks
        moved = math.sqrt(2 / math.pi) * SPREAD * self.share  # the mean of its size [cells]
        axes = [(n / parts, parts) for n, parts in ((side, step.rows), (side, step.cols))]
        sent = sum(min(1.0, moved / width) * own for width, parts in axes if parts > 1)
        collectives = 2 * sum(parts > 1 for _, parts in axes)  # counts, and rows
        wait = collectives * (machine.latency + 2 * machine.message)
        sorting = 1e-9 * machine.particles / 4 * own
        migration = wait + sorting + PARTICLE * sent / machine.bandwidth
        return machine.seconds(step) + migration / self.every


def growth(a: float) -> float:
    """Returns the linear growth, to a constant (Carroll, Press and Turner 1992, equation 29)."""
    matter = MATTER / (MATTER + (1 - MATTER) * a**3)
    vacuum = 1 - matter
    return a * matter / (matter ** (4 / 7) - vacuum + (1 + matter / 2) * (1 + vacuum / 70))


def reach_table() -> None:
    """Prints steps with the halo of a whole run, and with migrations, on many ranks."""
    titles = ["particles", "ranks", "mesh", "padded cells / own", "GiB", "cores [s]", "GPUs [s]"]
    migrations = [Migration(every) for every in (1, 5)]
    for each in migrations:
        titles += [f"every {each.every}, halo {each.halo}: GiB", "cores [s]", "GPUs [s]"]
    print_row(titles)
    print_row(["---"] * len(titles))
    halo = math.ceil(1.2 * REACH) + 1
    for side, ranks in ((s, n) for s in (2048, 4096) for n in REACHED):
        step = step_of(side, ranks, halo)
        own = math.prod(step.grid) / ranks
        row = [f"{side}^3", f"{ranks:,}", f"`row:{step.rows},col:{step.cols}`"]
        row += [f"{step.padded_cells / own:.1f}", f"{memory(step) / 2**30:.1f}"]
        row += [f"{MACHINES[name].seconds(step):.3g}" for name in ("cores", "GPUs")]
        for each in migrations:
            row += [f"{memory(each.step(side, ranks)) / 2**30:.1f}"]
            times = (each.seconds(MACHINES[name], side, ranks) for name in ("cores", "GPUs"))
            row += [f"{seconds:.3g}" for seconds in times]
        print_row(row)


def picture(path: Path) -> None:
    """Draws the time of a step by the number of ranks, for each grid, where its memory fits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"cores": ("cores, 64 to a node, 4 GiB each", 4), "GPUs": ("GPUs, 80 GiB each", 80)}
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2), sharey=True, layout="constrained")
    for axis, (name, (title, room)) in zip(axes, panels.items(), strict=True):
        for color, side in enumerate(SIDES):
            steps = {n: step_of(side, n) for n in (2**i for i in range(14))}
            fits = {n: step for n, step in steps.items() if memory(step) <= room * 2**30}
            if not fits:
                continue
            for part, style in ((MACHINES[name].seconds, "-"), (MACHINES[name].messages, ":")):
                times = [part(step) or math.nan for step in fits.values()]
                label = f"{side}$^3$" if style == "-" else None
                axis.loglog(list(fits), times, style, color=f"C{color}", label=label)
        axis.set(title=title, xlabel="ranks", xlim=(0.8, 1.2e4))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("step [s]; dotted: its messages")
    lines = axes[1].get_legend_handles_labels()
    figure.legend(*lines, title="particles", frameon=False, loc="outside right center")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print the tables and draw the picture, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=int, nargs="+", metavar="GRID")
    parser.add_argument("--pyramid", action="store_true", help="print the tables of that force")
    parser.add_argument("--reach", action="store_true", help="print the tables of wide halos")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--on", type=int, nargs="+", default=[1, 2], metavar="RANKS")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.steps, args.on)
    elif args.pyramid:
        pyramid_tables()
    elif args.reach:
        reach_table()
    else:
        tables()
        picture(Path(__file__).resolve().parents[1] / "docs" / "images" / "scaling.png")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:]))
    else:
        main()
