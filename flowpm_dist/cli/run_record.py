"""What is in the folder of a run of any kind: its state, its settings and its main results.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import csv
import fcntl
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flowpm_dist.cosmoflow.planning.folder import FRESH, TrainingFolder
from flowpm_dist.cosmoflow.training.dataset import UNFINISHED
from flowpm_dist.cosmoflow.volumes.record_files import DATASET, RecordError, read_header
from flowpm_dist.jobs.output_folder import OutputFolder
from flowpm_dist.jobs.tables import read_rows
from flowpm_dist.jobs.work_folder import WorkFolder
from flowpm_dist.reconstruction.folder import ReconstructionFolder

NEAR = 0.1
"""Wave number at which a simulation's power is told [h/Mpc]."""

NEAR_ELL = 300
"""Multipole at which the power of its convergence is told."""


@dataclass(frozen=True)
class RunRecord:
    """The folder of a run.

    Attributes:
        folder: its path.
        kind: "simulation", "training", "reconstruction" or "dataset".
        state: "complete", "running" or "stopped".
        steps: what was done, such as "8/24 steps"; empty where it is not known.
        when: the time of its last change.
        results: the main numbers by name.
        settings: the values of its resolved run file by "section.key".
    """

    folder: Path
    kind: str
    state: str
    steps: str
    when: datetime
    results: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_record(folder: Path) -> RunRecord | None:
    """Returns what is in the folder of a run; None if it is none."""
    for read in (_simulation, _training, _reconstruction, _dataset):
        if (found := read(folder)) is not None:
            return found
    return None


def records_in(folder: Path) -> list[RunRecord]:
    """Returns a run, or those in the folders of a folder, by their names."""
    if (record := read_record(folder)) is not None:
        return [record]
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [record for path in inside if (record := read_record(path)) is not None]


def _simulation(path: Path) -> RunRecord | None:
    folder = OutputFolder(path)
    if not folder.is_complete:
        if not folder.owner.is_file():
            return None
        state = "running" if _is_locked(folder.owner) else "stopped"
        settings, last = _settings(folder.run_file), folder.last_step()
        edges, steps = settings.get("evolution.edges"), settings.get("evolution.steps")
        of = steps if edges is None else len(edges) - 1
        done = "" if last is None else f"{last}/{of} steps"
        return RunRecord(path, "simulation", state, done, _when(folder.owner), {}, settings)
    timings = _json(path / "timings.json")
    steps = timings.get("steps", [])
    results = {
        "seconds": sum(steps),
        **_power(path / "power_spectrum.csv"),
        **_lensing(path / "convergence_power.csv"),
    }
    return RunRecord(
        path,
        "simulation",
        "complete",
        f"{len(steps)}/{len(steps)} steps",
        _when(path / "timings.json"),
        results,
        _settings(path / "run.toml"),
    )


def _training(path: Path) -> RunRecord | None:
    folder = TrainingFolder(path)
    mark = folder.mark()
    if not mark:
        return None
    results: dict[str, Any] = {}
    rows = read_rows(folder.metrics)
    for name in ("loss", "validation_loss"):
        values = [float(row[name]) for row in rows if row.get(name)]
        if values:
            results[name.replace("_", " ")] = values[-1]
    fresh = sorted((folder.path / FRESH).glob("*/evaluation"))
    folders = [*fresh, *map(folder.evaluation, ("test", "validation"))]
    scores = next(filter(None, (_json(each / "scores.json") for each in folders)), {})
    for name, score in scores.get("scores", {}).get(scores.get("main"), {}).items():
        results[f"RMSE of {name} / mean's"] = score["rmse_over_mean"]
    steps = f"{mark['step']}/{mark['steps']} steps" if {"step", "steps"} <= set(mark) else ""
    return _of_work(folder, mark, steps or _begun(len(rows), "steps"), results)


def _reconstruction(path: Path) -> RunRecord | None:
    folder = ReconstructionFolder(path)
    mark = folder.mark()
    if not mark:
        return None
    facts = _json(folder.result)
    results: dict[str, Any] = {}
    if "data_per_observed_cell" in facts:
        results["data in each cell"] = facts["data_per_observed_cell"]
    for name, found in facts.get("parameters", {}).items():
        results[name] = found["value"]
    for row in facts.get("correlations", ()):
        results[f"r at {row['k [h/Mpc]']:.2f} h/Mpc"] = row["r initial field"]
    sampled = facts.get("sampling", {})
    for name, found in sampled.get("parameters", {}).items():
        results[f"{name} of the draws"] = found["mean"]
    rows = read_rows(folder.iterations)
    return _of_work(folder, mark, _begun(len(rows), "iterations"), results)


def _of_work(
    folder: WorkFolder, mark: Mapping[str, Any], steps: str, results: Mapping[str, Any]
) -> RunRecord:
    state = "complete" if mark.get("complete") else "stopped"
    if _is_locked(folder.path / ".lock"):
        state = "running"
    when = _when(folder.path / folder.contents[0])
    return RunRecord(
        folder.path, folder.kind, state, steps, when, results, _settings(folder.run_file)
    )


def _dataset(path: Path) -> RunRecord | None:
    try:
        header, splits = read_header(path)
    except RecordError:
        if not (path / UNFINISHED).exists():
            return None
        return RunRecord(path, "dataset", "stopped", "", _when(path / UNFINISHED))
    results = {f"samples of {name}": count["samples"] for name, count in splits.items()}
    state = "stopped" if (path / UNFINISHED).exists() else "complete"
    settings = _flat(tomllib.loads(header.attributes.get("run", "")))
    return RunRecord(path, "dataset", state, "", _when(path / DATASET), results, settings)


def _begun(count: int, what: str) -> str:
    return f"{count} {what}" if count else ""


def _power(path: Path) -> dict[str, float]:
    """Returns the power nearest to `NEAR` over that of linear theory, by its name."""
    try:
        with path.open(newline="") as file:
            rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
        k, power, _, linear = min(rows, key=lambda row: abs(row[0] - NEAR))[:4]
    except (OSError, ValueError):
        return {}
    return {f"P/linear at {k:.2f} h/Mpc": power / linear}


def _lensing(path: Path) -> dict[str, float]:
    """Returns C_l of the last sources nearest to `NEAR_ELL` over that of halofit, by its name."""
    try:
        with path.open(newline="") as file:
            rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
        last = max(row[0] for row in rows)
        autos = [row for row in rows if row[0] == row[1] == last]
        nearest = min(autos, key=lambda row: abs(row[2] - NEAR_ELL))
        ell, power, halofit = nearest[2], nearest[3], nearest[6]
    except (OSError, ValueError, IndexError):
        return {}
    return {f"C_l/halofit at l = {ell:.0f}": power / halofit}


def _is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of a job."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _settings(path: Path) -> dict[str, Any]:
    try:
        return _flat(tomllib.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, keys in table.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    }


def _when(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime)
