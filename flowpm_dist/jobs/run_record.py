"""What is in the folder of a job of any kind: its state, its settings and its main results.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flowpm_dist.jobs.folder import WorkFolder


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


def record_of_work(
    folder: WorkFolder, steps: str = "", results: Mapping[str, Any] | None = None
) -> RunRecord | None:
    """Returns what is in a folder that has a mark; None without one.

    Args:
        folder: the folder.
        steps, results: see `RunRecord`.
    """
    mark = folder.mark()
    if not mark:
        return None
    state = "complete" if mark.get("complete") else "stopped"
    if is_locked(folder.path / ".lock"):
        state = "running"
    when = changed(folder.path / folder.contents[0])
    settings = settings_in(folder.run_file)
    return RunRecord(folder.path, folder.kind, state, steps, when, results or {}, settings)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of a job, by the path of the lock's file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_json(path: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file; an empty one if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def settings_in(path: Path) -> dict[str, Any]:
    """Returns the values of a run file by "section.key"; none if it cannot be read."""
    try:
        return flat(tomllib.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a run file's tables by "section.key"."""
    return {
        f"{section}.{key}": value
        for section, keys in table.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    }


def changed(path: Path) -> datetime:
    """Returns the time of a file's last change."""
    return datetime.fromtimestamp(path.stat().st_mtime)
