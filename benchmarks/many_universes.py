"""A loop over cosmologies of one box in one process: its time and its memory.

    python benchmarks/many_universes.py [--grid 32] [--count 1000] [--ranks 1] [--threads 2]
                                        [--ways bare run Simulation]

Three ways take turns, so that all of them meet the same machine:

    bare          `simulation.run(seed)`, always of the same cosmology
    run           `simulation.run(seed, cosmology=...)`
    Simulation    a new `Simulation(cosmology, ...)` each time, dropped after its run

The script prints the median processor time of each on rank 0. It also prints how many graphs were
made after the first round, which is the number of compilations, and the memory of the process after
some of the rounds.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import report, start_worker

STEPS, BOX_SIZE = 5, 200.0
ROUNDS_SHOWN = 10
WAYS = ("bare", "run", "Simulation")


def resident_bytes() -> int:
    """Returns the memory that this process holds now [bytes]."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def work(grid: int, count: int, chosen: Sequence[str]) -> dict[str, Any]:
    """Returns the processor time of each way [round], the graphs made, and the memory [round]."""
    from tensorflow.python.framework.func_graph import FuncGraph

    import flowpm_dist as fpm

    random, edges, graphs = np.random.default_rng(1), np.linspace(0.1, 1.0, STEPS + 1), [0]
    made = FuncGraph.__init__

    def counted(*args: Any, **kwargs: Any) -> None:
        graphs[0] += 1
        made(*args, **kwargs)

    FuncGraph.__init__ = counted

    def drawn() -> fpm.Cosmology:
        return fpm.Cosmology(
            Omega_m=random.uniform(0.2, 0.4),
            Omega_b=0.05,
            h=random.uniform(0.6, 0.8),
            n_s=random.uniform(0.9, 1.0),
            sigma8=random.uniform(0.6, 1.0),
        )

    # The same halo for all: "auto" compiles again where a universe needs another one.
    options: dict[str, Any] = {"halo": grid // 8}
    own = fpm.Simulation(drawn(), grid, BOX_SIZE, edges, **options)
    ways = {
        "bare": lambda seed: own.run(seed),
        "run": lambda seed: own.run(seed, cosmology=drawn()),
        "Simulation": lambda seed: fpm.Simulation(drawn(), grid, BOX_SIZE, edges, **options).run(
            seed
        ),
    }
    ways = {name: ways[name] for name in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory, first = [], 0
    for number in range(count):
        for name, way in ways.items():
            begin = time.process_time()
            way(number).displacement.block.numpy()
            seconds[name].append(time.process_time() - begin)
        memory.append(resident_bytes())
        first = first or graphs[0]
    return {"seconds": seconds, "graphs": graphs[0] - first, "memory": memory}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("place", nargs="?", choices=["worker"])
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    if options.place:
        report(work(options.grid, options.count, options.ways))
        return
    arguments = [f"--grid={options.grid}", f"--count={options.count}", "--ways", *options.ways]
    found = start_worker(__file__, arguments, options.ranks, options.threads)
    print(f"{options.count} rounds at {options.grid}^3 on {options.ranks} ranks")
    for name, seconds in found["seconds"].items():
        bare = found["seconds"].get("bare")
        ratio = np.median(np.divide(seconds, bare)[1:]) if bare else np.nan
        print(f"{name:10}  {np.median(seconds[1:]):.3f} s, {ratio:.2f} of a bare run's")
    print(f"graphs made after the first round: {found['graphs']}")
    for number in sorted({0, 4, *range(0, options.count, -(-options.count // ROUNDS_SHOWN))}):
        if number < options.count:
            print(f"memory after round {number + 1:4}: {found['memory'][number] / 2**20:.1f} MiB")
    print(f"memory after the last: {found['memory'][-1] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
