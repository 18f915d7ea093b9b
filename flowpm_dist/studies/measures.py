"""What is measured of a run of a study: read from the files that the run leaves.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowpm_dist.io.files import read_json
from flowpm_dist.jobs.folder import PROVENANCE
from flowpm_dist.jobs.results import read_rows
from flowpm_dist.jobs.usage import whole

SECONDS = "_seconds"
"""The end of the names of columns with the time of a phase."""
STEP, EPOCH, THROUGHPUT = "seconds a step", "seconds an epoch", "samples a second"
MEMORY, ENERGY, POWER = "memory of a rank [MiB]", "energy [J]", "mean power [W]"
PHASE = "seconds in "
LAST = ("loss", "accuracy")
"""Columns of metrics.csv of which the last value counts; of the others below, the best."""
BEST = {"validation_loss": min, "validation_mae": min, "validation_accuracy": max}


def measured(folder: Path, skip: int) -> dict[str, Any]:
    """Returns what is measured of a complete run, by the name of a column.

    Args:
        folder: the folder of the run.
        skip: the number of first steps that the times leave out, if there are more.

    Raises:
        ValueError: the run has left no times of its steps.
    """
    if (folder / "timings.json").exists():
        found = _of_simulation(read_json(folder / "timings.json"), skip)
    else:
        found = _of_table(read_rows(folder / "metrics.csv"), skip)
    about = read_json(folder / PROVENANCE)
    if peak := about.get("peak memory of a rank [bytes]"):
        found[MEMORY] = peak / 2**20
    if (energy := whole(sources := about.get("energy [J]", {}))) is not None:
        found |= {ENERGY: energy, "energy of": ", ".join(sources)}
    if POWER in about:
        found[POWER] = about[POWER]
    versions = about.get("versions", {})
    found["host"] = about.get("host", "")
    found["versions"] = " ".join(f"{name}={version}" for name, version in versions.items())
    return found


def _of_simulation(timings: Mapping[str, Any], skip: int) -> dict[str, Any]:
    """Returns the times of a simulation; a sample is a particle in a step."""
    steps = _later(timings["steps"], skip)
    seconds = statistics.median(steps)
    found = {STEP: seconds, THROUGHPUT: timings["particles"] / seconds}
    if peaks := timings.get("peak_memory_bytes"):
        found[MEMORY] = max(peaks) / 2**20
    for name, each in timings.get("phases", {}).items():
        found[PHASE + name] = statistics.fmean(_later(each, skip))
    return found


def _of_table(rows: list[dict[str, str]], skip: int) -> dict[str, Any]:
    """Returns the times and scores of a training, from its metrics.csv."""
    if not rows:
        raise ValueError("it has left no metrics.csv, and no timings.json")
    names = [name for name in rows[0] if name.endswith(SECONDS)]
    counts = [0, *(int(row["step"]) for row in rows)]
    steps = [after - before for before, after in itertools.pairwise(counts)]
    times = [sum(float(row[name] or 0) for name in names) for row in rows]
    later = _later(list(zip(rows, steps, times, strict=True)), skip)
    seconds = statistics.median(time / count for _, count, time in later)
    found: dict[str, Any] = {STEP: seconds}
    samples = int(rows[-1]["samples"]) / int(rows[-1]["step"])
    found[THROUGHPUT] = samples / seconds
    if "epoch" in rows[0]:
        epochs = {row["epoch"]: 0.0 for row in rows}
        for row, time in zip(rows, times, strict=True):
            epochs[row["epoch"]] += time
        found[EPOCH] = statistics.median(_later(list(epochs.values()), min(skip, 1)))
    made = sum(count for _, count, _ in later)
    for name in names:
        total = sum(float(row[name] or 0) for row, _, _ in later)
        found[PHASE + name.removesuffix(SECONDS)] = total / made
    for name in LAST:
        if values := _values(rows, name):
            found[name] = values[-1]
    for name, best in BEST.items():
        if values := _values(rows, name):
            found[name] = best(values)
    return found


def _values(rows: Iterable[Mapping[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def _later(values: list[Any], skip: int) -> list[Any]:
    """Returns the values without the first ones; the last value at least."""
    return values[min(skip, len(values) - 1) :]
