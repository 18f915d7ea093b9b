"""What all commands share: common options, the end with a message, the beginning of a job.

Nothing here imports TensorFlow, Horovod or MPI before the work of a job begins.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TextIO

import typer

from flowpm_dist.grid.decomposition import default_mesh, parse_mesh, why_default_mesh
from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.files import UnreadableError, WriteError, versions
from flowpm_dist.jobs.folder import existing_part
from flowpm_dist.jobs.job import JOBS, job_class
from flowpm_dist.jobs.progress import Progress, Verbosity, terminal_environment, verbosity
from flowpm_dist.jobs.run_file import completions
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulation.demand import OVERRIDE, Demand, Estimate
from meshimpl import launch
from meshimpl.imports import import_tensorflow

MISUSE = 2
"""Exit status after a mistake of the user."""
MESSAGE_SECONDS = 5.0
"""Time in which rank 0 can print a message before the other ranks end the job [s]."""

Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Run on this many MPI ranks; not needed under mpirun or srun."),
]


def mesh_option(example: str) -> typer.models.OptionInfo:
    """Returns the option --mesh.

    Args:
        example: a shape.
    """
    return typer.Option(metavar="SHAPE", help=f'Mesh of ranks, such as "{example}".')


Mesh = Annotated[str | None, mesh_option("replica:2,row:2")]


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns completions of a value of --set: keys of the command's job, or of all jobs."""
    known = [ctx.info_name] if ctx.info_name in JOBS else [*JOBS]
    every = (completions(job_class(str(name)).options_type, incomplete) for name in known)
    return [*dict.fromkeys(itertools.chain(*every))]


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        autocompletion=complete_setting,
        metavar="SECTION.KEY=VALUE",
        help="A value in place of the run file's own; can be repeated.",
    ),
]
Table = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="TABLE.CSV",
        help="A run for each row, in DIR-0, DIR-1 ...; columns are keys such as initial.seed.",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Only show the run with all its settings, and what it would take."
    ),
]
Trace = Annotated[
    int | None,
    typer.Option(
        "--trace",
        min=1,
        metavar="STEPS",
        help="Record what each rank does in this many steps, after the first one.",
    ),
]
IgnoreMemory = Annotated[
    bool, typer.Option(OVERRIDE, help="Begin even if the memory seems too small.")
]
Elsewhere = Annotated[bool, typer.Option("--elsewhere", hidden=True, help="Needs no room here.")]

Which = Annotated[
    Literal["best", "last"],
    typer.Option(help="The weights of the least validation loss, or of the last step."),
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
    """Continues as one of the ranks, or starts the ranks and exits with their status.

    Args:
        ranks: value of `--ranks`.
        stop_as: see `launch.relaunch`.
    """
    with planning():
        launch.check_launcher()
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


def refuse(message: str, status: int = MISUSE, *, patience: float = MESSAGE_SECONDS) -> NoReturn:
    """Exit with the message of an error that every rank has found. Rank 0 prints it.

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
    print(f"error: {printable(message)}", file=sys.stderr, flush=True)
    launch.mark_reported()
    leave(status)


def printable(text: str) -> str:
    """Returns a text with escaped control characters, so that no terminal obeys them.

    Names of files that somebody else has packed may hold them.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


@contextmanager
def planning() -> Iterator[None]:
    """A context for the checks before work: a mistake of the user ends the process."""
    try:
        yield
    except (UserError, launch.LaunchError) as error:
        refuse(str(error))
    except OSError as error:  # of a path that the user has given, such as a name that is too long
        if error.filename is None:
            raise
        refuse(f"{error.filename}: {error.strerror}")


def refuse_after(error: Exception, kept: Callable[[], str] = str) -> NoReturn:
    """Exit with the message of an error that ended a job, see `refuse`.

    Args:
        error: one of `ENDS`. The status is 1 for a `WorkError`, otherwise 2.
        kept: returns a sentence on what is saved, which is added to the message of a `WorkError`,
            unless it is about a damaged file.
    """
    if verbosity() is Verbosity.VERBOSE:
        traceback.print_exception(error)
    if not isinstance(error, WorkError):
        refuse(str(error))
    # A file that cannot be written is found by one rank alone.
    patience = 0 if isinstance(error, WriteError) else MESSAGE_SECONDS
    saved = "" if isinstance(error, UnreadableError) else kept()
    refuse("\n".join(filter(None, [str(error), saved])), status=1, patience=patience)


@contextmanager
def working(
    first: str = "",
    kept: Callable[[], str] = str,
    during_import: AbstractContextManager[None] | None = None,
    *,
    alone: bool = False,
) -> Iterator[Progress]:
    """A context in which this rank works: TensorFlow is loaded, and a progress display given.

    An error of `ENDS` ends the process with its message.

    Args:
        first: text to show at once.
        kept: see `refuse_after`.
        during_import: context in which TensorFlow is imported.
        alone: whether this process starts jobs, and needs no TensorFlow.
    """
    try:
        if alone:
            with Progress() as progress:
                progress.note(first)
                with full_disks_reported():
                    yield progress
            return
        launch.configure_threads()
        with Progress() as progress:
            progress.note("\n".join(filter(None, [first, setting(), "loading TensorFlow"])))
            with during_import or nullcontext():
                _load_tensorflow()
            gc.freeze()  # TensorFlow's objects live as long as the program
            from flowpm_dist import HaloError

            try:
                with full_disks_reported():
                    yield progress
            except (HaloError, FloatingPointError) as error:
                raise WorkError(str(error)) from error
    except ENDS as error:
        refuse_after(error, kept)
    except KeyboardInterrupt:
        refuse("interrupted", status=128 + signal.SIGINT)


def _load_tensorflow() -> None:
    """Imports TensorFlow; raises WorkError where it is not installed."""
    try:
        import_tensorflow()
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise WorkError(
            "TensorFlow is not installed: `flowpm-dist doctor` says how to install it"
        ) from error


@contextmanager
def full_disks_reported() -> Iterator[None]:
    """A context in which the error of a full disk becomes a `WriteError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise WriteError.of(Path(error.filename or "a file"), error) from error


@contextmanager
def standard_output() -> Iterator[None]:
    """A context in which a closed or full standard output ends the process with a message."""
    if sys.stdout is None:  # files that are opened would be written to instead
        sys.stdout = open(os.devnull, "w")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or not _is_broken(sys.stdout):
            raise
        _drop_output()
        refuse(f"cannot write to the standard output: {error.strerror}", status=1)


@contextmanager
def output_dropped_if_broken() -> Iterator[None]:
    """A context that raises the OSError of a full standard output, and drops later output."""
    try:
        yield
    except OSError:
        if _is_broken(sys.stdout):
            _drop_output()
        raise


def _drop_output() -> None:
    """Drop what is printed from now on; Python writes the rest at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _is_broken(stream: TextIO) -> bool:
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def setting() -> str:
    """Returns a description of the ranks and packages of a verbose job; otherwise an empty text."""
    if verbosity() is not Verbosity.VERBOSE:
        return ""
    here = launch.detect()
    on = f"{here.size} ranks by {here.launcher}" if here.size > 1 else "1 rank"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{on}, {launch.threads_per_rank()} threads each; {packages}"


def leave(status: int) -> NoReturn:
    """Exit with a status, and end the other ranks of the job."""
    if launch.detect().size > 1:
        launch.abort(status)
    sys.exit(status)


@dataclass(frozen=True)
class Preview:
    """What is printed about work that was checked and can begin.

    Attributes:
        resolved: its run file with all settings.
        demand: the memory that it takes on its mesh of ranks; None if it starts other jobs.
        estimate: what it will take.
        output: folder of the results; None if there is none.
        explains_mesh: whether the reason for the default mesh is printed.
        warnings: what a user should know; printed again when the work begins.
        outline: what the work is, if it starts other jobs.
        why_no_time: see `Costs`.
    """

    resolved: str
    demand: Demand | None
    estimate: Estimate
    output: Path | None = None
    explains_mesh: bool = False
    warnings: tuple[str, ...] = ()
    outline: str = ""
    why_no_time: str = ""

    def check_memory(self, *, ignore: bool) -> None:
        """Check that the work fits into the memory of this host.

        Args:
            ignore: whether it may begin where it does not.

        Raises:
            TooLargeError: it does not fit.
        """
        if self.demand is not None and not ignore:
            self.demand.check(self.estimate, launch.host_memory())

    @property
    def message(self) -> str:
        """The estimate that is printed when the work begins."""
        return str(self.estimate)

    def show(self) -> None:
        """Print the run with all its settings, as a run file, and below it what it would take."""
        if launch.detect().rank:
            return
        lines = [self.outline]
        if self.demand is not None and not self.outline:
            lines = self._mesh_lines(self.demand)
        lines += self.estimate.lines(launch.host_memory())
        if self.why_no_time:
            lines.append(f"time: {self.why_no_time}")
        if self.output is not None:
            free = shutil.disk_usage(existing_part(self.output)).free
            lines.append(f"results: in {self.output}, where {human_size(free)} are free")
        lines += [f"warning: {each}" for each in self.warnings]
        print("\n".join([self.resolved.rstrip(), "", *(f"# {line}" for line in lines)]))

    def _mesh_lines(self, demand: Demand) -> list[str]:
        """Returns the mesh of ranks, and why it is the default one."""
        count, mesh, grid = self.estimate.ranks, demand.mesh, demand.grid
        lines = [f"mesh: {mesh}, {'1 rank' if count == 1 else f'{count} ranks'}"]
        one_box = parse_mesh(mesh, batched=True).get("replica", 1) == 1
        explained = self.explains_mesh and one_box
        pyramid, halo = demand.pyramid, demand.halo
        if explained and mesh == default_mesh(count, grid, pyramid=pyramid, halo=halo):
            lines.append(f"that mesh because {why_default_mesh(count, grid, pyramid, halo)}")
        return lines

    @contextmanager
    def begun(self, ranks: int | None, *, check: bool) -> Iterator[Progress]:
        """Begin the work as one of the ranks, see `working`; with `--check`, show it and exit.

        Args:
            ranks: value of `--ranks`.
            check: whether `--check` was given.
        """
        if check:
            self.show()
            raise typer.Exit
        begin_job(ranks)
        with working(self.message) as progress:
            yield progress
