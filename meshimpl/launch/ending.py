"""The end of a job: by one rank for all, with notes for the process that started the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from meshimpl.launch.command import time_limit
from meshimpl.launch.rank import WITHOUT_RANKS, detect

HOST_LOST = 75
"""Exit status of a job that has lost a rank, a host or its launcher, and may be started again; the
EX_TEMPFAIL of sysexits.h."""

JOB_FOLDER = "MESHIMPL_FAILURE_FOLDER"
"""Environment variable that names the `JobFolder` to the ranks."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals by which a scheduler or a user stops a job."""

_last_words: list[Callable[[], None]] = []


@dataclass(frozen=True)
class JobFolder:
    """Notes that ranks and the process that started them leave each other: why a job ends or stops.

    The folder is on the host that started the job: ranks of other hosts leave no notes.
    """

    path: Path

    @classmethod
    def of_this_rank(cls) -> JobFolder | None:
        """Returns the folder of this rank's job; None if mpirun was not started by `relaunch`."""
        folder = os.environ.get(JOB_FOLDER)
        return cls(Path(folder)) if folder else None

    @property
    def reported(self) -> Path:
        """The file that exists once a rank has reported why the job ends."""
        return self.path / "told"

    def reported_status(self) -> int | None:
        """Returns the exit status that the liveness watch has reported; None if there is none.

        An mpirun that waits in vain for a lost host has to be killed, and has another status.
        """
        return int(_text(self.reported) or 0) or None

    def report_failure(self, rank: int, summary: str) -> None:
        """Notes why a rank failed."""
        with contextlib.suppress(OSError):
            (self.path / f"{rank:06d}").write_text(summary)

    def first_failure(self) -> str | None:
        """Returns the summary of the first rank that failed, which is the cause of later ones."""
        reports = sorted(self.path.glob("[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        return reports[0].read_text() if reports else None

    def announce_stop(self, signal_name: str) -> None:
        """Notes the signal that asked the job to stop."""
        (self.path / "stopped-by").write_text(signal_name)

    def stop_signal(self) -> str | None:
        """Returns the signal that asked the job to stop; None if none has, or on another host."""
        return _text(self.path / "stopped-by") or None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def mark_reported() -> None:
    """Notes that this rank has reported why the job ends, so that nothing else reports it again."""
    if folder := JobFolder.of_this_rank():
        with contextlib.suppress(OSError):
            folder.reported.touch()


def stop_name(received: str) -> str:
    """Returns the name of the signal that asked this job to stop.

    The process that started the job may pass signals on as another one, see `relaunch`.

    Args:
        received: name of the signal that reached this rank.
    """
    folder = JobFolder.of_this_rank()
    return (folder and folder.stop_signal()) or received


def before_abort(call: Callable[[], None]) -> None:
    """Registers a function that `abort` calls first. It must return at once."""
    _last_words.append(call)


def abort(status: int = 1) -> NoReturn:
    """Ends every rank of this job at once, without waiting for any.

    Args:
        status: the job's exit status.
    """
    for call in _last_words:
        call()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it may be closed, with the launcher
            stream.flush()
    if detect().size > 1 and ("horovod" in sys.modules or "mpi4py.MPI" in sys.modules):
        # Should MPI itself hang, the alarm ends this rank, and the launcher then the others.
        signal.alarm(10)
        _abort_mpi(status)
    # Not sys.exit: Horovod's and MPI's exit handlers wait for the other ranks.
    os._exit(status)


def _abort_mpi(status: int) -> None:
    """Calls MPI_Abort if MPI is running, whoever started it; returns otherwise."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)


def abort_on_error() -> None:
    """Makes an uncaught exception of this rank end the whole job within seconds.

    The rank prints the traceback and below it a line such as `[rank 1/4] ValueError: too small`.
    The job's exit status is 1, or 130 after an interrupt. On one rank Python's own handling stays.
    """
    if detect().size == 1:
        return
    sys.excepthook = _end_job

    def end_job_from_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit and args.exc_value is not None:
            _end_job(args.exc_type, args.exc_value, args.exc_traceback)

    threading.excepthook = end_job_from_thread


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        _report(kind, error, trace)
    finally:  # also if nothing can be written
        abort(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    here = detect()
    where = f"[rank {here.rank}/{here.size}]"
    if issubclass(kind, KeyboardInterrupt):
        print(f"{where} interrupted", file=sys.stderr)
        return
    summary = f"{where} {''.join(traceback.format_exception_only(kind, error)).strip()}"
    # One write, so that the ranks' lines do not mix.
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)) + summary + "\n")
    if folder := JobFolder.of_this_rank():
        folder.report_failure(here.rank, summary)


@contextlib.contextmanager
def start_in_time() -> Iterator[None]:
    """Ends the job if the body, which waits for the other ranks to start, takes too long.

    Raises:
        LaunchError: MESHIMPL_START_LIMIT is not a number of seconds.
    """
    here, limit = detect(), time_limit("MESHIMPL_START_LIMIT")

    def end() -> None:
        print(
            f"error: rank {here.rank} of {here.size} on host {socket.gethostname()} has waited "
            f"{limit:g} s for the others to start: one has not come, or the hosts cannot reach "
            "each other, as behind a firewall. MESHIMPL_START_LIMIT sets another limit",
            file=sys.stderr,
            flush=True,
        )
        abort(1)

    timer = threading.Timer(limit, end)
    timer.name, timer.daemon = WITHOUT_RANKS, True
    if limit and here.size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
