"""Shared by the benchmarks: a worker on given ranks and threads, and its measurements."""

from __future__ import annotations

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

from meshimpl import launch

RESULT = "MESHIMPL_BENCHMARK_RESULT"
REFERENCE = "FLOWPM_REFERENCE"


def start_worker(script: str, arguments: Sequence[str], ranks: int, threads: int) -> dict[str, Any]:
    """Run `script worker ARGUMENTS` on ranks of so many threads; return what rank 0 reported."""
    command = [sys.executable, script, "worker", *arguments]
    environment = dict(os.environ, MESHIMPL_THREADS=str(threads))
    if ranks > 1:
        command, environment = launch.mpirun_command(ranks, command, threads=threads)
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        environment[RESULT] = str(path)
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode or not path.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
        return json.loads(path.read_text())


def treepm_runs() -> list[Path]:
    """Returns the files of the two complete TreePM runs, in the folder FLOWPM_REFERENCE.

    Raises:
        SystemExit: the variable is not set, or a file is missing.
    """
    about = "tests/data/README.md says what it holds and how to make it"
    if not os.environ.get(REFERENCE):
        raise SystemExit(
            f"{REFERENCE} is not set: set it to the folder of treepm_P1.npz and treepm_P2.npz, two "
            f"runs of MP-Gadget, which are too large for the repository; {about}"
        )
    paths = [Path(os.environ[REFERENCE]) / f"treepm_P{number}.npz" for number in (1, 2)]
    for path in paths:
        if not path.is_file():
            raise SystemExit(f"{path}: no such file, a run of MP-Gadget; {about}")
    return paths


def flowpm(*words: object) -> list[str]:
    """Returns the command line of `flowpm-dist` with the Python that runs this."""
    return [sys.executable, "-m", "flowpm_dist.cli", *map(str, words)]


def report(result: dict[str, Any]) -> None:
    """Hand a worker's result to the process that started it; rank 0 alone does."""
    if launch.detect().rank == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(result))


def median_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Median time of a call that returns only when its work is done."""
    durations = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def of_mean(values: np.ndarray) -> list[float]:
    """Returns the mean of independent values [n] and its standard error."""
    return [float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))]
