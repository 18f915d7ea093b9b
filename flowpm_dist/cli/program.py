"""The program `flowpm-dist`, whose commands are imported when they are used.

The command of a job is made from the job's class. TensorFlow, Horovod and MPI are imported only
after everything that can be checked without them. A mistake is reported within a second, and by one
rank alone.
"""

# Without "from __future__ import annotations", as typer reads annotations that are made here.

import importlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from flowpm_dist.cli import common
from flowpm_dist.io.errors import UserError, decoration
from flowpm_dist.jobs.folder import OutputError, check_room
from flowpm_dist.jobs.job import JOBS, Job, Request, StopError, job_class
from flowpm_dist.jobs.progress import Verbosity
from flowpm_dist.jobs.run_file import Settings
from flowpm_dist.jobs.usage import Usage
from flowpm_dist.studies.rows import Rows
from meshimpl import launch

Kind = type[Job[Any, Any]]


def command_of(kind: Kind) -> Callable[..., None]:
    """Returns the function of a job's command, with its options, for typer."""
    called, command = kind.folder_type.kind, kind.command
    default = kind.folder_type.default_path(Path("RUN"))

    def run(
        run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help=command.run_file)],
        ranks: common.Ranks = None,
        mesh: Annotated[str | None, common.mesh_option(command.mesh_example)] = None,
        output: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help=f"Folder of the {called}; by default {default}."),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help=f"Go on with the {called} in DIR.")
        ] = False,
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help=f"Replace the {called} in DIR.")
        ] = False,
        check: common.Check = False,
        ignore_memory: common.IgnoreMemory = False,
        changes: common.Set = None,
        table: common.Table = None,
        trace: common.Trace = None,
    ) -> None:
        output = output or kind.folder_type.default_path(run_file)
        with common.planning():
            if command.starts_jobs and trace is not None:
                raise UserError(
                    f"--trace is for a single job, not for the jobs of a {command.name}"
                )
            size = common.job_size(ranks)
            # With --check the plan is shown before the room and the memory are checked.
            request = Request(run_file, size, output, resume, overwrite, mesh, elsewhere=check)
            jobs = _planned(kind, request, changes or [], table)
            left = [job for job in jobs if not job.is_complete]
            if check:
                for job in left:
                    preview(job).show()
            _check_resources(left, output, ignore_memory=ignore_memory)
        if not left:
            if launch.detect().rank == 0:
                print("\n".join(job.folder.complete_message() for job in jobs))
        elif not check:
            common.begin_job(ranks, stop_as=signal.SIGUSR1)
            work(left, rows=table is not None, trace=trace)

    run.__name__, run.__doc__ = command.name, command.help
    return run


def _planned(
    kind: Kind, request: Request, changes: Sequence[str], table: Path | None
) -> list[Job[Any, Any]]:
    """Returns the job, or a job for each row of a table, after all checks.

    Raises:
        UserError: there are mistakes, or a job cannot begin.
    """
    resume, called, command = request.resume, kind.folder_type.kind, kind.command
    if resume and request.overwrite:
        raise OutputError(f"--resume continues a {called}, --overwrite replaces it: give one")
    if command.starts_jobs and request.ranks > 1:
        raise UserError(
            f"{command.name} is one process that starts jobs: leave --ranks out, and give the "
            "number of ranks of these jobs in the run file"
        )
    if table is not None and not command.takes_tables:
        instead = f"flowpm-dist submit {command.name}"
        raise UserError(f"--table is not for {command.name}: give it to {instead}")

    def plan(folder: Path, settings: Settings) -> Job[Any, Any]:
        # With --resume, rows of a table that were not begun are begun.
        again = resume and (table is None or kind.folder_type(folder).can_resume())
        at_row = replace(request, output=folder, resume=again, settings=settings)
        return kind.plan(replace(at_row, is_row=table is not None))

    hint = "" if resume else "--resume leaves out finished rows, and resumes the others"
    return Rows.read(changes, table).planned(request.output, plan, hint)


def _check_resources(jobs: Sequence[Job[Any, Any]], output: Path, *, ignore_memory: bool) -> None:
    """Check that the disk has room for the results of all jobs, and the host memory for each.

    Args:
        jobs: the jobs; none is complete.
        output: folder of the results, or the beginning of their folders' names.
        ignore_memory: whether they may begin where the memory is too small.

    Raises:
        OutputError: there is too little room.
        TooLargeError: a job needs more memory.
    """
    if jobs and launch.detect().rank == 0:
        disk = sum(job.costs.disk for job in jobs)
        runs = f"{len(jobs)} runs need" if len(jobs) > 1 else f"the {jobs[0].folder.kind} needs"
        check_room(output, disk, f"{runs} about")
    for job in jobs:
        preview(job).check_memory(ignore=ignore_memory)


def preview(job: Job[Any, Any]) -> common.Preview:
    """Returns what is printed about a job before it begins."""
    costs = job.costs
    return common.Preview(
        job.options.resolved(),
        costs.demand,
        costs.estimate,
        job.folder.path,
        explains_mesh=True,
        warnings=(*job.options.warnings, *costs.warnings),
        outline=job.describe() if job.command.starts_jobs else "",
        why_no_time=costs.why_no_time,
    )


def work(jobs: Sequence[Job[Any, Any]], *, rows: bool, trace: int | None = None) -> None:
    """Work as one of the ranks of jobs, in turn; exit with a status if a signal stopped one.

    Args:
        jobs: the jobs.
        rows: whether the jobs are rows of a table; they then print less.
        trace: number of steps that are traced; None for no trace.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        launch.leave_terminal(number)
        raise SystemExit(128 + number)

    # These handlers apply while the work has none of its own.
    for signal_number in launch.STOP_SIGNALS:
        signal.signal(signal_number, stop)
    job, stopped_by = jobs[0], None
    meshes = list(dict.fromkeys(mesh for job in jobs for mesh in job.options.meshes))
    try:
        for number, job in enumerate(jobs):
            place = f"{job.folder.path} ({number + 1} of {len(jobs)})" if rows else ""
            if stopped_by := _work(job, meshes, place, trace):
                break
            if number + 1 < len(jobs) and (stopped_by := job.stopped_by):
                if launch.detect().rank == 0:
                    name = launch.stop_name(stopped_by)
                    print(f"stopped by {name}; go on with --resume", file=sys.stderr, flush=True)
                break
    except SystemExit as end:
        number = int(end.code or 0) - 128
        if number not in launch.STOP_SIGNALS:
            raise
        name = launch.stop_name(signal.Signals(number).name)
        common.refuse(f"stopped by {name}; {job.folder.saved()}", status=128 + number)
    if stopped_by is not None:
        sys.exit(128 + signal.Signals[stopped_by])


def _work(
    job: Job[Any, Any], meshes: Sequence[str], place: str, traced_steps: int | None
) -> str | None:
    """Returns the name of the signal that stopped the work; None if it is complete.

    Args:
        job: the job.
        meshes: shapes of all meshes of ranks of this process.
        place: its folder and number, if it is a row of a table.
        traced_steps: number of steps that are traced; None for no trace.
    """
    rank = launch.detect().rank
    stopped_by, last_words = None, ""
    shown, alone = preview(job), job.command.starts_jobs
    first = place or f"{job.describe()}\n{shown.message}"

    def saved() -> str:
        return f"that was {place}; {job.folder.saved()}" if place else job.folder.saved()

    loaded = common.working(first, saved, job.while_loading(), alone=alone)
    with Usage() as usage, loaded as progress:
        from flowpm_dist.jobs.report import leave_report

        mesh: Any = None
        gathered, trace = None, None
        if not alone:
            if traced_steps is not None:
                from flowpm_dist.jobs.trace import Trace

                trace = Trace(traced_steps, job.command.steps, progress)
            mesh, gathered = _joined(job, meshes)
        if rank == 0:
            job.folder.begin(resume=job.request.resume, overwrite=job.request.overwrite)
        for warning in shown.warnings:
            progress.warn(warning)
        try:
            result = job.work(progress)
        except StopError as stop:
            stopped_by = stop.signal
            name = launch.stop_name(stopped_by)
            last_words = f"stopped by {name} {stop.place}; go on with --resume"
        if trace is not None:
            trace.leave(job.folder.path, mesh)
        if stopped_by is None:
            used = usage.of_job(gathered)
            if rank == 0:
                leave_report(
                    job.folder.path, job.command.name, job.mesh, progress, job.folder.record, used,
                    job.describe(),
                )  # fmt: skip
    if rank == 0 and stopped_by is None:
        _conclude(job, result, place, progress.warn)
    elif rank == 0:
        print(last_words, file=sys.stderr, flush=True)
    # A rank that exits with a status ends the others: all must be printed before.
    if mesh is not None:
        mesh.barrier()
    return stopped_by


def _conclude(job: Job[Any, Any], result: Any, place: str, warn: Callable[[str], None]) -> None:
    """Prints what a complete job has found, and remembers how fast it was. On rank 0.

    Args:
        job: the job.
        result: what its work returned.
        place: its folder and number, if it is a row of a table.
        warn: shows a warning.
    """
    with decoration("summary", warn), common.output_dropped_if_broken():
        print(f"{job.folder.path}: complete" if place else job.report(result), flush=True)
    with decoration("record of the speed", warn):
        job.costs.remember(job.speeds(result))


def _joined(job: Job[Any, Any], meshes: Sequence[str]) -> tuple[Any, Any]:
    """Returns the mesh of ranks of a job, and the function that gathers numbers of all of them.

    Args:
        job: the job; all ranks must have the same.
        meshes: shapes of all meshes of ranks of this process.
    """
    from flowpm_dist.jobs.session import check_shared, gather
    from meshimpl import ProcessMesh, initialise

    initialise(meshes)
    mesh = ProcessMesh(job.mesh)
    again = {"resume": job.request.resume, "overwrite": job.request.overwrite}
    mesh.check_equal("the job", folder=job.folder.path, **again, **dict(job.options))
    check_shared(job.folder.path, mesh)
    return mesh, gather(mesh)


COMMANDS = (
    *JOBS, "dataset", "evaluate", "predict", "export", "convert", "measure", "runs", "report",
    "submit", "build", "doctor",
)  # fmt: skip
"""Jobs, and modules of this package, each with a function of the same name and an `EXAMPLE`."""


class Commands(TyperGroup):
    """A group of commands that imports the module of a command when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of a name, or None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(add_completion=False, rich_markup_mode="rich")
        if cmd_name in JOBS:
            kind = job_class(cmd_name)
            function, example = command_of(kind), kind.command.example
        else:
            module = importlib.import_module(f"flowpm_dist.cli.{cmd_name}")
            function, example = getattr(module, cmd_name), module.EXAMPLE
        epilog = f"Example: [bold]{example}[/bold]" if example else None
        one.command(cmd_name, epilog=epilog)(function)
        command = typer.main.get_group(one).commands[cmd_name]
        command.params += _common_options()
        return command


def _says(level: Verbosity, help: str) -> Any:
    """Returns an option that chooses how much a command says."""
    return typer.Option(
        f"-{level[0]}",
        f"--{level}",
        help=help,
        expose_value=False,
        callback=lambda given: level.choose() if given else None,
    )


def _common_options() -> list[Any]:
    """Returns the options that every command has."""
    one = typer.Typer(add_completion=False)
    verbose = _says(Verbosity.VERBOSE, "Print more: every step, and the traceback of an error.")
    quiet = _says(Verbosity.QUIET, "Say nothing but results, warnings and errors.")

    @one.command(add_help_option=False)
    def common(
        verbose: Annotated[bool, verbose] = False, quiet: Annotated[bool, quiet] = False
    ) -> None:
        """Declares the options."""

    return typer.main.get_command(one).params


app = typer.Typer(
    name="flowpm-dist",
    cls=Commands,
    help="Particle-mesh universes on many ranks, and networks that learn from them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(given: bool) -> None:
    if given:
        from flowpm_dist.io.files import versions

        print(f"flowpm-dist {versions().get('flowpm-dist', '(not installed, run from source)')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and leave."),
    ] = False,
) -> None:
    """Particle-mesh universes on many ranks, and networks that learn from them."""


def main() -> None:
    """Entry point of `flowpm-dist` and of `python -m flowpm_dist.cli`."""
    try:
        rank = launch.detect().rank
    except launch.LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(common.MISUSE)
    if rank == 0:
        with common.standard_output():
            app()
        return
    # Every rank finds wrong usage, and rank 0 reports it.
    try:
        app(standalone_mode=False)
    except Exception as error:
        status = getattr(error, "exit_code", None)
        if status is None:
            raise
        time.sleep(common.MESSAGE_SECONDS)
        common.leave(status)
