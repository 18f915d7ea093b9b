"""The command `flowpm-dist submit`: a job script for Slurm, written and submitted."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowpm_dist.cli import batch, common
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import WriteError, human_size, write_text
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.job import JOBS, PROGRAM, Request, job_class
from flowpm_dist.jobs.run_file import parse_settings, read_columns
from flowpm_dist.simulation.demand import Estimate, human_time
from meshimpl import launch

EXAMPLE = (
    "flowpm-dist submit simulate run.toml --nodes 4 --ranks-per-node 8 --time "
    "02:00:00 --array initial.seed=0-9"
)

_SUFFIXES = {"dataset": "dataset", "evaluate": "evaluation", "predict": "prediction"}
"""Commands that begin anew, and what their scripts are named after."""

if TYPE_CHECKING:
    Command = str
else:
    Command = StrEnum("Command", {name: name for name in (*JOBS, *_SUFFIXES)})


def submit(
    command: Annotated[Command, typer.Argument(help="What the job does.")],
    operands: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN.TOML [-- OPTIONS]",
            help="Its run file; trainings for evaluate, a training and a volume for predict. "
            "Options of dataset, evaluate and predict come last, after --.",
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")],
    ranks_per_node: Annotated[int, typer.Option(min=1, help="MPI ranks on each node.")],
    time: Annotated[
        str, typer.Option(metavar="HH:MM:SS", help="Time limit; the rest is queued again.")
    ],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores of each rank; by default the site's.")
    ] = None,
    gpus_per_rank: Annotated[
        int | None, typer.Option(min=0, max=1, help="GPUs of each rank; by default the site's.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Instead of the site file's.")] = None,
    account: Annotated[str | None, typer.Option(help="Instead of the site file's.")] = None,
    qos: Annotated[str | None, typer.Option(help="Instead of the site file's.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results.")
    ] = None,
    array: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION.KEY=VALUES",
            help="A job for each value, such as initial.seed=0-9 or evolution.steps=5,10,20; "
            "repeated, for each combination.",
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=0, help="Jobs of an array that may run at one time; 0: all.")
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Jobs that do a study together; 0: one job.")
    ] = 0,
    table: common.Table = None,
    mesh: Annotated[str | None, common.mesh_option("row:4,col:8")] = None,
    changes: common.Set = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="SITE.TOML",
            help="What is always the same here; by default ~/.config/flowpm-dist/site.toml.",
        ),
    ] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default DIR.sbatch.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the script, and submit nothing.")
    ] = False,
) -> None:
    """Write a script for Slurm's sbatch and submit it: several hosts, time limits, many seeds."""
    with common.planning():
        own = {"threads": threads, "gpus_per_rank": gpus_per_rank, "partition": partition}
        own |= {"account": account, "qos": qos}
        options = batch.load_site(site).model_copy(
            update={name: value for name, value in own.items() if value is not None}
        )
        if options.launcher == "srun" and not options.program:
            launch.check_srun_mpi(options.mpi)
        limit = batch.seconds_of(time)
        if limit <= options.warn and command in JOBS:
            raise UserError(
                f"--time {time} is {human_time(limit)}, and jobs are asked to stop "
                f"{human_time(options.warn)} before their limit: give more, or lower site.warn"
            )
        _check_gpus(options, ranks_per_node)
        given, further = _operands(command, operands)
        kind = job_class(command) if command in JOBS else None
        results = (output or _default_results(command, given[0], kind)).absolute()
        if not results.name:
            raise UserError(f"--output {output}: must be a folder with a name")
        if table and array:
            raise UserError("--table and --array are both given: give one of them")
        settings = read_columns(table) if table else batch.array_settings(array or [])
        by = "--table" if table else "--array"
        if both := [key for key in map(".".join, parse_settings(changes or [])) if key in settings]:
            raise UserError(f"{both[0]} is given by {by} and by --set: leave one of them out")
        if at_once and not settings:
            raise UserError(
                f"--at-once {at_once} is for the jobs of an --array or a --table; there is none"
            )
        alone = kind is not None and kind.starts_jobs
        if workers and (settings or not alone):
            raise UserError("--workers is for a study or a tuning, without --array or --table")
        words = [command, *(str(path.absolute()) for path in given)]
        words += ["--mesh", mesh] if mesh else []
        words += [word for text in changes or [] for word in ("--set", text)]
        has_folder = command in (*JOBS, "dataset") or output is not None
        job = batch.BatchJob(
            name=results.name,
            written_by=shlex.join(["flowpm-dist", *sys.argv[1:]]),
            program=shlex.split(options.program) or PROGRAM,
            words=[*words, *further],
            output=str(results) if has_folder else "",
            begun=kind.folder_type.begun if kind else "",
            again="--overwrite" if command == "dataset" else "",
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            time=time,
            settings=settings,
            at_once=at_once,
            alone=alone,
            workers=workers,
            mpirun="mpirun" if options.program else str(launch.find_mpirun()),
            site=options,
        )
        if kind is None:
            if command == "dataset":
                _check_rows(given[0], job, mesh, changes or [], table)
            _try(command, job)
        else:
            job = _checked(kind, given[0], job, mesh, changes or [], table)
        text = job.script()
        path = script or Path(os.path.relpath(results.with_name(f"{results.name}.sbatch")))
        try:
            if path.exists() and batch.is_edited(path.read_text()):
                raise UserError(
                    f"{path} is there and was edited: submit it with sbatch, remove it, or give "
                    "another --script"
                )
            write_text(path, text)
        except WriteError as error:
            raise UserError(str(error)) from error
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        if workers and kind is not None:
            _prepare(kind, given[0], results, changes or [])
    print(f"{path}: {_described(job)}")
    if not dry_run:
        _submit(path)


def _operands(command: Command, words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Returns the files and folders that a command works on, and its own options.

    Raises:
        UserError: there are too many.
    """
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    given, own = [Path(word) for word in words[:count]], list(words[count:])
    most = {"evaluate": len(given), "predict": 2}.get(command, 1)
    if not 0 < len(given) <= most or (command in JOBS and own):
        wrong = shlex.join(words[most:] if given else words)
        raise UserError(f"submit {command}: cannot take {wrong}")
    return given, own


def _default_results(command: Command, first: Path, kind: Any) -> Path:
    if command in ("evaluate", "predict"):
        return Path(f"{first.absolute().name}-{_SUFFIXES[command]}")
    return common.default_output(first, kind.named() if kind else _SUFFIXES[command])


def _check_gpus(options: batch.SiteOptions, ranks_per_node: int) -> None:
    """Checks that no two ranks get one GPU, if this Horovod carries messages by NCCL.

    Raises:
        UserError: they would.
    """
    gpus = batch.gpus_of_a_node(options.directives)
    if gpus is not None and options.gpus_per_rank:
        raise UserError(
            "site.directives ask for GPUs, and so does --gpus-per-rank, or site.gpus_per_rank: "
            "leave one of them out"
        )
    if gpus is not None and gpus < ranks_per_node and launch.horovod_has_nccl():
        raise UserError(
            f"site.directives ask for {gpus} GPU{'s' * (gpus > 1)} a node, for {ranks_per_node} "
            "ranks, and NCCL wants one GPU for each rank: --gpus-per-rank 1, or fewer ranks"
        )


def _try(command: Command, job: batch.BatchJob) -> None:
    """Let a command check what it would be given, in an array for its first job.

    Raises:
        UserError: it could not begin.
    """
    first = job.settings_of(0)
    if first and command != "dataset":
        raise UserError(f"--array: {command} has no run file of its own")
    words = [word for text in first for word in ("--set", text)]
    if job.output:
        words += ["--output", f"{job.output}-0" if job.elements else job.output]
    words += ["--ranks", str(job.nodes * job.ranks_per_node), "--check", "--ignore-memory"]
    done = subprocess.run([*PROGRAM, *job.words, *words], capture_output=True, text=True)
    if done.returncode:
        message = done.stderr.strip().removeprefix("error: ")
        raise UserError(f"submit {command}: {message}" if message.startswith("Usage") else message)


def _check_rows(
    run_file: Path,
    job: batch.BatchJob,
    mesh: str | None,
    changes: Sequence[str],
    table: Path | None,
) -> None:
    """Checks the settings of each job of an array of datasets.

    Raises:
        UserError: one of them could not begin.
    """
    from flowpm_dist.cosmoflow.planning.memory import check_training_mesh
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

    for number in range(job.elements):
        try:
            settings = parse_settings([*changes, *job.settings_of(number)])
            plan = TrainingPlan.load(run_file, settings)
            ranks = job.nodes * job.ranks_per_node
            check_training_mesh(plan, ranks, source=run_file, shape=mesh)
        except UserError as error:
            raise _in_row(table, number, error) from error


def _in_row(table: Path | None, number: int, error: UserError) -> UserError:
    """Returns an error that names the row of the table, if there is one."""
    return error if table is None else UserError(f"{table}, row {number} (counted from 0): {error}")


def _checked(
    kind: Any,
    run_file: Path,
    job: batch.BatchJob,
    mesh: str | None,
    changes: Sequence[str],
    table: Path | None,
) -> batch.BatchJob:
    """Returns the job without the work that is complete; each is checked as by its own command.

    Raises:
        UserError: one of them could not begin, or all are complete.
    """
    ranks, complete, memory = job.nodes * job.ranks_per_node, [], 0
    own = 1 if job.alone else ranks
    for number in range(max(1, job.elements)):
        output = Path(f"{job.output}-{number}" if job.elements else job.output)
        try:
            request = Request(
                run_file=run_file,
                ranks=own,
                output=output,
                resume=any(output.glob(job.begun)),
                overwrite=False,
                mesh=mesh,
                settings=parse_settings([*changes, *job.settings_of(number)]),
            )
            work = _planned(kind, request)
            if work.most_ranks > ranks:
                raise UserError(
                    f"{run_file} has jobs of {work.most_ranks} ranks; --nodes times "
                    f"--ranks-per-node is {ranks}"
                )
        except UserError as error:
            raise _in_row(table, number, error) from error
        memory = max(memory, work.estimate.memory)
        if work.is_complete:
            complete.append(number)
    if len(complete) == max(1, job.elements):
        raise UserError(
            f"{job.output}{'-*' if job.elements else ''}: the work is complete; remove it to start "
            "again, or give another --output"
        )
    if job.alone:  # what the ranks of its runs take is not known
        return job
    node = human_size(Estimate(ranks, job.ranks_per_node, memory).on_host)
    return dataclasses.replace(job, complete=complete, memory=node)


def _planned(kind: Any, request: Request) -> Any:
    try:
        return kind.plan(request)
    except OutputError:
        try:  # complete work has nothing left by which the script could resume it
            found = kind.plan(dataclasses.replace(request, resume=True))
        except UserError:
            found = None
        if found is None or not found.is_complete:
            raise
        return found
    except UserError as error:
        if "--ranks " not in str(error):
            raise
        raise UserError(f"{error}\n(here --ranks is --nodes times --ranks-per-node)") from None


def _prepare(kind: Any, run_file: Path, output: Path, changes: Sequence[str]) -> None:
    """Begin the folder of a study, so that its workers can join each other in it."""
    if any(output.glob(kind.folder_type.begun)):
        return
    kind.plan(Request(run_file, 1, output, settings=parse_settings(changes))).prepare()


def _described(job: batch.BatchJob) -> str:
    ranks = job.nodes * job.ranks_per_node
    size = f"{ranks} rank{'s' * (ranks > 1)} on {job.nodes} node{'s' * (job.nodes > 1)}"
    size += f", {human_time(batch.seconds_of(job.time))}"
    size += f", about {job.memory} of memory a node" if job.memory else ""
    if job.workers:
        return f"{job.workers} workers, each with {size}"
    if not job.elements:
        return size
    left = job.elements - len(job.complete)
    size = f"{left} job{'s' * (left > 1)} of {size}"
    return f"{size}; {len(job.complete)} are complete" if job.complete else size


def _submit(path: Path) -> None:
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        common.refuse(f"there is no sbatch here: submit {path} where Slurm is", status=1)
    except subprocess.TimeoutExpired:
        common.refuse(
            "sbatch has not answered within two minutes: see whether Slurm runs", status=1
        )
    if done.returncode:
        # Slurm's own words name the option.
        common.refuse(f"{done.stderr.strip()}\nWhat is always the same here belongs in "
                      f"{batch.default_site_file()}", status=1)  # fmt: skip
    print(done.stdout.strip())
