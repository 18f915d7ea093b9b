"""Whole particle-mesh runs compared with JaxPM and PM++, in turns on the same cores.

    python benchmarks/peers.py [--grid 128] [--steps 10] [--repeats 5] [--gradient] [--json FILE]
    python benchmarks/peers.py --lensing [--grid 128] [--steps 10] [--repeats 5]

Every code gets the same white noise and does the same: linear field (Eisenstein-Hu), 2LPT at a =
0.1, steps of equal length in a up to a = 1, cloud-in-cell density. All runs are in float32 with as
many mesh cells as particles, 2 Mpc/h a cell. A run goes from the noise in memory to positions and
density in memory; compilation and the tables of growth and transfer function are not timed.
--gradient also times the value and the gradient, with respect to the noise, of sum(w * density).

--lensing times the convergence of sources at z = 0.4, 0.6, 0.8 and 1, and the gradient of the sum
of its squares, for flowpm_dist and JaxPM. flowpm_dist makes the maps during the run, JaxPM from a
snapshot for each half of a box. flowpm_dist turns and shifts the boxes along the line of sight,
JaxPM repeats them. So the maps have different lines of sight, and only their variances agree.

The codes run in turns, each in its own process, and their medians are compared. To show that they
compute the same, the script prints their densities' power spectra with linear theory for the same
noise, and their correlation with flowpm_dist's density.

The first call installs the other codes in an environment in ~/.cache/flowpm-dist, from the package
registry. pmwd is not in the registry, and JaxPM's main branch has what its release has not. `--pmwd
FOLDER` and `--jaxpm-main FOLDER` name checkouts of them, which are then timed, too. pmwd's gradient
does not work under this JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
REQUIREMENTS = HERE / "requirements-peers.txt"

sys.path += [str(ROOT), str(HERE / "peers")]

from environments import environment  # noqa: E402
from worker import SOURCES  # noqa: E402

OURS = "flowpm_dist"
CODES = (OURS, "jaxpm", "pmpp")
LENSING = (OURS, "jaxpm")
CHECKOUTS = ("pmwd", "jaxpm_main")
"""Codes of which a checkout may be named."""
SCRIPTS = {"jaxpm_main": "jaxpm"}
"""Workers that are not named after their code."""
WITHOUT_GRADIENT = ("pmwd",)
CELL = 2.0
WAVENUMBERS = (0.1, 0.2, 0.4, 0.8)
"""[h/Mpc]."""


class Worker:
    """A code's process for one task; its first run, with compilation, is done once it is made."""

    def __init__(
        self,
        code: str,
        task: str,
        python: str | Path,
        arguments: Sequence[str],
        checkout: Path | None = None,
    ) -> None:
        self.code, self.task = code, task
        script = HERE / "peers" / f"run_{SCRIPTS.get(code, code)}.py"
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [str(python), str(script), task, *arguments, "--name", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_worker_environment(code, arguments, checkout),
        )
        self.about = self._answer()
        self.seconds: list[float] = []
        self.peaks: list[int] = []

    def run(self) -> None:
        """One timed run."""
        found = self.ask("run")
        self.seconds.append(found["seconds"])
        self.peaks.append(found["peak"])

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command; return the answer to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process, kindly if it listens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise SystemExit(
                f"{self._log.read()[-4000:]}\n{self.code}'s {self.task} worker ended: {status}"
            )
        return json.loads(line)


def _worker_environment(
    code: str, arguments: Sequence[str], checkout: Path | None
) -> dict[str, str]:
    """As many threads as the parent has cores, for each library in its own way."""
    threads = arguments[arguments.index("--threads") + 1]
    found = dict(os.environ, OMP_NUM_THREADS=threads)
    if code == OURS:
        found["MESHIMPL_THREADS"] = threads
        found["PYTHONPATH"] = os.pathsep.join([str(ROOT), found.get("PYTHONPATH", "")])
    else:
        # XLA sizes its pool by the cores it may run on, or by NPROC.
        found["NPROC"] = threads
        found.setdefault("JAX_PLATFORMS", "cpu")
        found.pop("PYTHONPATH", None)
        if checkout is not None:
            found["PYTHONPATH"] = str(checkout.resolve())
    return found


def pin(threads: int) -> None:
    """Keep this process and all that it starts on the first `threads` of its cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: there are {len(cores)} cores")
    os.sched_setaffinity(0, cores[:threads])


def measure(
    options: argparse.Namespace, python: Path, folder: Path
) -> tuple[dict[tuple[str, str], Worker], dict[tuple[str, str], dict[str, Any]]]:
    """Start every worker, one after the other, then let them run in turn.

    Returns:
        the workers, stopped, and what they said of their results, by code and task.
    """
    tasks = tasks_of(options)
    arguments = [str(folder), "--steps", str(options.steps), "--threads", str(options.threads)]
    workers: dict[tuple[str, str], Worker] = {}
    results: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        for task in tasks:
            for code in codes_of(options, task):
                begin = time.perf_counter()
                own = code == OURS
                workers[code, task] = Worker(
                    code,
                    task,
                    sys.executable if own else python,
                    arguments,
                    getattr(options, code, None),
                )
                if own and task == tasks[0]:
                    sigma8 = workers[code, task].about["sigma8"]
                    arguments = [*arguments, "--sigma8", repr(sigma8)]
                first = workers[code, task].about["first_seconds"]
                say(
                    f"{code} {task}: ready after {time.perf_counter() - begin:.0f} s "
                    f"(compilation and first run {first:.1f} s)"
                )
        for repeat in range(options.repeats):
            for worker in workers.values():
                worker.run()
            shown = ", ".join(f"{w.code} {w.task} {w.seconds[-1]:.2f}" for w in workers.values())
            say(f"{repeat + 1}/{options.repeats} [s]: {shown}")
        for key, worker in workers.items():
            results[key] = worker.ask("save")
    finally:
        for worker in workers.values():
            worker.stop()
    return workers, results


def tasks_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The tasks of every code."""
    if options.lensing:
        return ("lensing", "lensing-gradient")
    return ("forward", "gradient") if options.gradient else ("forward",)


def codes_of(options: argparse.Namespace, task: str) -> tuple[str, ...]:
    """The codes that do a task, flowpm_dist first."""
    if options.lensing:
        return LENSING
    others = [code for code in CHECKOUTS if getattr(options, code)]
    return (*CODES, *(x for x in others if task == "forward" or x not in WITHOUT_GRADIENT))


def say(text: str) -> None:
    """One line of progress."""
    print(f"[peers] {text}", file=sys.stderr, flush=True)


class Spectra:
    """Binned spectra, one fundamental mode to a bin, of boxes of one size."""

    def __init__(self, grid: int, wanted: Sequence[float]) -> None:
        number = np.fft.fftfreq(grid, 1 / grid)
        half = number[: grid // 2 + 1].copy()
        half[-1] = abs(half[-1])
        squares = number[:, None, None] ** 2 + number[None, :, None] ** 2 + half**2
        self._bin = np.rint(np.sqrt(squares)).astype(int).ravel()
        self._count = np.full(half.size, 2.0)
        self._count[[0, -1]] = 1.0
        self._window = np.sinc(number / grid)[:, None, None] * np.sinc(number / grid)[None, :, None]
        self._window = (self._window * np.sinc(half / grid)) ** 2
        self._scale = (CELL / grid) ** 3  # volume over cells squared
        fundamental = 2 * np.pi / (CELL * grid)
        bins = {round(k / fundamental) for k in wanted}
        self.bins = sorted(b for b in bins if 1 <= b < grid // 2)
        self.k = [b * fundamental for b in self.bins]
        self.all_k = np.sqrt(squares) * fundamental

    def modes(self, density: np.ndarray, painted: bool = True) -> np.ndarray:
        """Fourier modes, without the cloud-in-cell window where the field is painted."""
        modes = np.fft.rfftn(density.astype(np.float64))
        return modes / self._window if painted else modes

    def cross(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Cross power of the bins [(Mpc/h)^3]."""
        weights = np.broadcast_to(self._count, a.shape).ravel()
        values = (a * b.conj()).real.ravel() * weights
        sums = np.bincount(self._bin, values)[self.bins]
        return sums / np.bincount(self._bin, weights)[self.bins] * self._scale


def compare(
    options: argparse.Namespace,
    folder: Path,
    about: dict[str, Any],
    results: dict[tuple[str, str], dict[str, Any]],
) -> dict[str, Any]:
    """What shows that the codes computed the same thing."""
    spectra = Spectra(options.grid, WAVENUMBERS)
    noise = spectra.modes(np.load(folder / "noise.npy"), painted=False)
    log_k = np.log(np.maximum(spectra.all_k, about["k"][0]))
    power = np.exp(np.interp(log_k, np.log(about["k"]), np.log(about["power"])))
    linear_modes = noise * np.sqrt(power / CELL**3)
    linear = spectra.cross(linear_modes, linear_modes)
    found: dict[str, Any] = {"k": spectra.k, "linear_power": linear.tolist(), "codes": {}}
    reference = gradient = None
    for code in codes_of(options, "forward"):
        modes = spectra.modes(np.load(folder / f"{code}-forward.npy"))
        own = spectra.cross(modes, modes)
        if reference is None:
            reference, reference_power = modes, own
        entry = {
            "rms_displacement": results[code, "forward"]["rms_displacement"],
            "power_over_linear": (own / linear).tolist(),
            "correlation": (
                spectra.cross(modes, reference) / np.sqrt(own * reference_power)
            ).tolist(),
        }
        if options.gradient and code in codes_of(options, "gradient"):
            value = np.load(folder / f"{code}-gradient.npy").astype(np.float64).ravel()
            gradient = value if gradient is None else gradient
            norms = np.linalg.norm(value), np.linalg.norm(gradient)
            entry["gradient_correlation"] = float(value @ gradient / (norms[0] * norms[1]))
            entry["gradient_norm_ratio"] = float(norms[0] / norms[1])
        found["codes"][code] = entry
    return found


def summarise(
    options: argparse.Namespace, workers: dict[tuple[str, str], Worker]
) -> dict[str, dict[str, Any]]:
    """Medians of each code and task, and how they compare."""
    per_step, first = options.grid**3 * options.steps, tasks_of(options)[0]
    found: dict[str, dict[str, Any]] = {}
    for (code, task), worker in workers.items():
        median = statistics.median(worker.seconds)
        own = found[OURS][task]["seconds"] if code != OURS else median
        found.setdefault(code, {"about": _described(worker.about)})[task] = {
            "seconds": median,
            "fastest": min(worker.seconds),
            "slowest": max(worker.seconds),
            "ns_per_particle_per_step": median * 1e9 / per_step,
            "over_flowpm_dist": median / own,
            "over_forward": median / found.get(code, {}).get(first, {}).get("seconds", median),
            "peak": max(worker.peaks),
            "first_seconds": worker.about["first_seconds"],
        }
    return found


def _described(about: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name not in ("k", "power")}


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print the tables."""
    print(
        f"{options.grid}^3 particles x {options.steps} steps, float32, {options.threads} threads, "
        f"medians of {options.repeats}, in turn"
    )
    for code in found["timings"]:
        about = found["timings"][code]["about"]
        print(f"  {code} {about['version']}: {about['scheme']} ({about['beside']})")
    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("s/run", lambda t: f"{t['seconds']:.3f}"),
        ("fastest..slowest", lambda t: f"{t['fastest']:.3f}..{t['slowest']:.3f}"),
        ("ns/particle/step", lambda t: f"{t['ns_per_particle_per_step']:.0f}"),
        (f"/{OURS}", lambda t: f"{t['over_flowpm_dist']:.2f}"),
        ("/forward", lambda t: f"{t['over_forward']:.2f}"),
        ("peak GiB", lambda t: f"{t['peak'] / 2**30:.2f}"),
        ("first run s", lambda t: f"{t['first_seconds']:.1f}"),
    )
    for task in tasks_of(options):
        rows = [[task, "version", *(head for head, _ in columns)]]
        for code, entry in found["timings"].items():
            if task in entry:
                cells = (text(entry[task]) for _, text in columns)
                rows.append([code, entry["about"]["version"], *cells])
        print_table(rows)
    if options.lensing:
        print("\nrms of the convergence")
        heads = [f"z = {z}" for z in found["sources"]]
        print_table(
            [["", *heads]]
            + [[code, *(f"{x:.5f}" for x in rms)] for code, rms in found["rms"].items()]
        )
        return
    guard = found["comparison"]
    heads = [f"k={k:.2f}" for k in guard["k"]]
    print("\npower over linear theory's (same noise), and correlation with flowpm_dist's density")
    rows = [["density", "rms Mpc/h", *heads, *(f"r, {head}" for head in heads)]]
    for code in codes_of(options, "forward"):
        entry = guard["codes"][code]
        row = [code, f"{entry['rms_displacement']:.2f}"]
        row += [f"{x:.3f}" for x in entry["power_over_linear"]]
        rows.append([*row, *(f"{x:.4f}" for x in entry["correlation"])])
    print_table(rows)
    if options.gradient:
        rows = [["gradient", "correlation", "norm over flowpm_dist's"]]
        for code in codes_of(options, "gradient"):
            entry = guard["codes"][code]
            numbers = entry["gradient_correlation"], entry["gradient_norm_ratio"]
            rows.append([code, *(f"{x:.4f}" for x in numbers)])
        print_table(rows)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print cells below their heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def add_checkouts(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name checkouts of codes."""
    for code in CHECKOUTS:
        name = code.replace("_", "-")
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help="a checkout of it")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="cores that all codes share")
    parser.add_argument("--gradient", action="store_true")
    parser.add_argument("--lensing", action="store_true")
    add_checkouts(parser)
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args()
    python = environment(REQUIREMENTS, "peers")
    pin(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random = np.random.default_rng(20)
        for array in ("noise", "weight"):
            values = random.standard_normal((options.grid,) * 3, dtype=np.float32)
            np.save(folder / f"{array}.npy", values)
        workers, results = measure(options, python, folder)
        found = {
            **{x: getattr(options, x) for x in ("grid", "steps", "repeats", "threads")},
            "timings": summarise(options, workers),
        }
        if options.lensing:
            found["sources"] = list(SOURCES)
            found["rms"] = {code: results[code, "lensing"]["rms"] for code in LENSING}
        else:
            about = workers[OURS, "forward"].about
            found["comparison"] = compare(options, folder, about, results)
    show(options, found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
