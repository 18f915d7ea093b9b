"""What all commands of `flowpm-dist` share: their options, how they refuse, how a job begins.

Nothing here imports TensorFlow, Horovod or MPI before the work of a job begins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.progress import Progress, terminal_environment
from meshimpl import launch
from meshimpl.quiet import import_tensorflow

MISUSE = 2  # exit status
PATIENCE = 5.0  # [s] that the other ranks leave rank 0 to say what is wrong

Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Run on this many MPI ranks; not needed under mpirun or srun."),
]


def mesh_option(example: str) -> typer.models.OptionInfo:
    """The option --mesh, with an example of a shape."""
    return typer.Option(metavar="SHAPE", help=f'Mesh of ranks, such as "{example}".')


Mesh = Annotated[str | None, mesh_option("replica:2,row:2")]


ENDS = (UserError, WorkError, launch.LaunchError)
"""Errors that end a job without a traceback."""


def job_size(ranks: int | None) -> int:
    """Ranks of the job that this process is in, or is to begin with `--ranks`."""
    here = launch.detect()
    return here.size if here.size > 1 else ranks or 1


def begin_job(ranks: int | None, *, stop_as: signal.Signals | None = None) -> None:
    """Go on as one of the ranks, or run this command on several and leave with their status.

    Args:
        ranks: what was asked for.
        stop_as: see `launch.relaunch`.
    """
    os.environ.update(terminal_environment())
    status = launch.launch_or_join(ranks, sys.argv[1:], stop_as=stop_as)
    if status is not None:
        sys.exit(status)
    launch.abort_on_error()


def refuse(message: str, status: int = MISUSE, *, patience: float = PATIENCE) -> NoReturn:
    """Leave with a message, over something that every rank found; rank 0 tells it.

    The others wait, or their launcher would end rank 0 unheard. One that outlives rank 0 found
    something of its own, such as a file that its node does not see.

    Args:
        message: what is wrong.
        status: exit status.
        patience: how long the other ranks wait [s].
    """
    here = launch.detect()
    if here.rank:
        time.sleep(patience)
        message = f"[rank {here.rank}/{here.size}] {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)
    leave(status)


def refuse_after(error: Exception, kept: Callable[[], str] = str) -> NoReturn:
    """Leave over what ended the work of a job, see `refuse`.

    Args:
        error: one of `ENDS`; the status is 1 unless it is a user's mistake.
        kept: says what there is in spite of it.
    """
    if not isinstance(error, WorkError):
        refuse(str(error))
    # A file that cannot be written is found by one rank alone.
    patience = 0 if isinstance(error, WriteError) else PATIENCE
    refuse("\n".join(filter(None, [str(error), kept()])), status=1, patience=patience)


@contextmanager
def job(first: str = "", kept: Callable[[], str] = str) -> Iterator[Progress]:
    """Inside, one of the ranks of a job works, with TensorFlow loaded; what ends it is told.

    Args:
        first: to say before all else.
        kept: says what there is in spite of an error that is nobody's mistake.
    """
    try:
        launch.configure_threads()
        with Progress(launch.detect().rank) as progress:
            progress.note("\n".join(filter(None, [first, "loading TensorFlow"])))
            import_tensorflow()
            from flowpm_dist import HaloError

            try:
                yield progress
            except (HaloError, FloatingPointError) as error:
                raise WorkError(str(error)) from error
    except ENDS as error:
        refuse_after(error, kept)


def leave(status: int) -> NoReturn:
    """End this rank, and with it the job."""
    if launch.detect().size > 1:
        launch.abort(status)
    sys.exit(status)


def stop_on(*numbers: signal.Signals) -> None:
    """Let these signals end this process as an exit would, with status 128 and their number."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, stop)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[None]:
    """Inside, work that takes signals down itself; one that comes before or after ends it at once.

    Args:
        kept: says what there is in spite of the end.
    """
    stop_on(*STOPS)
    try:
        yield
    except SystemExit as end:
        number = int(end.code or 0) - 128
        if number not in STOPS:
            raise
        name = launch.stop_name(signal.Signals(number).name)
        refuse(f"stopped by {name}; {kept()}", status=128 + number)


def default_output(run_file: Path, kind: str) -> Path:
    """Where the results of a run file go unless it is said."""
    return Path(f"{run_file.stem}-{kind}")
