"""Locks of jobs and of pieces of work, between processes on all hosts that see their files.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from flowpm_dist.io.files import no_link, read_json

TRIES, PAUSE_SECONDS = 10, 0.02
"""How often the lock of a job is tried: `is_locked` takes it for an instant, too."""


class Lock:
    """A lock on a file, which the system lifts when this process ends, however it ends.

    It is a context, which gives the lock up at its end.

    Args:
        path: path of the file; it is made, with its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def take(self, tries: int = 1, *, together: bool = False) -> bool:
        """Returns whether this process has the lock now; another one may keep it.

        Args:
            tries: how often it is tried, `PAUSE_SECONDS` apart.
            together: whether others may hold the lock as well, if they take it in this way. Who has
                the lock alone may take it again to let them.

        Raises:
            OSError: the file cannot be opened, is a symbolic link, or cannot be locked.
        """
        kind = fcntl.LOCK_SH if together else fcntl.LOCK_EX
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._file or open(self.path, "a+", encoding="utf-8", opener=no_link)
        for number in range(tries):
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(PAUSE_SECONDS if number < tries - 1 else 0.0)
            except OSError:
                self.give_up()
                raise
        self.give_up()
        return False

    def sign(self, **more: object) -> None:
        """Writes to the file which process holds the lock, and the entries `more`."""
        assert self._file is not None
        self._file.truncate(0)
        json.dump({**more, "host": socket.gethostname(), "pid": os.getpid()}, self._file)
        self._file.flush()

    @property
    def holder(self) -> str:
        """The process that has signed the file."""
        about = read_json(self.path)
        if not {"pid", "host"} <= {*about}:
            return "a process that has not said which"
        return f"process {about['pid']} on host {about['host']}"

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptor of the lock, if this process has it."""
        return () if self._file is None else (self._file.fileno(),)

    @property
    def is_lost(self) -> bool:
        """Whether this process has the lock, but the file was removed or replaced since."""
        if self._file is None:
            return False
        with suppress(OSError):
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        return True

    def give_up(self) -> None:
        """Lets another process take the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_up()


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock on a file."""
    try:
        # Some file systems let only a writer take the lock that excludes all others.
        with open(path, "r+" if os.access(path, os.W_OK) else "r", opener=no_link) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
