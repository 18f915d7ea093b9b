"""The storage of a tuning's trials: optuna's journal or database, on a disk that may be full."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from flowpm_dist.io.files import UnreadableError, WriteError

DATABASE = "study.db"
LOCK_SECONDS = 60.0
"""Time for which a database waits for another worker [s]."""


class JournalLock(JournalFileOpenLock):
    """The lock of a journal. Who takes it removes a last line that was not written to its end.

    A full disk leaves such a line, and the next one would be appended to it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        """Take the lock, and remove a last line that was not written to its end."""
        super().acquire()
        try:
            self._cut()
        except BaseException:
            self.release()
            raise
        return True

    def _cut(self) -> None:
        with self._path.open("rb+") as file:
            if not file.seek(0, os.SEEK_END):
                return
            file.seek(-1, os.SEEK_END)
            if file.read() == b"\n":
                return
            file.seek(0)
            rest = file.read().rpartition(b"\n")[2]
            file.truncate(file.tell() - len(rest))
        warnings.warn(
            f"{self._path}: removed a last line that was not written to its end", stacklevel=2
        )


class Journal(JournalFileBackend):
    """A journal whose errors name the file and the line."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), JournalLock(path))
        self._path = path

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yields the entries of the journal, from a number on.

        Raises:
            UnreadableError: a line is damaged.
        """
        line = log_number_from + 1
        try:
            for entry in super().read_logs(log_number_from):
                yield entry
                line += 1
        except ValueError as error:
            raise UnreadableError(
                f"{self._path}, line {line} is damaged ({error}): put a whole copy of the file in "
                "its place, or begin anew with --overwrite"
            ) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries to the journal.

        Raises:
            WriteError: the file cannot be written.
        """
        try:
            super().append_logs(logs)
        except OSError as error:
            raise WriteError.of(self._path, error) from error


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """A context in which errors of a database become errors that name its folder.

    Raises:
        WriteError: the disk is full, the database is locked for too long, or it is damaged.
    """
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        cause: Any = error.__cause__ or error
        raise WriteError.of(folder / DATABASE, getattr(cause, "orig", cause)) from error


def storage_in(folder: Path, kind: str) -> optuna.storages.BaseStorage:
    """Returns the storage of a tuning's trials, which is made if it is missing.

    Args:
        folder: its folder, which exists.
        kind: "journal" for a file that workers on several hosts share, or "sqlite".
    """
    if kind == "journal":
        return optuna.storages.JournalStorage(Journal(folder / "journal.log"))
    url = URL.create("sqlite", database=str(folder.absolute() / DATABASE))
    return optuna.storages.RDBStorage(
        url.render_as_string(), engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}}
    )
