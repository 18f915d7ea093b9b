"""The limits of a job, and its end: by one rank for all, with notes for who started it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from meshimpl.launch.gpus import gpus_in_sight, horovod_has_nccl
from meshimpl.launch.rank import HUGE_PAGES, WITHOUT_RANKS, LaunchError, detect

HOST_LOST = 75
"""Exit status of a job that has lost a rank, a host or its launcher, and may be started again; the
EX_TEMPFAIL of sysexits.h."""

JOB_FOLDER = "MESHIMPL_FAILURE_FOLDER"
"""Environment variable that names the `JobFolder` to the ranks."""

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGINT,
    *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []),
)
"""Signals by which a scheduler or a user stops a job, or a terminal that closes, unless the job was
started by `nohup`."""

ENVIRONMENT_DEFAULTS = {
    **HUGE_PAGES,
    # A collective waits up to one cycle before it starts; Horovod's own value is 1 ms.
    "HOROVOD_CYCLE_TIME": "0.5",
    # More collectives than this in a step are negotiated anew each time.
    "HOROVOD_CACHE_CAPACITY": "4096",
    # Seconds after which a job ends if a rank gives no sign of life, or all ranks wait in vain.
    "MESHIMPL_STALL_LIMIT": "300",
    # Seconds after which a job ends if a rank of another host gives no sign of life.
    "MESHIMPL_SILENCE_LIMIT": "30",
    # Seconds in which all ranks must start. Many ranks that load their programs from one file
    # system may take minutes.
    "MESHIMPL_START_LIMIT": "600",
    # Horovod knows only that a rank has not come to a collective, not whether it is alive. It
    # warns, and ends the job as a last resort.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3600",
    # Open MPI polls while it waits, in Horovod's thread, next to the thread that computes: let it
    # give up its core. Without this two ranks on two cores are slower than one.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
GPU_DEFAULTS = {
    # A cycle that is short takes time of a core, which GPUs leave idle.
    "HOROVOD_CYCLE_TIME": "0.1",
    # TensorFlow continues when NCCL's work is queued, and its stream waits for NCCL's.
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "1",
    # Kernels that are loaded late may wait for NCCL's, which wait for other ranks.
    "CUDA_MODULE_LOADING": "EAGER",
}
"""What ranks with GPUs have in addition, or instead, if Horovod carries their messages by NCCL."""
ZERO = {
    "MESHIMPL_STALL_LIMIT": "ranks do not watch each other",
    "MESHIMPL_SILENCE_LIMIT": "the same as MESHIMPL_STALL_LIMIT",
    "MESHIMPL_START_LIMIT": "no limit",
}

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

    def first_failure(self) -> str | None:
        """Returns the summary of the first rank that failed, which is the cause of later ones."""
        reports = sorted(self.path.glob("[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        return reports[0].read_text() if reports else None

    def announce_stop(self, signal_name: str) -> None:
        """Notes the signal that asked the job to stop."""
        (self.path / "stopped-by").write_text(signal_name)


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
    return (_text(folder.path / "stopped-by") if folder else "") or received


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


def leave_terminal(number: int) -> None:
    """After SIGHUP, sends what is still written to the terminal, which has closed, to nowhere."""
    if number != signal.SIGHUP:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)


def abort_on_error() -> None:
    """Makes an uncaught exception of this rank end the whole job within seconds.

    The rank prints the traceback, then a line such as `[rank 1/4] ValueError: too small`.
    The job's exit status is 1, or 130 after an interrupt.
    """
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
        with contextlib.suppress(OSError):
            (folder.path / f"{here.rank:06d}").write_text(summary)


def environment_defaults() -> dict[str, str]:
    """Returns the variables of a job of several ranks here: ENVIRONMENT_DEFAULTS, GPU_DEFAULTS."""
    by_nccl = gpus_in_sight() > 0 and horovod_has_nccl()
    return ENVIRONMENT_DEFAULTS | (GPU_DEFAULTS if by_nccl else {})


def set_horovod_defaults() -> None:
    """Sets the variables of `environment_defaults` where the user has not."""
    for name, value in environment_defaults().items():
        os.environ.setdefault(name, value)


def time_limit(name: str) -> float:
    """Returns a limit that the user may set in the environment [s].

    Args:
        name: a key of `ZERO`, which says what a limit of 0 means.

    Raises:
        LaunchError: the variable is not a number of seconds.
    """
    text = os.environ.get(name, ENVIRONMENT_DEFAULTS[name])
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise LaunchError(f"{name}={text} is not a number of seconds (0: {ZERO[name]})")
    return limit


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
    if limit:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
