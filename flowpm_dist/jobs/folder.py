"""The output folder: results are written aside and moved into place when all are complete.

Everything is written into `DIR/.partial-flowpm-dist`. `snapshot.zarr` is moved into `DIR` last, and
it alone makes a finished run: whatever interrupts the work, nothing half-written looks whole.
The files of an older run stay until that moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, SNAPSHOT, WriteError, human_size, snapshot_attributes

FILES = ("power_spectrum.csv", "density.png", "power_spectrum.png", "run.toml", "timings.json")
PARTIAL = ".partial-flowpm-dist"


class OutputError(UserError):
    """A folder that results cannot go to; found before any work."""


def existing_part(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    while not (path.exists() or path.is_symlink()):
        path = path.parent
    return path


def check_ground(path: Path) -> None:
    """See, changing nothing, that a folder is there to write in, or can be made.

    Raises:
        OutputError: it is no folder, or is not ours to write in.
    """
    ground = existing_part(path)
    if not ground.is_dir():
        raise OutputError(f"{ground} is not a folder: give another --output")
    if not os.access(ground, os.W_OK | os.X_OK):
        raise OutputError(f"no permission to write in {ground}: give another --output")


def check_room(path: Path, needed: int, what: str) -> None:
    """See that a folder, there or to be made, has room.

    Args:
        path: of the folder.
        needed: size of what will be written [bytes].
        what: needs it, with its verb, such as "the results need about".

    Raises:
        OutputError: there is less.
    """
    ground = existing_part(path)
    free = shutil.disk_usage(ground).free
    if needed > free:
        raise OutputError(
            f"{ground} has {human_size(free)} free, {what} {human_size(needed)}: make room, or "
            "give another --output"
        )


def check_foreign(path: Path, names: Iterable[str]) -> None:
    """See that a folder that is not ours has no files of the names that are to be written.

    Raises:
        OutputError: with those that it has.
    """
    there = [name for name in names if os.path.lexists(path / name)]
    if there:
        raise OutputError(
            f"{path} holds {', '.join(there)} from elsewhere, which would be overwritten: give "
            "another --output, or move them away"
        )


def take_lock(path: Path, busy: str, **owner: object) -> IO[str]:
    """The mark of a process that writes; the system lifts it when the process ends, however.

    Args:
        path: of the file that is locked, and says whose lock it is; its folder exists.
        busy: what to say when another process has it.
        owner: what the file tells besides host and process.

    Returns:
        The file; closing it gives the lock up.

    Raises:
        OutputError: another process has it.
        OSError: the file cannot be opened or written.
    """
    lock = open(path, "a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise OutputError(f"{busy}: {holder}") from None
    lock.truncate(0)
    json.dump({**owner, "host": socket.gethostname(), "pid": os.getpid()}, lock)
    lock.flush()
    return lock


class OutputFolder:
    """A folder for the results of one run.

    Args:
        path: the folder; made when it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path / PARTIAL
        self._lock: IO[str] | None = None

    def is_finished(self) -> bool:
        """Whether the folder holds a whole run."""
        return bool((snapshot_attributes(self.path / SNAPSHOT) or {}).get("complete"))

    def check(self, *, overwrite: bool, needed: int) -> None:
        """See, changing nothing, that results can go here. Any rank may ask.

        Args:
            overwrite: whether a finished run may be replaced.
            needed: estimated size of the results [bytes].

        Raises:
            OutputError: with what is in the way, and what to do about it.
        """
        check_ground(self.path)
        self._check_contents(overwrite=overwrite)
        check_room(self.path, needed, "the results need about")

    def _check_contents(self, *, overwrite: bool) -> None:
        if self.is_finished():
            if not overwrite:
                raise OutputError(
                    f"{self.path} holds a finished run: add --overwrite to replace it, "
                    "or give another --output"
                )
            return
        if not self.partial.is_dir():
            check_foreign(self.path, (*FILES, SNAPSHOT))

    def begin(self, *, overwrite: bool) -> None:
        """Clear what an interrupted run has left, and make the folder to write into. On rank 0.

        Raises:
            OutputError: another run is writing here, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._clear_partial()
            self._check_contents(overwrite=overwrite)
            self.partial.mkdir()
            self._lock = self._take_lock()
        except OSError as error:
            where = error.filename or self.path
            raise OutputError(f"cannot write in {where}: {error.strerror or error}") from error

    def _take_lock(self) -> IO[str]:
        busy = f"another run is writing in {self.path}"
        return take_lock(self.partial / "owner.json", busy, generator=GENERATOR)

    def _clear_partial(self) -> None:
        if not os.path.lexists(self.partial):
            return
        owned = (self.partial / "owner.json").is_file()
        if self.partial.is_symlink() or not (owned or not any(self.partial.iterdir())):
            raise OutputError(f"{self.partial} is not of an interrupted run: move it away")
        with self._take_lock():
            if (self.partial / "publishing").exists():
                self.publish()
            else:
                shutil.rmtree(self.partial)

    def publish(self) -> None:
        """Move the results, all complete, into place. On rank 0; a second call takes up a first.

        Not to be interrupted; should it fail, old and new results stay in the partial folder, and
        the next run that begins here takes it up.

        Raises:
            WriteError: a file cannot be moved.
        """
        with _uninterrupted():
            self._publish()

    def _publish(self) -> None:
        new, old = self.partial / SNAPSHOT, self.path / SNAPSHOT
        try:
            (self.partial / "publishing").touch()
            if new.exists() and old.exists():
                old.rename(self.partial / "replaced.zarr")
            for name in FILES:
                if (self.partial / name).exists():
                    (self.partial / name).replace(self.path / name)
            if new.exists():
                new.rename(old)
            shutil.rmtree(self.partial)
        except OSError as error:
            raise WriteError.of(Path(error.filename or self.path), error) from error
        self._unlock()

    def discard(self) -> None:
        """Remove what was written so far, on the rank that began; nothing on the others."""
        if self._lock is not None:
            self.remove_partial()

    def remove_partial(self) -> None:
        """Remove what was written so far. Only while a rank of this job has begun.

        Results whose publication was cut short are complete, and stay.
        """
        if not (self.partial / "publishing").exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM, where signals can be handled: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
