"""What waiting for Horovod costs: runs on two ranks by Horovod, and by a stand-in for NCCL.

    python benchmarks/exchange.py [--grids 32,64,128] [--steps 10] [--turns 3]

float32, BullFrog, 2LPT, 2 Mpc/h a cell, from the noise to the density, and the value and gradient
of the sum of its square. Jobs take turns; the table has the medians of the jobs' medians. The
stand-in has NCCL's functions and moves the bytes of transforms and halos through shared memory;
other collectives are Horovod's in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report, start_worker

from meshimpl import engine, launch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))


def worker(grids: list[int], steps: int) -> None:
    """Measure on this job's ranks; milliseconds by grid and kind."""
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm

    found: dict[str, float] = {}
    for grid in grids:
        edges = fpm.scale_factor_steps(0.1, 1.0, steps)
        sim = fpm.Simulation(
            fpm.Cosmology.planck18(), grid, 2.0 * grid, edges, integrator="bullfrog"
        )
        noise = sim.run(seed=1).white_noise.block

        def density(noise: tf.Tensor, sim: Any = sim) -> tf.Tensor:
            return sim.run(white_noise=noise).density().block

        def gradient(noise: tf.Tensor, density: Any = density) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(noise)
                loss = tf.reduce_sum(density(noise) ** 2)
            return tape.gradient(loss, noise)

        for kind, call in (("run", density), ("gradient", gradient)):
            call(noise)
            times = []
            for _ in range(9 if grid < 128 else 5):
                sim.box.mesh.barrier("turn")
                begin = time.perf_counter()
                call(noise).numpy()
                times.append(time.perf_counter() - begin)
            found[f"{grid}^3 {kind}"] = 1e3 * statistics.median(times)
    report(found)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grids", default="32,64,128")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if options.role == "worker":
        worker([int(grid) for grid in options.grids.split(",")], options.steps)
        return
    from nccl_stand_in import build_stand_in

    with tempfile.TemporaryDirectory() as folder:
        engines = {"Horovod": "horovod", "stand-in": build_stand_in(Path(folder))}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for _ in range(options.turns):
            for name, chosen in engines.items():
                os.environ[engine.EXCHANGE] = chosen
                words = [f"--grids={options.grids}", f"--steps={options.steps}"]
                turns[name].append(start_worker(sys.argv[0], words, 2, 1))
    print(f"{options.steps} steps on 2 ranks of one thread; medians of {options.turns} jobs [ms]\n")
    print(f"{'':16s}" + "".join(f"{name:>12s}" for name in engines))
    for row in turns["Horovod"][0]:
        medians = [statistics.median(turn[row] for turn in turns[name]) for name in engines]
        print(f"{row:16s}" + "".join(f"{median:12.0f}" for median in medians))


if __name__ == "__main__":
    main()
