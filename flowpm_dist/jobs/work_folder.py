"""The output folder of a job that can be stopped and resumed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import ClassVar

from flowpm_dist.io.files import GENERATOR, write_text
from flowpm_dist.jobs.folder import JobFolder


class WorkFolder(JobFolder):
    """A folder that one resumable job owns.

    The first of its `contents` is the mark: a file that says that the folder is the job's own, and
    whether the job is complete.

    Args:
        path: of the folder; it is made when the job begins.
    """

    kept: ClassVar[tuple[str, ...]] = ()
    """Keys of the mark that a resumed job keeps."""
    alone = True

    @property
    def run_file(self) -> Path:
        """Path of the resolved run file."""
        return self.path / "run.toml"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def is_complete(self) -> bool:
        """Whether the mark says so."""
        return bool(self.mark().get("complete"))

    def can_resume(self) -> bool:
        """See `JobFolder.can_resume`."""
        return bool(self.mark())

    def older_work(self) -> str | None:
        """Returns the kind of the job that owns the folder; None if there is none."""
        return f"a {self.kind}" if self.mark() else None

    def mark(self) -> dict[str, object]:
        """Returns what the mark says; an empty dictionary if there is none."""
        try:
            mark = json.loads((self.path / self.contents[0]).read_text())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) and mark.get("generator") == GENERATOR else {}

    def begin(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """See `JobFolder.begin`."""
        with self._being_prepared():
            self._lock = self._locked(self.path / ".lock")
            if not resume:
                self.check_contents(overwrite=overwrite)
                # The mark goes last: should this be interrupted, the rest is known to be ours.
                for name in reversed(self.contents):
                    _remove(self.path / name)
            mark = self.mark()
            self.write_mark(
                complete=False, **{name: mark[name] for name in self.kept if name in mark}
            )

    def write_mark(self, *, complete: bool, **more: object) -> None:
        """Write the mark: whether the job is complete, and what else is known. On rank 0."""
        mark = {"generator": GENERATOR, "complete": complete, **more}
        write_text(self.path / self.contents[0], json.dumps(mark, indent=1) + "\n")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
