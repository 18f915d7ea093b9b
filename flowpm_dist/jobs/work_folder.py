"""The folder of long work that can be resumed: what is in it, and whether work may go on there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import IO, ClassVar

from flowpm_dist.io.files import GENERATOR, write_text
from flowpm_dist.jobs.folder import OutputError, check_foreign, check_ground, check_room, take_lock


class WorkFolder:
    """A folder that one piece of work owns.

    Args:
        path: of the folder; made when the work begins.
    """

    kind: ClassVar[str]
    """What the work is called."""
    contents: ClassVar[tuple[str, ...]]
    """Names of what it writes; the first is the file that marks the folder as its own."""
    kept: ClassVar[tuple[str, ...]] = ()
    """What the mark of work that is resumed keeps saying."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def run_file(self) -> Path:
        """The run as it was resolved."""
        return self.path / "run.toml"

    @property
    def checkpoints(self) -> Path:
        """A folder of them."""
        return self.path / "checkpoints"

    def mark(self) -> dict[str, object]:
        """What the work says of itself; empty where there is none."""
        try:
            mark = json.loads((self.path / self.contents[0]).read_text())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) and mark.get("generator") == GENERATOR else {}

    def check(self, *, resume: bool, overwrite: bool, needed: int) -> None:
        """See, changing nothing, that work can begin or go on here.

        Args:
            resume: it shall go on.
            overwrite: other work of its kind here may be replaced.
            needed: estimated size of what will be written [bytes].

        Raises:
            OutputError: with what is in the way, and what to do about it.
        """
        check_ground(self.path)
        if resume and not self.mark():
            raise OutputError(
                f"{self.path} holds no {self.kind} to resume: leave --resume out, or give its "
                "--output"
            )
        if not resume:
            self._check_contents(overwrite)
        check_room(self.path, needed, f"the {self.kind} needs about")

    def _check_contents(self, overwrite: bool) -> None:
        if not self.mark():
            check_foreign(self.path, self.contents)
        elif not overwrite:
            raise OutputError(
                f"{self.path} holds a {self.kind}: add --resume to go on with it, --overwrite to "
                "replace it, or give another --output"
            )

    def begin(self, *, resume: bool, overwrite: bool = False) -> None:
        """Own the folder, cleared of older work unless that is resumed. On rank 0.

        Args:
            resume, overwrite: as for `check`.

        Raises:
            OutputError: another process is writing here or has written since it was looked at, or
                the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            busy = f"another {self.kind} is writing in {self.path}"
            self._lock = take_lock(self.path / ".lock", busy)
            if not resume:
                self._check_contents(overwrite)
                for name in reversed(self.contents):  # the mark last: what is left stays ours
                    _remove(self.path / name)
            mark = self.mark()
            self.write_mark(
                complete=False, **{name: mark[name] for name in self.kept if name in mark}
            )
        except OSError as error:
            where = error.filename or self.path
            raise OutputError(f"cannot write in {where}: {error.strerror or error}") from error

    def write_mark(self, *, complete: bool, **more: object) -> None:
        """Say of the work whether it is complete, and what else is known. On rank 0."""
        mark = {"generator": GENERATOR, "complete": complete, **more}
        write_text(self.path / self.contents[0], json.dumps(mark, indent=1) + "\n")

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
