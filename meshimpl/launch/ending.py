"""The end of a whole job by one rank: on request, or when an exception is not caught."""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from meshimpl.launch.environment import detect
from meshimpl.launch.job_folder import JobFolder

HOST_LOST = 75
"""Exit status of a job that has lost a rank, a host or its launcher, and may be started again; the
EX_TEMPFAIL of sysexits.h."""

_last_words: list[Callable[[], None]] = []


def before_abort(call: Callable[[], None]) -> None:
    """Lets `abort` call something first, which must return at once."""
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
