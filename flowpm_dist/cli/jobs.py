"""The command line of a job, made from its class: planning, beginning, working and ending."""

# Without "from __future__ import annotations", as typer reads annotations that are made here.

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flowpm_dist.cli.common import (
    Check,
    IgnoreMemory,
    Preview,
    Ranks,
    Set,
    begin_job,
    default_output,
    job_size,
    mesh_option,
    planning,
    stoppable,
    working,
)
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.job import Job, Request
from flowpm_dist.jobs.run_file import parse_settings
from meshimpl import launch

Kind = type[Job[Any, Any]]


def command(kind: Kind) -> Callable[..., None]:
    """Returns the function of a job's command, with its options, for typer."""
    what, named = kind.folder_type.kind, kind.named()

    def run(
        run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help=kind.asks)],
        ranks: Ranks = None,
        mesh: Annotated[str | None, mesh_option(kind.mesh_example)] = None,
        output: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help=f"Folder of the {what}; by default RUN-{named}."),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help=f"Go on with the {what} in DIR.")
        ] = False,
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help=f"Replace the {what} in DIR.")
        ] = False,
        check: Check = False,
        ignore_memory: IgnoreMemory = False,
        changes: Set = None,
    ) -> None:
        output = output or default_output(run_file, named)
        with planning():
            if resume and overwrite:
                raise OutputError(f"--resume goes on with a {what}, --overwrite drops it: give one")
            settings = parse_settings(changes or [])
            size = job_size(ranks)
            job = kind.plan(Request(run_file, size, output, resume, overwrite, mesh, settings))
            if not job.is_complete:
                preview(job).check_memory(ignore=ignore_memory)
        if job.is_complete:
            if launch.detect().rank == 0:
                print(job.complete_message())
        elif check:
            preview(job).show()
        else:
            begin_job(ranks, stop_as=signal.SIGUSR1)
            work(job)

    run.__name__, run.__doc__ = kind.name, kind.help
    return run


def preview(job: Job[Any, Any]) -> Preview:
    """Returns what is printed of a job before it begins."""
    return Preview(
        job.resolved,
        job.demand,
        job.estimate,
        job.folder.path,
        explains_mesh=True,
        warnings=job.warnings,
    )


def work(job: Job[Any, Any]) -> None:
    """Work as one of the ranks of a job; exit with a status if a signal stopped the work."""
    with stoppable(job.saved):
        stopped_by = _work(job)
    if stopped_by is not None:
        sys.exit(128 + signal.Signals[stopped_by])


def _work(job: Job[Any, Any]) -> str | None:
    """Returns the name of the signal that stopped the work; None if it is complete."""
    rank = launch.detect().rank
    stopped_by, last_words = None, ""
    first = f"{job.describe()}\n{preview(job).message}"
    with working(first, job.saved, job.during_tensorflow_import()) as progress:
        from flowpm_dist.jobs.agreement import StopError, check_seen_by_all
        from meshimpl import ProcessMesh, initialise

        initialise(job.meshes)
        mesh = ProcessMesh(job.mesh)
        check_seen_by_all(job.folder.path, mesh)
        if rank == 0:
            job.folder.begin(resume=job.resume, overwrite=job.overwrite)
        for warning in job.warnings:
            progress.warn(warning)
        try:
            result = job.work(progress)
        except StopError as stop:
            stopped_by = stop.signal
            name = launch.stop_name(stopped_by)
            last_words = f"stopped by {name} {stop.place}; go on with --resume"
    if rank == 0 and stopped_by is None:
        print(job.report(result), flush=True)
        job.remember(result)
    elif rank == 0:
        print(last_words, file=sys.stderr, flush=True)
    # A rank that exits with a status ends the others: all must be printed before.
    mesh.barrier()
    return stopped_by
