"""The jobs there are. A line here adds one: its command, `submit`, `runs` and `flowpm_dist.run`.

Their modules are imported when they are asked for, so that a job imports no other's packages.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.run_record import RunRecord

JOBS = {
    "simulate": "flowpm_dist.simulate.job:SimulationJob",
    "reconstruct": "flowpm_dist.reconstruction.work:ReconstructionJob",
    "train": "flowpm_dist.cosmoflow.training.job:TrainingJob",
}
"""Command -> module and name of its class."""

OTHER_RECORDS = ("flowpm_dist.cosmoflow.training.dataset:record",)
"""What reads the folders of other commands, likewise."""


def job_class(command: str) -> type[Job[Any, Any]]:
    """Returns the class of a command's jobs."""
    found: type[Job[Any, Any]] = _object(JOBS[command])
    return found


def command_of(sections: set[str]) -> str:
    """Returns the command whose run files have these sections, or the most of them."""
    return max(JOBS, key=lambda name: len(sections & {*job_class(name).options_type.model_fields}))


def read_record(folder: Path) -> RunRecord | None:
    """Returns what is in the folder of a job; None if it is none."""
    readers = [*(job_class(name).record for name in JOBS), *map(_object, OTHER_RECORDS)]
    return next((found for read in readers if (found := read(folder)) is not None), None)


def records_in(folder: Path) -> list[RunRecord]:
    """Returns what is in the folder of a job, or in the folders inside a folder, by name."""
    if (record := read_record(folder)) is not None:
        return [record]
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [record for path in inside if (record := read_record(path)) is not None]


def _object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
