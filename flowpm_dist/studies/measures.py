"""The measurements of a run of a study, read from the files that the run leaves.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowpm_dist.io.files import read_json
from flowpm_dist.jobs.folder import PROVENANCE
from flowpm_dist.jobs.results import read_rows
from flowpm_dist.jobs.run_file import settings_in
from flowpm_dist.jobs.usage import added, whole
from flowpm_dist.simulate.folder import FEATURES, STATISTICS

SECONDS = "_seconds"
"""The end of the names of columns with the time of a phase."""
STEP, EPOCH, THROUGHPUT = "seconds a step", "seconds an epoch", "samples a second"
MEMORY, ENERGY, POWER = "memory of a rank [MiB]", "energy [J]", "mean power [W]"
PHASE, FEATURE = "seconds in ", "mean feature of "
"""The beginnings of the names of columns with the time of a phase, and with a statistic."""
TRAINED = ("loss", "accuracy")
"""Columns that are averaged over the last epoch; without epochs, over the last tenth of rows."""
VALIDATED = ("validation_loss", "validation_mae", "validation_accuracy")
"""Columns whose values are taken from the validation with the least loss."""


def measured(folder: Path, skip: int) -> dict[str, Any]:
    """Returns what is measured of a complete run, by the name of a column.

    Args:
        folder: the folder of the run.
        skip: the number of first steps that the times leave out, if there are more.

    Raises:
        ValueError: the run has left no times of its steps.
    """
    if (folder / "timings.json").exists():
        values = _of_simulation(read_json(folder / "timings.json"), skip)
        features = read_json(folder / STATISTICS / FEATURES)
        values |= {FEATURE + name: statistics.fmean(each) for name, each in features.items()}
    else:
        values = _of_table(folder, skip)
    about = read_json(folder / PROVENANCE)
    if peak := about.get("peak memory of a rank [bytes]"):
        values[MEMORY] = peak / 2**20
    if (energy := whole(sources := about.get("energy [J]", {}))) is not None:
        values |= {ENERGY: energy, "energy of": ", ".join(added(sources))}
    for name in (POWER, "threads per rank", "ranks on this host"):
        if name in about:
            values[name] = about[name]
    versions = about.get("versions", {})
    values["host"] = about.get("host", "")
    values["versions"] = " ".join(f"{name}={version}" for name, version in versions.items())
    return values


def _of_simulation(timings: Mapping[str, Any], skip: int) -> dict[str, Any]:
    """Returns the times of a simulation; a sample is a particle in a step."""
    steps = _later(timings["steps"], skip)
    seconds = statistics.median(steps)
    values = {STEP: seconds, THROUGHPUT: timings["particles"] / seconds}
    if peaks := timings.get("peak_memory_bytes"):
        values[MEMORY] = max(peaks) / 2**20
    for name, each in timings.get("phases", {}).items():
        values[PHASE + name] = statistics.fmean(_later(each, skip))
    return values


def _of_table(folder: Path, skip: int) -> dict[str, Any]:
    """Returns the times and scores of a training, from its metrics.csv."""
    rows = read_rows(folder / "metrics.csv")
    if not rows:
        raise ValueError("it has left no metrics.csv, and no timings.json")
    names = [name for name in rows[0] if name.endswith(SECONDS)]
    times = [sum(float(row[name] or 0) for name in names) for row in rows]
    steps, samples = _gains(rows, "step"), _gains(rows, "samples")
    later = _later(list(zip(rows, steps, times, strict=True)), skip)
    seconds = statistics.median(time / count for _, count, time in later)
    values: dict[str, Any] = {STEP: seconds, THROUGHPUT: samples[-1] / steps[-1] / seconds}
    made = sum(count for _, count, _ in later)
    for name in names:
        total = sum(float(row[name] or 0) for row, _, _ in later)
        values[PHASE + name.removesuffix(SECONDS)] = total / made
    epochs = {row["epoch"]: 0.0 for row in rows if "epoch" in row}
    for row, time in zip(rows, times, strict=True):
        if "epoch" in row:
            epochs[row["epoch"]] += time
    passes = settings_in(folder / "run.toml").get("training.epochs")
    if len(epochs) > 1:  # in the first one TensorFlow compiles
        values[EPOCH] = statistics.median([*epochs.values()][1:])
    elif passes:
        values[EPOCH] = seconds * sum(steps) / passes
    last = [row for row in rows if row["epoch"] == rows[-1]["epoch"]] if epochs else []
    for name in TRAINED:
        scored = [row for row in last or rows[-max(1, len(rows) // 10) :] if row.get(name)]
        if scored:
            values[name] = statistics.fmean(float(row[name]) for row in scored)
    validated = [row for row in rows if row.get(VALIDATED[0])]
    if validated:
        best = min(validated, key=lambda row: float(row[VALIDATED[0]]))
        values |= {name: float(best[name]) for name in VALIDATED if best.get(name)}
    return values


def _gains(rows: list[dict[str, str]], name: str) -> list[int]:
    """Returns by how much a count grows in each row; it may begin at 0 or after the first step."""
    counts = [int(row[name]) for row in rows]
    gains = [after - before for before, after in itertools.pairwise(counts)]
    return [counts[0] or (gains[0] if gains else 1), *gains]


def _later(values: list[Any], skip: int) -> list[Any]:
    """Returns the values without the first ones; the last value at least."""
    return values[min(skip, len(values) - 1) :]
