"""The time before the first step: wall clock, processor time, system time and page faults.

    python benchmarks/first_step.py [--grid 256] [--ranks 2] [--steps 3]

A new process runs with one thread for each rank, and then runs again. The second run compiles
nothing, but gets memory anew where the first returned it to the system. The numbers are rank 0's.
System time is the time of the kernel, most of it for page faults, which provide 4 KiB of zeros
each.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from common import report, start_worker

from meshimpl import launch


class Parts:
    """What each part of the work takes of this process."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, float, int]] = []
        self._before = self._now()

    def add(self, name: str) -> None:
        """Ends a part, which began where the last one ended."""
        now = self._now()
        wall, user, system, faults = (b - a for a, b in zip(self._before, now, strict=True))
        self.rows.append((name, wall, user, system, int(faults)))
        self._before = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), used.ru_utime, used.ru_stime, used.ru_minflt


def worker(grid: int, steps: int) -> None:
    """Measure two runs."""
    parts = Parts()
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.evolution.integrators import FastPM
    from flowpm_dist.simulation.compiled_solver import compiled_solver
    from flowpm_dist.simulation.universes import LocalCosmologies

    parts.add("import")
    cosmology, edges = fpm.Cosmology.planck18(), fpm.scale_factor_steps(0.1, 1.0, steps)
    sim = fpm.Simulation(cosmology, grid, 2.0 * grid, edges)
    parts.add("construction")
    for turn in ("first", "again"):

        def add(name: str, turn: str = turn) -> None:
            parts.add(f"{turn}: {name}")

        local = LocalCosmologies((sim.theory,), False)
        solver = compiled_solver(sim.box, sim.options)
        noise = solver.initial.white_noise(tf.constant(1, tf.int64))
        add("white noise")
        amplitude = solver.amplitude(local)
        add("linear amplitude")
        factors = FastPM().initial(sim.theory.growth, float(edges[0]), sim.options.lpt_order)
        x, v, _ = solver.initial.particles(noise, amplitude, factors)
        add("LPT")
        del amplitude
        state: Any = sim.run(
            particles=(x, v), progress=lambda step, *_: add(f"step {step}")
        )  # its first part holds reach, compilation and the first step
        add("end")
        del noise, x, v, state
        add("memory returned")
    report({"rows": parts.rows, "mesh": str(sim.box.mesh)})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.steps)
        return
    arguments = [f"--grid={options.grid}", f"--steps={options.steps}"]
    found = start_worker(sys.argv[0], arguments, options.ranks, 1)
    print(f"{options.grid}^3 on {options.ranks} ranks of one thread, mesh {found['mesh']}")
    print("| | wall [s] | user [s] | system [s] | page faults |\n|---|---|---|---|---|")
    for name, wall, user, system, faults in found["rows"]:
        print(f"| {name} | {wall:.2f} | {user:.2f} | {system:.2f} | {faults} |")


if __name__ == "__main__":
    main()
