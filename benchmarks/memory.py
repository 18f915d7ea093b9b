"""Peak memory: of a gradient by the number of steps, and of a large run on two ranks.

    python benchmarks/memory.py [--grid 128]        the gradient of 10, 40 and 160 steps
    python benchmarks/memory.py --large 512         a run of 10 steps on 2 ranks of one thread

Each figure is that of processes of their own: the peak of all ranks together, TensorFlow included.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common import report, start_worker

from meshimpl import launch


def worker(grid: int, steps: int, adjoint: str) -> None:
    """One run, or one value and gradient; peak memory over all ranks."""
    launch.configure_threads()
    import resource

    import tensorflow as tf

    import flowpm_dist as fpm

    options: Any = {} if adjoint == "none" else {"adjoint": adjoint}
    sim = fpm.Simulation(
        fpm.Cosmology.planck18(),
        grid,
        2.0 * grid,
        fpm.scale_factor_steps(0.1, 1.0, steps),
        **options,
    )
    if adjoint == "none":
        timings = sim.run(seed=1).timings
    else:
        noise = sim.run(seed=1).white_noise.block
        with tf.GradientTape() as tape:
            tape.watch(noise)
            state = sim.run(white_noise=noise)
            loss = tf.reduce_sum(state.density().block ** 2)
        tape.gradient(loss, noise)
        timings = state.timings
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    together = int(sim.box.mesh.world.allreduce(tf.constant(peak, tf.int64)))
    report({"peak": together, "step": timings["evolution"] / steps, "initial": timings["initial"]})


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--large", type=int, default=0, metavar="GRID")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--adjoint", default="reversible", choices=["none", "reversible", "direct"])
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.steps, options.adjoint)
        return

    def measured(grid: int, steps: int, adjoint: str, ranks: int, threads: int) -> Any:
        arguments = [
            f"--grid={grid}",
            f"--steps={steps}",
            f"--adjoint={adjoint}",
        ]
        return start_worker(sys.argv[0], arguments, ranks, threads)

    if options.large:
        found = measured(options.large, options.steps, "none", 2, 1)
        print(
            f"{options.large}^3 x {options.steps} steps on 2 ranks: "
            f"{found['peak'] / options.large**3:.1f} bytes/particle "
            f"({found['peak'] / 1e9:.2f} GB in all), {found['step']:.2f} s/step, "
            f"{found['initial']:.1f} s before the first"
        )
        return
    for adjoint, numbers in (("reversible", (10, 40, 160)), ("direct", (10, 40))):
        for steps in numbers:
            found = measured(options.grid, steps, adjoint, 1, launch.available_cores())
            print(f"{adjoint:10s} {steps:4d} steps: {found['peak'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
