"""A whole simulation: seconds per step, nanoseconds per particle and step, share of each phase.

    python benchmarks/simulate.py [--grid 128] [--steps 10] [--repeats 3]

float32, box of 2 Mpc/h a cell, Eisenstein-Hu, 2LPT, finite-difference force, on 1 rank with every
core, on 1 rank with one thread, and on 2 ranks with one thread each.
"""

from __future__ import annotations

import argparse
import sys

from common import report, start_worker

from meshimpl import launch


def worker(grid: int, steps: int, repeats: int) -> None:
    """Measure on this job's ranks; the median of `repeats` runs after a first one."""
    launch.configure_threads()
    import resource

    import numpy as np

    import flowpm_dist as fpm

    sim = fpm.Simulation(
        fpm.Cosmology.planck18(), grid, 2.0 * grid, fpm.scale_factor_steps(0.1, 1.0, steps)
    )
    runs = [sim.run(seed=seed).timings for seed in range(repeats + 1)]
    report(
        {
            "ns": float(np.median([t["ns_per_particle_per_step"] for t in runs[1:]])),
            "initial": float(np.median([t["initial"] for t in runs[1:]])),
            "compile": runs[0]["compile"],
            "phases": {
                name: float(np.median([t["phases"][name] for t in runs[1:]]))
                for name in runs[0]["phases"]
            },
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "mesh": str(sim.box.mesh),
        }
    )


def main() -> None:
    """Print the figures of each configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.steps, options.repeats)
        return
    cores = launch.available_cores()
    arguments = [f"--{k}={getattr(options, k)}" for k in ("grid", "steps", "repeats")]
    particles = options.grid**3
    print(
        f"{options.grid}^3 particles x {options.steps} steps, float32, medians of {options.repeats}"
    )
    single = None
    for ranks, threads in ((1, cores), (1, 1), (2, 1)):
        found = start_worker(sys.argv[0], arguments, ranks, threads)
        seconds = found["ns"] * particles * 1e-9
        phases = ", ".join(
            f"{name} {t * 1e9 / particles:.0f}" for name, t in found["phases"].items()
        )
        print(
            f"  {ranks} rank{'s' if ranks > 1 else ''} x {threads} thread"
            f"{'s' if threads > 1 else ''} ({found['mesh']}): {seconds:.3f} s/step, "
            f"{found['ns']:.0f} ns/particle/step ({phases}); initial {found['initial']:.1f} s, "
            f"compilation {found['compile']:.1f} s, peak {found['peak'] / 2**30:.2f} GiB on rank 0"
        )
        if (ranks, threads) == (1, 1):
            single = found["ns"]
        elif ranks == 2 and single is not None:
            print(f"    {single / found['ns']:.2f}x faster than 1 rank x 1 thread")


if __name__ == "__main__":
    main()
