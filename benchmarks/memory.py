"""Peak memory of a gradient by its number of steps, of a large run, and of each job.

    python benchmarks/memory.py [--grid 128]        gradients through 10, 40 and 160 steps
    python benchmarks/memory.py --corrected 64      the same with a correction, 5, 10 and 20 steps
    python benchmarks/memory.py --live 256          bytes a particle that a gradient needs
    python benchmarks/memory.py --large 512         a run of 10 steps on 2 ranks of one thread
    python benchmarks/memory.py --jobs 64 128 256   each job of the command line on 1 and 2 ranks
    python benchmarks/memory.py --jobs 256 --only simulate --set run.halo=64   with other settings

Each number comes from new processes. It is the peak of all ranks together, TensorFlow included.
With --live it is the peak of what is allocated at the same time, less what was before, by the
counts of the C library, without what allocators keep for later.
With --jobs it is the peak of the largest rank, and the job's own estimate is printed with it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

from common import report, start_worker

from flowpm_dist.evolution.adjoints import ADJOINTS
from flowpm_dist.grid.decomposition import parse_mesh
from meshimpl import launch

COSMOLOGY = """
[cosmology]
Omega_b = 0.049
h = 0.67
n_s = 0.96
transfer = "eisenstein-hu"
"""
MATTER = "Omega_m = 0.31\nsigma8 = 0.81\n"
SIMULATED = f"{COSMOLOGY}{MATTER}[initial]\nseed = 1\n[evolution]\nsteps = 3\n[run]\nhalo = 16\n"
DATASET = f"""{COSMOLOGY}
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
[evolution]
steps = 2
[training]
batch = 4
[data]
simulations = 8
validation = 4
test = 4
[observation]
structure = """
JOBS = {
    "simulate": SIMULATED,
    "simulate with outputs": f"{SIMULATED}[output]\na = [0.5]\ncheckpoint_every = 1\n",
    "simulate with a light cone": f"""{SIMULATED}
[lightcone]
field_of_view = 2.0
pixels = 512
z_max = 1.0
sources = [{{ redshift = 0.5 }}, {{ redshift = 1.0 }}]
""",
    "dataset of 1lpt": f'{DATASET}"1lpt"\n',
    "dataset of pm": f'{DATASET}"pm"\n',
    "train": f"""{COSMOLOGY}
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
[evolution]
steps = 2
[training]
batch = 2
steps = 2
calibrate = 2
[data]
simulations = 4
reuse = 1
fill = 2
validation = 2
test = 2
""",
    "reconstruct": f"""{COSMOLOGY}{MATTER}
[evolution]
steps = 3
[run]
halo = 16
[observation]
structure = "pm"
sigma = 0.1
[data]
mock_seed = 1
[search]
stages = [[0.0, 1.0, 6]]
history = 3
""",
    "emulate": f"""{COSMOLOGY}{MATTER}
[emulate]
kind = "filter"
iterations = 3
validation = 1
[evolution]
steps = 3
[truth]
universes = 2
steps = 6
mesh_factor = 2
""",
}
"""Run files without their box. Peaks hardly grow with the number of steps."""
PEAKS = "FLOWPM_BENCHMARK_PEAKS"


def peak() -> int:
    """The greatest memory that this process has held [bytes]."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def job_worker(words: list[str]) -> None:
    """A command as one of its ranks, which leaves its peak memory in a file."""
    from flowpm_dist.cli.program import main as command

    sys.argv = ["flowpm-dist", *words]
    try:
        command()
    finally:
        (Path(os.environ[PEAKS]) / str(launch.detect().rank)).write_text(str(peak()))


def job(kind: str, grid: int, ranks: int, changes: list[str]) -> tuple[int, int]:
    """Peak memory of a job's largest rank, and what it told beforehand [bytes].

    Args:
        kind: the job, of `JOBS`.
        grid: cells along each side.
        ranks: number of ranks.
        changes: settings in place of the run file's, such as "run.halo=64".
    """
    with tempfile.TemporaryDirectory() as folder:
        run_file, output = Path(folder) / "run.toml", Path(folder) / "out"
        run_file.write_text(f"[box]\ngrid = {grid}\nsize = {2.0 * grid}\n{JOBS[kind]}")
        words = [kind.partition(" ")[0], str(run_file), "--output", str(output)]
        words += [word for change in changes for word in ("--set", change)]
        threads = max(1, launch.available_cores() // ranks)
        command = [sys.executable, __file__, "job", *words]
        environment = dict(os.environ)
        if ranks > 1:
            command, environment = launch.mpirun_command(ranks, command, threads=threads)
        environment |= {PEAKS: folder, "MESHIMPL_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
        peaks = [int((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    return max(peaks), estimated(kind, grid, ranks, changes)


def estimated(kind: str, grid: int, ranks: int, changes: list[str]) -> int:
    """A job's estimate of the memory of a rank [bytes]; arguments as for `job`."""
    from flowpm_dist.cosmoflow.planning.memory import check_training_mesh, dataset_memory
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
    from flowpm_dist.jobs.job import Request, job_class
    from flowpm_dist.jobs.run_file import parse_settings

    command, settings = kind.partition(" ")[0], parse_settings(changes)
    with tempfile.TemporaryDirectory() as folder:
        run_file, output = Path(folder) / "run.toml", Path(folder) / "out"
        run_file.write_text(f"[box]\ngrid = {grid}\nsize = {2.0 * grid}\n{JOBS[kind]}")
        if command == "dataset":
            plan = TrainingPlan.load(run_file, settings)
            mesh = check_training_mesh(plan, ranks, source=run_file)
            return dataset_memory(plan, plan.box.grid, parse_mesh(mesh, batched=True))
        planned = job_class(command).plan(Request(run_file, ranks, output, settings=settings))
        return planned.costs.estimate.memory


def print_jobs(grids: list[int], kinds: list[str], numbers: list[int], changes: list[str]) -> None:
    """Print a row of docs/measurements/memory.md for each job, grid and number of ranks."""
    print("| job | grid | ranks | estimated [MiB] | measured [MiB] | estimated / measured |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        for grid in grids:
            for ranks in numbers:
                measured, estimated = job(kind, grid, ranks, changes)
                figures = (
                    f"{estimated / 2**20:.0f} | {measured / 2**20:.0f} | {estimated / measured:.2f}"
                )
                print(f"| {kind} | {grid}^3 | {ranks} | {figures} |", flush=True)


class LivePeak:
    """Watches what is allocated within a context.

    Attributes:
        bytes: the peak, less what was allocated when the context began.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._stopped = threading.Event()
        self._library = ctypes.CDLL(None)
        self._library.mallinfo2.restype = _Allocated

    def __enter__(self) -> Self:
        gc.collect()
        self._first = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _now(self) -> int:
        counts = self._library.mallinfo2()
        return int(counts.uordblks + counts.hblkhd)

    def _watch(self) -> None:
        while not self._stopped.wait(5e-4):
            self.bytes = max(self.bytes, self._now() - self._first)


class _Allocated(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def print_live(grid: int, steps: int) -> None:
    """Print what a gradient needs, with and without fields of forces that are kept."""
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # its allocator gives nothing back
    for more, text in (([], "fields kept if they take little"), (["--no-fields"], "none kept")):
        arguments = [f"--live={grid}", f"--steps={steps}", *more]
        found = start_worker(sys.argv[0], arguments, 1, launch.available_cores())
        figures = ", ".join(f"{name} {value / grid**3:.0f}" for name, value in found.items())
        print(f"{grid}^3 x {steps} steps, {text} [bytes a particle]: {figures}", flush=True)


def live_worker(grid: int, steps: int, keep_fields: Any) -> None:
    """Report the live memory of a run and of a gradient, without and with its state in use."""
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm

    chosen = ADJOINTS["reversible"](keep_fields=keep_fields)
    edges = fpm.scale_factor_steps(0.1, 1.0, steps)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 2.0 * grid, edges, adjoint=chosen)
    noise = tf.random.stateless_normal([grid] * 3, [1, 2])
    found = {}
    # the first time with what is built and kept for later calls
    for name in ("first", "gradient", "gradient with the state in use"):
        with LivePeak() as run:
            sim.run(white_noise=noise).displacement.numpy()
        with LivePeak() as gradient:
            with tf.GradientTape() as tape:
                tape.watch(noise)
                state = sim.run(white_noise=noise)
                loss = tf.reduce_sum(state.density().block ** 2)
            if name != "gradient with the state in use":
                del state
            tape.gradient(loss, noise).numpy()
        found |= {"run": run.bytes, name: gradient.bytes}
    del found["first"]
    report(found)


def worker(grid: int, steps: int, adjoint: str, corrected: bool) -> None:
    """One run, or one value and gradient; peak memory over all ranks.

    Args:
        grid: cells along each side.
        steps: the number of steps.
        adjoint: its name, or "none" for a run alone.
        corrected: whether the force has a correction, whose numbers have a gradient, too.
    """
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.evolution.corrections import PotentialFilter

    options: Any = {} if adjoint == "none" else {"adjoint": adjoint}
    correction = PotentialFilter.begun()
    theta = tf.constant(correction.theta + 0.01)
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
            tape.watch([noise, theta])
            if corrected:
                sim = sim.with_correction(correction.with_theta(theta))
            state = sim.run(white_noise=noise)
            loss = tf.reduce_sum(state.density().block ** 2)
        tape.gradient(loss, [noise, theta])
        timings = state.timings
    together = int(sim.box.mesh.world.allreduce(tf.constant(peak(), tf.int64)))
    report({"peak": together, "step": timings["evolution"] / steps, "initial": timings["initial"]})


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["job"]:
        job_worker(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--corrected", type=int, default=0, metavar="GRID")
    parser.add_argument("--live", type=int, default=0, metavar="GRID")
    parser.add_argument("--large", type=int, default=0, metavar="GRID")
    parser.add_argument("--jobs", type=int, nargs="+", default=[], metavar="GRID")
    parser.add_argument("--only", choices=list(JOBS), nargs="+", help="these jobs alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of the jobs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the jobs"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--adjoint", default="reversible", choices=["none", *ADJOINTS])
    parser.add_argument("--no-fields", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "worker" and options.live:
        live_worker(options.live, options.steps, False if options.no_fields else "auto")
        return
    if options.role == "worker":
        worker(options.grid, options.steps, options.adjoint, bool(options.corrected))
        return
    if options.live:
        print_live(options.live, options.steps)
        return
    if options.jobs:
        print_jobs(options.jobs, options.only or list(JOBS), options.ranks, options.set)
        return

    def measured(grid: int, steps: int, adjoint: str, ranks: int, threads: int) -> Any:
        arguments = [
            f"--grid={grid}",
            f"--steps={steps}",
            f"--adjoint={adjoint}",
            f"--corrected={options.corrected}",
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
    rows: dict[str, tuple[int, ...]] = {"reversible": (10, 40, 160), "direct": (10, 40)}
    if options.corrected:
        rows = dict.fromkeys(rows, (5, 10, 20))
    for adjoint, numbers in rows.items():
        for steps in numbers:
            grid = options.corrected or options.grid
            found = measured(grid, steps, adjoint, 1, launch.available_cores())
            print(f"{adjoint:10s} {steps:4d} steps: {found['peak'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
