"""A loop over cosmologies of one box in one process: its time and its memory.

    python benchmarks/many_universes.py [--grid 32] [--count 1000] [--ranks 1] [--threads 2]
                                        [--ways bare run Simulation]
    python benchmarks/many_universes.py --table [--grid 64] [--count 200] [--transfer camb]

Three ways take turns, so that all of them meet the same machine:

    bare          `simulation.run(seed)`, always of the same cosmology
    run           `simulation.run(seed, cosmology=...)`
    Simulation    a new `Simulation(cosmology, ...)` each time, dropped after its run

The script prints the median processor time of each on rank 0. It also prints how many graphs were
made after the first round, which is the number of compilations, and the memory of the process after
some of the rounds.

--table compares wall times: bare runs, then a table of universes by `flowpm-dist simulate --table`
without fields and figures, then bare runs again. A row's time is the time between two rows' ends.
With CAMB's transfer function only the amplitude and n_s vary.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
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


RUN_FILE = """[box]
grid = {grid}
size = {size}
[cosmology]
Omega_m = 0.3
Omega_b = 0.05
h = 0.7
n_s = 0.96
sigma8 = 0.8
transfer = "{transfer}"
[evolution]
steps = {steps}
[run]
halo = {halo}
[initial]
seed = 1
[output]
fields = []
figures = false
"""


def work_table(grid: int, count: int, transfer: Any) -> dict[str, Any]:
    """Returns the wall times of bare runs and of a table's rows [round]."""
    import flowpm_dist as fpm
    from flowpm_dist import cli

    edges = fpm.scale_factor_steps(0.1, 1.0, STEPS)
    cosmology = fpm.Cosmology(
        Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8, transfer=transfer
    )
    simulation = fpm.Simulation(cosmology, grid, BOX_SIZE, edges, halo=grid // 8)
    random, bare = np.random.default_rng(1), []

    def run_bare() -> None:
        simulation.run(seed=0)
        for number in range(count // 2):
            begin = time.perf_counter()
            simulation.run(number).displacement.block.numpy()
            bare.append(time.perf_counter() - begin)

    names = {"cosmology.n_s": (0.9, 1.0), "cosmology.sigma8": (0.6, 1.0)}
    if transfer != "camb":
        names |= {"cosmology.Omega_m": (0.2, 0.4), "cosmology.h": (0.6, 0.8)}
    drawn = np.stack([random.uniform(*ends, count + 1) for ends in names.values()], 1)
    with tempfile.TemporaryDirectory() as folder:
        run_file, table = Path(folder, "run.toml"), Path(folder, "table.csv")
        settings = {"grid": grid, "size": BOX_SIZE, "transfer": transfer, "steps": STEPS}
        run_file.write_text(RUN_FILE.format(halo=grid // 8, **settings))
        np.savetxt(table, drawn, "%.5f", ",", header=",".join(names), comments="")
        run_bare()
        arguments = ["simulate", str(run_file), "--table", str(table), "--output", f"{folder}/row"]
        sys.argv[1:] = arguments
        try:
            cli.main()
        except SystemExit as end:
            if end.code:
                raise
        run_bare()
        ends = [
            Path(folder, f"row-{row}", "provenance.json").stat().st_mtime
            for row in range(count + 1)
        ]
    return {"bare": bare, "row": np.diff(ends).tolist()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("place", nargs="?", choices=["worker"])
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--transfer", choices=["eisenstein-hu", "camb"], default="eisenstein-hu")
    options = parser.parse_args()
    if options.place:
        if options.table:
            report(work_table(options.grid, options.count, options.transfer))
        else:
            report(work(options.grid, options.count, options.ways))
        return
    arguments = [f"--grid={options.grid}", f"--count={options.count}", "--ways", *options.ways]
    if options.table:
        arguments += ["--table", f"--transfer={options.transfer}"]
    found = start_worker(__file__, arguments, options.ranks, options.threads)
    if options.table:
        bare, row = np.median(found["bare"]), np.median(found["row"])
        print(f"{options.count} rows at {options.grid}^3 on {options.ranks} ranks")
        print(f"bare {bare:.3f} s, row {row:.3f} s, {row / bare:.2f} of a bare run's")
        return
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
