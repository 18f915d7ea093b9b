"""Costs before a run starts that grow with the number of ranks: process sets, start, building.

    python benchmarks/growth.py [--ranks 2 4 8 16]   ranks of this machine, however few its cores
    python benchmarks/growth.py --sets 2 4 8 16      registration only, by mpi4py
    python benchmarks/growth.py --built 1024 8192    the Python code of one of so many ranks
    python benchmarks/growth.py --halos 2 4 8 16 32  a halo among a line of ranks, or in pairs
    python benchmarks/growth.py --power 4096 8192    the linear power of one rank of 8,192

The first starts Horovod on meshes of each size and builds a run. Each rank registers its own
process sets ("own"), or the process sets of all ranks ("all"), which a Horovod built elsewhere
needs. The second makes the MPI calls by which Horovod registers process sets. The third builds the
mesh functions of one rank against an engine that sends nothing, and so measures Python and
TensorFlow's graphs for that many ranks. The fourth uses mpi4py: an Alltoallv over a line of ranks,
most of it empty, or two exchanges with neighbours. The last evaluates the amplitude of each mode of
one rank, without the other ranks, and prints what that adds to the peak of the process. All times
are processor times, because ranks share cores.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from typing import Any

from common import report, start_worker

GRIDS = {1024: (512, 512, 512), 8192: (1024, 1024, 1024)}
SETS = ("own", "all")
BYTES = 2**16


def squarest(ranks: int) -> tuple[int, int]:
    """The rows and columns, most alike, whose product is a number of ranks; no fewer rows."""
    columns = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return ranks // columns, columns


def shapes(ranks: int) -> list[str]:
    """A mesh of one box and one of many replicas."""
    row, col = squarest(ranks)
    found = [f"row:{row},col:{col}"]
    return [*found, f"replica:{ranks // 4},row:2,col:2"] if ranks > 4 else found


class Builds:
    """The processor time in which this rank builds its mesh functions."""

    def __init__(self) -> None:
        from meshimpl import mesh_function

        self.seconds, self.number = 0.0, 0
        together = mesh_function.build_together

        def counted(groups: Any, name: str, build: Any) -> Any:
            def timed() -> Any:
                begin = time.thread_time()
                try:
                    return build()
                finally:
                    self.seconds += time.thread_time() - begin
                    self.number += 1

            return together(groups, name, timed)

        mesh_function.build_together = counted


def run_once(mesh: Any, grid: Any) -> None:
    """Two steps from 2LPT on a mesh, early: what comes from nobody makes no small displacements."""
    import flowpm_dist as fpm

    steps = fpm.scale_factor_steps(0.01, 0.02, 2)
    size = tuple(2.0 * n for n in grid)
    fpm.Simulation(fpm.Cosmology.planck18(), grid, size, steps, mesh=mesh, halo=4).run(seed=1)


def started(shape: str, sets: str) -> None:
    """Worker: start Horovod on these ranks, and build and run 64^3 particles."""
    from meshimpl import launch

    launch.configure_threads()
    import horovod.tensorflow  # noqa: F401
    from horovod.common import process_sets

    if sets == "all" and hasattr(process_sets, "RANKS_REGISTER_THEIR_OWN"):
        del process_sets.RANKS_REGISTER_THEIR_OWN
    from meshimpl import ProcessMesh, engine

    began = time.process_time()
    mesh = ProcessMesh(shape)
    found: dict[str, Any] = {"start": time.process_time() - began}
    found["sets"] = len(engine.current().process_sets)  # type: ignore[attr-defined]
    if sets == "own":
        builds = Builds()
        run_once(mesh.without("replica"), (64, 64, 64))
        found |= {"builds": builds.number, "building": builds.seconds}
    mesh.barrier("measured")
    report(found)


def registered(shape: str, sets: str) -> None:
    """Worker: what Horovod's `ProcessSet::Initialize` asks of MPI, for each set."""
    import numpy as np
    from mpi4py import MPI

    from meshimpl.mesh_shape import lines_of, parse_mesh_shape

    world = MPI.COMM_WORLD
    lines = [line for line in lines_of(parse_mesh_shape(shape)) if line.length < world.size]
    own = [line.of(world.rank) for line in lines]
    every = [group for line in lines for group in line.groups(world.size)]
    groups, communicators = own if sets == "own" else every, 4
    world.Barrier()
    began = time.process_time(), time.perf_counter()
    for ranks in groups:
        world.allgather(len(ranks))
        numbers = np.array(ranks, np.int32)
        for operation in (MPI.MAX, MPI.MIN):
            world.Allreduce(MPI.IN_PLACE, numbers.copy(), operation)
        whole = world.Dup()
        mine = whole.Create_group(whole.Get_group().Incl(ranks))
        communicators += 1
        if mine != MPI.COMM_NULL:
            host = mine.Split_type(MPI.COMM_TYPE_SHARED)
            mine.Split(host.rank, mine.rank)
            communicators += 3
    seconds = world.allreduce(time.process_time() - began[0]) / world.size
    wall = time.perf_counter() - began[1]
    sizes = {"sets": len(groups) + 1, "communicators": communicators}
    report(sizes | {"seconds": seconds, "wall": wall})


def built(job: str) -> None:
    """Worker: build a run as one rank of many does, with nobody to talk to."""
    ranks = int(job)
    os.environ |= {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    os.environ |= {"OMPI_COMM_WORLD_SIZE": job, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    os.environ["MESHIMPL_STALL_LIMIT"] = "0"
    import tensorflow as tf

    from meshimpl import ProcessMesh, engine

    class Alone(engine.HorovodEngine):
        """As if every rank sent what this one does."""

        is_running = wants_own_gpus = False

        def start(self, *_: Any) -> None:
            pass

        def reduce(self, x: Any, *_: Any) -> Any:
            return tf.identity(x)

        def gather(self, x: Any, group: Any, *_: Any) -> Any:
            return tf.tile(x, [len(group)] + [1] * (x.shape.rank - 1))

        def exchange(self, x: Any, *_: Any) -> Any:
            return tf.identity(x)

        def broadcast(self, x: Any, *_: Any) -> Any:
            return tf.identity(x)

    engine.current = lambda: alone
    alone = Alone()
    row, col = squarest(ranks)
    began = time.process_time()
    mesh = ProcessMesh(f"row:{row},col:{col}")
    mesh.world  # noqa: B018  (this rank's groups are made when they are first asked for)
    found = {"mesh": time.process_time() - began}
    began = time.thread_time()
    for _ in range(20):
        mesh.barrier("timed")
    found["meeting"] = (time.thread_time() - began) / 20
    builds = Builds()
    run_once(mesh, GRIDS.get(ranks, (8 * row, 8 * col, 64)))
    print(f"| {ranks} | {mesh} | {found['mesh']:.3f} | {1e3 * found['meeting']:.1f} | ", end="")
    print(f"{builds.number} | {builds.seconds:.2f} |", flush=True)
    os._exit(0)  # nobody waits for its end


def power(side: str, ranks: int = 8192) -> None:
    """Worker: the amplitudes of one rank of so many, for a cube of so many cells along a side."""
    import resource

    import numpy as np
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.grid.box import Box
    from flowpm_dist.initial import linear_amplitude
    from flowpm_dist.simulation.cost import power_bytes, simulation_bytes
    from flowpm_dist.simulation.options import SolverOptions
    from meshimpl import launch, process_mesh

    launch.detect = lambda: launch.RankEnvironment(rank=ranks // 2, size=ranks, local_size=1)
    process_mesh.initialise = lambda shapes: None
    row, col = squarest(ranks)
    n, mesh = int(side), process_mesh.ProcessMesh(f"row:{row},col:{col}")
    linear = fpm.LinearPower(fpm.Cosmology.planck18())
    linear(np.linspace(0.01, 1.0, 1000))  # loads what each call needs
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    amplitude = linear_amplitude(Box((n, n, n), (2.0 * n,) * 3, mesh, tf.float32), linear)
    seconds = time.process_time() - began
    added = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    modes, axes = 4 * int(tf.size(amplitude)), {"row": row, "col": col}
    solver = SolverOptions().with_usual_halo((n, n, n), (2.0 * n,) * 3)
    estimate = simulation_bytes(solver, (n, n, n), axes)
    sizes = (modes, added, power_bytes((n, n, n), 4), estimate)
    print(f"| {n}^3 | {ranks:,} | `{mesh}` | {seconds:.1f} | ", end="")
    print(" | ".join(f"{size / 2**20:,.0f}" for size in sizes), "|", flush=True)


def halos(repeats: int = 200) -> None:
    """Worker: a halo of 64 KiB each way."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    n, here = world.size, world.rank
    before, after = (here - 1) % n, (here + 1) % n
    send, receive = np.zeros(2 * BYTES, np.uint8), np.empty(2 * BYTES, np.uint8)
    counts = np.zeros(n, np.int32)
    np.add.at(counts, [before, after], BYTES)
    places = np.cumsum(counts) - counts

    def line() -> None:
        there = np.empty(n, np.int32)
        world.Alltoall(counts, there)
        world.Alltoallv((send, counts, places, MPI.BYTE), (receive, counts, places, MPI.BYTE))

    def pairs() -> None:
        world.Sendrecv(send[:BYTES], after, recvbuf=receive[:BYTES], source=before)
        world.Sendrecv(send[BYTES:], before, recvbuf=receive[BYTES:], source=after)

    found = {}
    for name, exchange in (("line", line), ("pairs", pairs), ("line", line), ("pairs", pairs)):
        world.Barrier()
        began = time.process_time()
        for _ in range(repeats):
            exchange()
        mine = (time.process_time() - began) / repeats
        mean = world.allreduce(mine) / n
        found[name] = min(mean, found.get(name, mean))
    report(found)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--sets", type=int, nargs="+")
    parser.add_argument("--built", type=int, nargs="+")
    parser.add_argument("--halos", type=int, nargs="+")
    parser.add_argument("--power", type=int, nargs="+")
    args = parser.parse_args()
    if args.built:
        print("| ranks | mesh | mesh [s] | a meeting [ms] | mesh functions | building them [s] |")
        print("|" + "---|" * 6, flush=True)
        for ranks in args.built:
            subprocess.run([sys.executable, __file__, "worker", "built", str(ranks)], check=True)
    elif args.power:
        print(
            "| grid | ranks | mesh | time [s] | amplitudes [MiB] | added to the peak [MiB] |",
            end="",
        )
        print(" estimate of the table [MiB] | of the run's fields [MiB] |")
        print("|" + "---|" * 8, flush=True)
        for side in args.power:
            subprocess.run([sys.executable, __file__, "worker", "power", str(side)], check=True)
    elif args.halos:
        print("| ranks of the line | Alltoallv [us] | two Sendrecv [us] |\n|---|---|---|")
        for ranks in args.halos:
            found = start_worker(__file__, ["halos"], ranks, 1)
            line, pairs = (1e6 * found[name] for name in ("line", "pairs"))
            print(f"| {ranks} | {line:.0f} | {pairs:.0f} |", flush=True)
    elif args.sets:
        print("| mesh | sets: own | all | communicators: own | all | made in [ms]: own | all |")
        print("|" + "---|" * 7)
        for shape in (shape for ranks in args.sets for shape in shapes(ranks)):
            own, every = both("sets", shape)
            counts = [f"{f[key]}" for key in ("sets", "communicators") for f in (own, every)]
            times = [f"{1e3 * f['seconds']:.1f}" for f in (own, every)]
            print(f"| `{shape}` | {' | '.join(counts + times)} |", flush=True)
    else:
        print("| mesh | sets: own | all | start [s]: own | all | building a run [s] |")
        print("|" + "---|" * 6)
        for shape in (shape for ranks in args.ranks for shape in shapes(ranks)):
            own, every = both("start", shape)
            row = [own["sets"], every["sets"], *(f"{f['start']:.2f}" for f in (own, every))]
            building = f"{own['building']:.2f} in {own['builds']} functions"
            print(f"| `{shape}` | {' | '.join(map(str, row))} | {building} |", flush=True)


def both(worker: str, shape: str) -> list[dict[str, Any]]:
    """A worker's results with a rank's own process sets, and with the sets of all ranks."""
    from meshimpl.mesh_shape import parse_mesh_shape

    ranks = math.prod(size for _, size in parse_mesh_shape(shape))
    return [start_worker(__file__, [worker, shape, sets], ranks, 1) for sets in SETS]


WORKERS = {"start": started, "sets": registered, "built": built, "halos": halos, "power": power}
"""By name; the arguments are texts."""

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        name, *arguments = sys.argv[2:]
        WORKERS[name](*arguments)
    else:
        main()
