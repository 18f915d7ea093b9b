"""The folder of a training: what is in it, and whether a training may begin or go on there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import IO

from flowpm_dist.io.folder import (
    GENERATOR,
    OutputError,
    check_foreign,
    check_ground,
    check_room,
    take_lock,
    write_text,
)

MARK = "training.json"
CONTENTS = (
    MARK, "run.toml", "metrics.csv", "phases.json", "checkpoints", "tensorboard", "held-out",
    "statistics", "evaluation", "training.png", "phases.png",
)  # fmt: skip


class TrainedError(ValueError):
    """A folder without a network that can be asked, or trainings that cannot be compared."""


class TrainingFolder:
    """A folder that one training owns.

    Args:
        path: of the folder; made when the training begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def run_file(self) -> Path:
        """The run as it was resolved."""
        return self.path / "run.toml"

    @property
    def metrics(self) -> Path:
        """A row for each step."""
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        """Of weights and optimiser."""
        return self.path / "checkpoints"

    @property
    def held_out(self) -> Path:
        """The dataset of the splits "validation" and "test"."""
        return self.path / "held-out"

    @property
    def evaluation(self) -> Path:
        """What `flowpm-dist evaluate` leaves."""
        return self.path / "evaluation"

    def statistics(self, stream: str) -> Path:
        """What baselines see of the simulations of a stream."""
        return self.path / "statistics" / f"{stream}.npz"

    def mark(self) -> dict[str, object]:
        """What the training says of itself; empty where there is none."""
        try:
            mark = json.loads((self.path / MARK).read_text())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) and mark.get("generator") == GENERATOR else {}

    def check(self, *, resume: bool, overwrite: bool, needed: int) -> None:
        """See, changing nothing, that a training can begin or go on here.

        Args:
            resume: it shall go on.
            overwrite: another training here may be replaced.
            needed: estimated size of what will be written [bytes].

        Raises:
            OutputError: with what is in the way, and what to do about it.
        """
        check_ground(self.path)
        if resume and not self.mark():
            raise OutputError(
                f"{self.path} holds no training to resume: leave --resume out, or give its --output"
            )
        if not resume:
            self._check_contents(overwrite)
        check_room(self.path, needed, "the training needs about")

    def _check_contents(self, overwrite: bool) -> None:
        if not self.mark():
            check_foreign(self.path, CONTENTS)
        elif not overwrite:
            raise OutputError(
                f"{self.path} holds a training: add --resume to go on with it, --overwrite to "
                "replace it, or give another --output"
            )

    def begin(self, *, resume: bool, overwrite: bool = False) -> None:
        """Own the folder, cleared of an older training unless that is resumed. On rank 0.

        Args:
            resume, overwrite: as for `check`.

        Raises:
            OutputError: another training is writing here or has been written since it was looked
                at, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            busy = f"another training is writing in {self.path}"
            self._lock = take_lock(self.path / ".lock", busy)
            if not resume:
                self._check_contents(overwrite)
                for name in reversed(CONTENTS):  # the mark last: what is left stays ours
                    _remove(self.path / name)
            step = {"step": self.mark()["step"]} if "step" in self.mark() else {}
            self.write_mark(complete=False, **step)
        except OSError as error:
            where = error.filename or self.path
            raise OutputError(f"cannot write in {where}: {error.strerror or error}") from error

    def write_mark(self, *, complete: bool, **more: object) -> None:
        """Say of the training whether it is complete, and what else is known. On rank 0."""
        mark = {"generator": GENERATOR, "complete": complete, **more}
        write_text(self.path / MARK, json.dumps(mark, indent=1) + "\n")

    def release(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
