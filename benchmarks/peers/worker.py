"""Shared by the workers of peers.py and time_to_accuracy.py: arguments, answers to the parent.

A worker prints one JSON line when its first run is done, then one line for each command it reads.
`run` gives seconds and peak memory of one whole run, `save` writes the results to the folder. It
needs NumPy only, because it also runs in the environments of the other codes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

A_START, A_STOP = 0.1, 1.0
CELL = 2.0
"""[Mpc/h]."""

SOURCES = (0.4, 0.6, 0.8, 1.0)
"""Redshifts of the lensing tasks, whose field is as wide as the box at the last of them."""

COSMOLOGY = {"Omega_m": 0.30966, "Omega_b": 0.04897, "h": 0.6766, "n_s": 0.96822, "A_s": 2.1064e-9}
"""flowpm_dist's Cosmology.planck18(), with Planck's A_s; used unless the parent gives another."""

Forward = Callable[[], tuple[Any, Any]]
Gradient = Callable[[], tuple[Any, Any]]


def arguments() -> argparse.Namespace:
    """What the parent asks for, with `noise` and `weight` read: float32 [grid, grid, grid].

    `cosmology` are the parameters of `COSMOLOGY`, `scheme` the keys of a row of
    time_to_accuracy.py.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["forward", "gradient", "lensing", "lensing-gradient"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True, help="of the files that `save` writes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sigma8", type=float)
    parser.add_argument("--cosmology", type=json.loads, default=COSMOLOGY)
    parser.add_argument("--scheme", type=json.loads, default={})
    parser.add_argument("--particles", action="store_true", help="begin with particles")
    options = parser.parse_args()
    options.noise = np.load(options.folder / "noise.npy")
    options.weight = np.load(options.folder / "weight.npy")
    options.grid = options.noise.shape[0]
    # Displacement [Mpc/h] and canonical velocity a^2 dx/dt [Mpc/h H0] at the first edge.
    options.begin = ()
    if options.particles:
        with np.load(options.folder / "particles.npz") as found:
            options.begin = found["displacement"], found["velocity"]
    options.edges = np.linspace(A_START, A_STOP, options.steps + 1)
    return options


def serve(options: argparse.Namespace, forward: Forward, gradient: Gradient, **about: Any) -> None:
    """Answer the parent until it closes the pipe.

    Args:
        options: the result of `arguments`.
        forward: makes one whole run; returns displacement [..., 3] [Mpc/h] and density when
            complete, or for a lensing task the number of sources and their convergence
            [source, x, y].
        gradient: returns a value and its gradient with respect to the white noise: of
            sum(weight * density), or of the sum of the squared convergence.
        about: facts for the first line: versions and scheme.
    """
    # Whatever a library prints on the standard output must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = gradient if options.task.endswith("gradient") else forward

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    begin = time.perf_counter()
    found = run()
    answer(first_seconds=time.perf_counter() - begin, **about)
    for line in sys.stdin:
        if line.strip() == "run":
            del found
            resettable = _reset_peak()
            begin = time.perf_counter()
            found = run()
            seconds = time.perf_counter() - begin
            answer(seconds=seconds, peak=_peak(resettable))
        elif line.strip() == "save":
            first, second = (np.asarray(x) for x in found)
            if second.dtype != np.float32:
                raise SystemExit(f"{second.dtype}: a float32 run is wanted")
            np.save(options.folder / f"{options.name}-{options.task}.npy", second)
            if options.task == "lensing":
                answer(rms=np.std(second.astype(np.float64), axis=(1, 2)).tolist())
            elif options.task == "forward":
                np.save(options.folder / f"{options.name}-displacement.npy", first)
                square = np.mean(np.sum(first.reshape(-1, 3).astype(np.float64) ** 2, axis=-1))
                answer(rms_displacement=float(np.sqrt(square)))
            else:
                answer(value=float(first))
        else:
            raise SystemExit(f"{line.strip()!r}: run or save")


def _reset_peak() -> bool:
    """Make the kernel forget the peak so far, compilation's; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak(resettable: bool) -> int:
    """Peak resident memory [bytes], since the reset where there was one."""
    if resettable:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
