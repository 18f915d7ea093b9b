"""A whole simulation and its gradient: nanoseconds per particle and step, by part.

    python benchmarks/simulate.py [--grid 128] [--steps 10] [--repeats 5] [--gradient] [--profile]

float32, 2 Mpc/h a cell, Eisenstein-Hu, 2LPT, finite-difference force. Three jobs take turns: 1 rank
with every core, 1 rank with one thread, and 2 ranks with one thread each. A run includes everything
from the seed to the last step. --gradient adds the value and gradient of sum(w density) with
respect to the white noise, --profile the parts of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from common import report, start_worker

from meshimpl import launch

TURNS = 3


def worker(grid: int, steps: int, repeats: int, gradient: bool, profiled: bool) -> None:
    """Measure on this job's ranks; the medians of `repeats` runs after a first one."""
    launch.configure_threads()
    import resource

    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.simulation.profiling import profile

    sim = fpm.Simulation(
        fpm.Cosmology.planck18(), grid, 2.0 * grid, fpm.scale_factor_steps(0.1, 1.0, steps)
    )
    world = sim.box.mesh.world

    def timings_of_a_run() -> dict[str, Any]:
        state = sim.run(seed=1)  # not kept: the next run would count its memory too
        return {**state.timings, "halo": state.halo}

    timings = [timings_of_a_run() for _ in range(repeats + 1)]
    found: dict[str, Any] = {
        key: statistics.median(t[key] for t in timings[1:])
        for key in ("total", "evolution", "initial")
    }
    found |= {"compile": timings[0]["compile"], "halo": timings[0]["halo"]}
    if gradient:
        found["gradient"] = differentiate(sim, repeats)
    if profiled:
        found["profile"] = profile(sim, seed=1).ns_per_particle_per_step
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["peak"] = int(world.allreduce(tf.constant(peak, tf.int64)))
    report(found | {"mesh": str(sim.box.mesh)})


def differentiate(sim: Any, repeats: int) -> float:
    """Median seconds of value and gradient by the white noise, after a first one."""
    import tensorflow as tf

    noise = sim.run(seed=1).white_noise.block
    weights = tf.random.stateless_normal(noise.shape, [1, 2])
    durations = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        with tf.GradientTape() as tape:
            tape.watch(noise)
            density = sim.run(white_noise=noise).density().block
            loss = tf.reduce_sum(weights * density)
        tape.gradient(loss, noise)
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[1:])


def main() -> None:
    """Print the figures of each configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gradient", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.steps, options.repeats, options.gradient, options.profile)
        return
    cores = launch.available_cores()
    arguments = [f"--{k}={getattr(options, k)}" for k in ("grid", "steps", "repeats")]
    arguments += [f"--{k}" for k in ("gradient", "profile") if getattr(options, k)]
    jobs = {(1, cores): [], (1, 1): [], (2, 1): []}
    for _ in range(TURNS):
        for ranks, threads in jobs:
            jobs[ranks, threads].append(start_worker(sys.argv[0], arguments, ranks, threads))
    work = options.grid**3 * options.steps
    print(
        f"{options.grid}^3 particles x {options.steps} steps, float32; medians of {TURNS} turns of "
        f"{options.repeats} runs\n"
    )
    columns = ["ranks x threads", "whole run", "evolution", "initial"]
    columns += ["gradient", "/ whole run"] if options.gradient else []
    print(" ".join(f"{c:>16s}" for c in [*columns, "s/step", "peak [B/particle]"]))
    whole: dict[tuple[int, int], float] = {}
    for (ranks, threads), runs in jobs.items():

        def median(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.median(run[key] for run in runs)

        whole[ranks, threads] = median("total")
        row = [f"{ranks} x {threads}"]
        row += [f"{1e9 * median(k) / work:.1f} ns" for k in ("total", "evolution", "initial")]
        if options.gradient:
            row += [f"{1e9 * median('gradient') / work:.1f} ns"]
            row += [f"{median('gradient') / median('total'):.2f}"]
        row += [f"{median('evolution') / options.steps:.3f}"]
        row += [f"{median('peak') / options.grid**3:.0f}"]
        print(" ".join(f"{c:>16s}" for c in row))
    ratios = [
        runs_one["evolution"] / runs_two["evolution"]
        for runs_one, runs_two in zip(jobs[1, 1], jobs[2, 1], strict=True)
    ]
    print(f"\n1 -> 2 ranks of one thread: whole run {whole[1, 1] / whole[2, 1]:.2f}x, ", end="")
    print(f"evolution {statistics.median(ratios):.2f}x")
    if options.profile:
        print("\nparts of a step [ns/particle/step]")
        for (ranks, threads), runs in jobs.items():
            parts = {
                name: statistics.median(run["profile"][name] for run in runs)
                for name in runs[0]["profile"]
            }
            shown = ", ".join(f"{name} {ns:.1f}" for name, ns in parts.items())
            print(f"  {ranks} x {threads}: {shown}")


if __name__ == "__main__":
    main()
