"""The folder of a reconstruction: what is in it, and whether one may begin or go on there."""

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

MARK = "reconstruction.json"
FIELDS = "reconstruction.zarr"
FIGURES = ("slabs.png", "correlation.png", "power_spectrum.png", "loss.png")
CONTENTS = (
    MARK, "run.toml", "iterations.csv", "checkpoints", FIELDS, "metrics.csv", "result.json",
    *FIGURES,
)  # fmt: skip


class ReconstructionFolder:
    """A folder that one reconstruction owns.

    Args:
        path: of the folder; made when the reconstruction begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def run_file(self) -> Path:
        """The run as it was resolved."""
        return self.path / "run.toml"

    @property
    def iterations(self) -> Path:
        """A row for each iteration."""
        return self.path / "iterations.csv"

    @property
    def checkpoints(self) -> Path:
        """Of the search."""
        return self.path / "checkpoints"

    @property
    def fields(self) -> Path:
        """The universe that was found; moved here last."""
        return self.path / FIELDS

    def mark(self) -> dict[str, object]:
        """What the reconstruction says of itself; empty where there is none."""
        try:
            mark = json.loads((self.path / MARK).read_text())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) and mark.get("generator") == GENERATOR else {}

    def last_iteration(self) -> int | None:
        """Of the latest checkpoint; None where there is none."""
        there = sorted(self.checkpoints.glob("iteration-*.zarr"))
        return int(there[-1].stem.rpartition("-")[2]) if there else None

    def check(self, *, resume: bool, overwrite: bool, needed: int) -> None:
        """See, changing nothing, that a reconstruction can begin or go on here.

        Args:
            resume: it shall go on.
            overwrite: another one here may be replaced.
            needed: estimated size of what will be written [bytes].

        Raises:
            OutputError: with what is in the way, and what to do about it.
        """
        check_ground(self.path)
        if resume and not self.mark():
            raise OutputError(
                f"{self.path} holds no reconstruction to resume: leave --resume out, or give its "
                "--output"
            )
        if not resume:
            self._check_contents(overwrite)
        check_room(self.path, needed, "the reconstruction needs about")

    def _check_contents(self, overwrite: bool) -> None:
        if not self.mark():
            check_foreign(self.path, CONTENTS)
        elif not overwrite:
            raise OutputError(
                f"{self.path} holds a reconstruction: add --resume to go on with it, --overwrite "
                "to replace it, or give another --output"
            )

    def begin(self, *, resume: bool, overwrite: bool = False) -> None:
        """Own the folder, cleared of an older reconstruction unless that is resumed. On rank 0.

        Args:
            resume, overwrite: as for `check`.

        Raises:
            OutputError: another reconstruction is writing here or has been written since it was
                looked at, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            busy = f"another reconstruction is writing in {self.path}"
            self._lock = take_lock(self.path / ".lock", busy)
            if not resume:
                self._check_contents(overwrite)
                for name in reversed(CONTENTS):  # the mark last: what is left stays ours
                    _remove(self.path / name)
            self.write_mark(complete=False)
        except OSError as error:
            where = error.filename or self.path
            raise OutputError(f"cannot write in {where}: {error.strerror or error}") from error

    def write_mark(self, *, complete: bool, **more: object) -> None:
        """Say whether the reconstruction is complete, and what else is known. On rank 0."""
        mark = {"generator": GENERATOR, "complete": complete, **more}
        write_text(self.path / MARK, json.dumps(mark, indent=1) + "\n")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
