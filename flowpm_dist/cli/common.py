"""What all commands share: common options, the end with a message, the beginning of a job.

Nothing here imports TensorFlow, Horovod or MPI before the work of a job begins.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.progress import Progress, terminal_environment
from flowpm_dist.jobs.verbosity import Verbosity, verbosity
from meshimpl import launch
from meshimpl.quiet import import_tensorflow

MISUSE = 2
"""Exit status after a mistake of the user."""
PATIENCE = 5.0
"""Time in which rank 0 can print a message before the other ranks end the job [s]."""

Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Run on this many MPI ranks; not needed under mpirun or srun."),
]


def mesh_option(example: str) -> typer.models.OptionInfo:
    """Returns the option --mesh.

    Args:
        example: of a shape.
    """
    return typer.Option(metavar="SHAPE", help=f'Mesh of ranks, such as "{example}".')


Mesh = Annotated[str | None, mesh_option("replica:2,row:2")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="A value in place of the run file's own; can be repeated.",
    ),
]


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a disk that takes no more."""

ENDS = (UserError, WorkError, launch.LaunchError)
"""Errors that end a job without a traceback."""


def job_size(ranks: int | None) -> int:
    """Returns the number of ranks of the job that this process is part of or will start.

    Args:
        ranks: value of `--ranks`.
    """
    here = launch.detect()
    return here.size if here.size > 1 else ranks or 1


def begin_job(ranks: int | None, *, stop_as: signal.Signals | None = None) -> None:
    """Go on as one of the ranks, or start the ranks and exit with their status.

    Args:
        ranks: value of `--ranks`.
        stop_as: see `launch.relaunch`.
    """
    try:
        launch.check_launcher()
    except launch.LaunchError as error:
        refuse(str(error))
    if ranks is None and (tasks := launch.unused_tasks()):
        print(
            f"warning: this Slurm job has {tasks} tasks, and this is one rank alone: start it with "
            "srun --mpi=pmix or mpirun, or give --ranks",
            file=sys.stderr,
        )
    os.environ.update(terminal_environment())
    status = launch.launch_or_join(ranks, sys.argv[1:], stop_as=stop_as)
    if status is not None:
        sys.exit(status)
    launch.abort_on_error()


def refuse(message: str, status: int = MISUSE, *, patience: float = PATIENCE) -> NoReturn:
    """Exit with a message about what every rank has found. Rank 0 prints it.

    The other ranks wait, because a launcher ends all ranks once one of them has failed. A rank that
    still runs afterwards has found something of its own, such as a file that its node does not see,
    and prints its message, too.

    Args:
        message: what is wrong.
        status: exit status.
        patience: how long the other ranks wait [s].
    """
    here = launch.detect()
    if here.rank:
        time.sleep(patience)
        host = f" on {socket.gethostname()}" if here.local_size < here.size else ""
        message = f"[rank {here.rank}/{here.size}{host}] {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)
    launch.end_was_told()
    leave(status)


@contextmanager
def planning() -> Iterator[None]:
    """Inside, what can be checked before work begins is checked: a mistake ends the process."""
    try:
        yield
    except (UserError, launch.LaunchError) as error:
        refuse(str(error))


def refuse_after(error: Exception, kept: Callable[[], str] = str) -> NoReturn:
    """Exit with the message of an error that ended a job, see `refuse`.

    Args:
        error: one of `ENDS`. The status is 1 for a `WorkError`, otherwise 2.
        kept: returns a sentence on what is saved, which is added to the message of a `WorkError`.
    """
    if verbosity() is Verbosity.VERBOSE:
        traceback.print_exception(error)
    if not isinstance(error, WorkError):
        refuse(str(error))
    # A file that cannot be written is found by one rank alone.
    patience = 0 if isinstance(error, WriteError) else PATIENCE
    refuse("\n".join(filter(None, [str(error), kept()])), status=1, patience=patience)


@contextmanager
def job(
    first: str = "",
    kept: Callable[[], str] = str,
    beside: AbstractContextManager[None] | None = None,
) -> Iterator[Progress]:
    """Load TensorFlow and give a progress display; inside, this rank works.

    An error of `ENDS` ends the process with its message.

    Args:
        first: text to show at once.
        kept: see `refuse_after`.
        beside: in which TensorFlow is loaded, for what is done meanwhile.
    """
    try:
        launch.configure_threads()
        with Progress(launch.detect().rank) as progress:
            progress.note("\n".join(filter(None, [first, setting(), "loading TensorFlow"])))
            with beside or nullcontext():
                import_tensorflow()
            from flowpm_dist import HaloError

            try:
                with full_disks_told():
                    yield progress
            except (HaloError, FloatingPointError) as error:
                raise WorkError(str(error)) from error
    except ENDS as error:
        refuse_after(error, kept)
    except KeyboardInterrupt:
        refuse("interrupted", status=128 + signal.SIGINT)


@contextmanager
def full_disks_told() -> Iterator[None]:
    """Inside, the error of a disk that takes no more becomes a `WriteError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise WriteError.of(Path(error.filename or "a file"), error) from error


def setting() -> str:
    """Returns what a verbose job says of where it runs; otherwise an empty text."""
    if verbosity() is not Verbosity.VERBOSE:
        return ""
    from flowpm_dist.jobs.versions import versions

    here = launch.detect()
    on = f"{here.size} ranks by {here.launcher}" if here.size > 1 else "1 rank"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{on}, {launch.threads_per_rank()} threads each; {packages}"


def leave(status: int) -> NoReturn:
    """Exit with a status, and end the other ranks of the job."""
    if launch.detect().size > 1:
        launch.abort(status)
    sys.exit(status)


def stop_on(*numbers: signal.Signals) -> None:
    """Let signals raise SystemExit; the status is 128 plus the number of the signal."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, stop)


@contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[None]:
    """Exit with a message if a signal comes inside, while the work does not handle it itself.

    Args:
        kept: returns a sentence on what is saved, which is added to the message.
    """
    stop_on(*launch.STOP_SIGNALS)
    try:
        yield
    except SystemExit as end:
        number = int(end.code or 0) - 128
        if number not in launch.STOP_SIGNALS:
            raise
        name = launch.stop_name(signal.Signals(number).name)
        refuse(f"stopped by {name}; {kept()}", status=128 + number)


def default_output(run_file: Path, kind: str) -> Path:
    """Returns the folder of the results of a run file that is taken without --output."""
    return Path(f"{run_file.stem}-{kind}")
