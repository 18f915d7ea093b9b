"""The folder through which the ranks of a job and the process that started it exchange notes."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MESHIMPL_FAILURE_FOLDER"
"""Environment variable that names the folder to the ranks."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals by which a scheduler or a user stops a job."""


@dataclass(frozen=True)
class JobFolder:
    """Notes of one job: which rank failed and why, and which signal asked the job to stop.

    The folder is on the host that started the job: ranks of other hosts leave no notes.
    """

    path: Path

    @classmethod
    def of_this_rank(cls) -> JobFolder | None:
        """Returns the folder of this rank's job; None if mpirun was not started by `relaunch`."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder else None

    def report_failure(self, rank: int, summary: str) -> None:
        """Notes why a rank failed."""
        with contextlib.suppress(OSError):
            (self.path / f"{rank:06d}").write_text(summary)

    def first_failure(self) -> str | None:
        """Returns the summary of the first rank that failed, which is the cause of later ones."""
        reports = sorted(self.path.glob("[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        return reports[0].read_text() if reports else None

    @property
    def told(self) -> Path:
        """The file that is there once a rank has told why the job ends."""
        return self.path / "told"

    def told_status(self) -> int | None:
        """Returns the exit status that the watch has told; None if it has told none.

        An mpirun that waits in vain for a lost host has to be killed, and has another.
        """
        try:
            return int(self.told.read_text() or 0) or None
        except OSError:
            return None

    @property
    def _stop(self) -> Path:
        return self.path / "stopped-by"

    def announce_stop(self, signal_name: str) -> None:
        """Notes the signal that asked the job to stop."""
        self._stop.write_text(signal_name)

    def stop_signal(self) -> str | None:
        """Returns the signal that asked the job to stop; None if none has, or on another host."""
        try:
            return self._stop.read_text()
        except OSError:
            return None


def end_was_told() -> None:
    """Notes that this rank has told the user why the job ends: nobody need say it again."""
    if folder := JobFolder.of_this_rank():
        with contextlib.suppress(OSError):
            folder.told.touch()


def stop_name(received: str) -> str:
    """Returns the name of the signal that asked this job to stop.

    The process that started the job may pass signals on as another one, see `relaunch`.

    Args:
        received: name of the signal that reached this rank.
    """
    folder = JobFolder.of_this_rank()
    return (folder and folder.stop_signal()) or received
