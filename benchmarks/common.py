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
