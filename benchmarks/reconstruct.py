"""Time and memory of a posterior's value and gradient, compared with the forward run.

    python benchmarks/reconstruct.py [--grid 128] [--ranks 2] [--steps 5 10] [--repeats 5]

float32, 2 Mpc/h a cell, 2LPT and particle mesh, Gaussian noise, in the optimisers' coordinates of
even curvature, on ranks of one thread each. Each number of steps is a separate job; the jobs take
turns, and medians are printed. The peak is the memory of all ranks together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import report, start_worker

from meshimpl import launch

TURNS = 3


def worker(grid: int, steps: int, repeats: int) -> None:
    """Measure on this job's ranks; the medians of `repeats` calls after a first one."""
    launch.configure_threads()
    import resource

    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel

    edges = fpm.scale_factor_steps(0.1, 1.0, steps)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 2.0 * grid, edges)
    model = ForwardModel(sim)
    model.hold_halo()
    data = sim.run(seed=1).density().block
    posterior = rec.Posterior(model, rec.Gaussian(model.box, data, 1.0))
    objective = rec.EvenPosterior(posterior)
    scaling = objective.scaling
    point = scaling.to_even(posterior.space.normal(2))
    noise = scaling.from_even(point).field
    world = sim.box.mesh.world

    def median(call: Callable[[], Any]) -> float:
        durations = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            call()
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations[1:])

    found = {
        "forward": median(lambda: float(tf.reduce_sum(model(noise, {})))),
        "gradient": median(lambda: objective.evaluate(point)),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["peak"] = int(world.allreduce(tf.constant(peak, tf.int64)))
    report(found | {"mesh": str(sim.box.mesh)})


def main() -> None:
    """Print the figures of each number of steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.steps[0], options.repeats)
        return
    jobs: dict[int, list[dict[str, Any]]] = {steps: [] for steps in options.steps}
    for _ in range(TURNS):
        for steps, runs in jobs.items():
            given = {"grid": options.grid, "steps": steps, "repeats": options.repeats}
            arguments = [f"--{k}={v}" for k, v in given.items()]
            runs.append(start_worker(sys.argv[0], arguments, options.ranks, 1))
    print(f"{options.grid}^3, {options.ranks} ranks of one thread; medians of {TURNS} turns\n")
    columns = ["steps", "forward [s]", "gradient [s]", "/ forward", "peak [B/particle]"]
    print(" ".join(f"{c:>18s}" for c in columns))
    for steps, runs in jobs.items():
        middle = {
            key: statistics.median(run[key] for run in runs)
            for key in ("forward", "gradient", "peak")
        }
        ratio = statistics.median(run["gradient"] / run["forward"] for run in runs)
        row = [f"{steps}", f"{middle['forward']:.3f}", f"{middle['gradient']:.3f}"]
        row += [f"{ratio:.2f}", f"{middle['peak'] / options.grid**3:.0f}"]
        print(" ".join(f"{c:>18s}" for c in row))


if __name__ == "__main__":
    main()
