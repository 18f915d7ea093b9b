"""The command `flowpm-dist submit`: a job script for Slurm, written and submitted."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flowpm_dist.cli import batch, common
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import WriteError, write_text
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.job import JOBS, PROGRAM, REST_OF_A_SEARCH, Request, job_class
from flowpm_dist.jobs.run_file import Settings, write_run_file
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulation.cost import process_bytes
from flowpm_dist.simulation.demand import Estimate, human_time
from flowpm_dist.studies.rows import Rows
from meshimpl import launch

EXAMPLE = (
    "flowpm-dist submit simulate run.toml --nodes 4 --ranks-per-node 8 --time "
    "02:00:00 --array initial.seed=0-9"
)

_SUFFIXES = {"dataset": "dataset", "evaluate": "evaluation", "predict": "prediction"}
"""Commands that always begin anew -> the ends of their scripts' names."""

Command = StrEnum("Command", [*JOBS, *_SUFFIXES])  # type: ignore[misc] # not a literal

Threads = Annotated[
    int | None, typer.Option(min=1, help="Cores of each rank; by default the site's.")
]
Gpus = Annotated[
    int | None, typer.Option(min=0, max=1, help="GPUs of each rank; by default the site's.")
]
OfSite = Annotated[str | None, typer.Option(help="Instead of the site file's.")]
Operands = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN.TOML [-- OPTIONS]",
        help="Its run file; trainings for evaluate, a training and a volume for predict. "
        "Options of dataset, evaluate and predict come last, after --.",
    ),
]
Array = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SECTION.KEY=VALUES",
        help="A job for each value, such as initial.seed=0-9 or evolution.steps=5,10,20; "
        "repeated, for each combination.",
    ),
]
SitePath = Annotated[
    Path | None,
    typer.Option(
        metavar="SITE.TOML",
        help="What is always the same here; by default ~/.config/flowpm-dist/site.toml.",
    ),
]
TimeLimit = Annotated[
    str, typer.Option(metavar="HH:MM:SS", help="Time limit; the rest is queued again.")
]
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the results.")]
AtOnce = Annotated[
    int, typer.Option(min=0, help="Jobs of an array that may run at one time; 0: all.")
]
Workers = Annotated[int, typer.Option(min=0, help="Jobs that do a study together; 0: one job.")]
Script = Annotated[Path | None, typer.Option(metavar="FILE", help="By default DIR.sbatch.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write the script, and submit nothing.")]


def submit(
    command: Annotated[Command, typer.Argument(help="What the job does.")],
    operands: Operands,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")],
    ranks_per_node: Annotated[int, typer.Option(min=1, help="MPI ranks on each node.")],
    time: TimeLimit,
    threads: Threads = None,
    gpus_per_rank: Gpus = None,
    partition: OfSite = None,
    account: OfSite = None,
    qos: OfSite = None,
    output: Output = None,
    array: Array = None,
    at_once: AtOnce = 0,
    workers: Workers = 0,
    table: common.Table = None,
    mesh: Annotated[str | None, common.mesh_option("row:4,col:8")] = None,
    changes: common.Set = None,
    site: SitePath = None,
    script: Script = None,
    dry_run: DryRun = False,
) -> None:
    """Write a script for Slurm's sbatch and submit it: several hosts, time limits, many seeds."""
    of_site = {"threads": threads, "gpus_per_rank": gpus_per_rank, "partition": partition}
    of_site |= {"account": account, "qos": qos}
    with common.planning():
        options = batch.load_site(site).model_copy(
            update={name: value for name, value in of_site.items() if value is not None}
        )
        _check_site(options, ranks_per_node)
        paths, further = _operands(command, operands)
        results = (output or _default_results(command, paths[0])).absolute()
        if not results.name:
            raise UserError(f"--output {output}: must be a folder with a name")
        job = batch.BatchJob(
            command=command,
            paths=[path.absolute() for path in paths],
            options=further,
            results=results,
            has_output=command in (*JOBS, "dataset") or output is not None,
            mesh=mesh,
            rows=Rows.read(changes or [], table, array or []),
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            time=time,
            site=options,
            at_once=at_once,
            workers=workers,
        )
        job, works = _checked(job, paths[0], elsewhere=dry_run)
        path = script or Path(os.path.relpath(results.with_name(f"{results.name}.sbatch")))
        _write(path, job.script())
        if workers and not works[0].request.resume:  # so that the workers can join each other in it
            _begin_folder(works[0])
    print(f"{path}: {_described(job)}")
    for line in _costs(job, [work for work in works if not work.is_complete]):
        print(line)
    if not dry_run:
        _submit(path)


def _operands(command: Command, words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Returns the files and folders that a command works on, and its own options.

    Raises:
        UserError: there are too many.
    """
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    paths, options = [Path(word) for word in words[:count]], list(words[count:])
    most = {"evaluate": len(paths), "predict": 2}.get(command, 1)
    if not 0 < len(paths) <= most or (command in JOBS and options):
        wrong = shlex.join(words[most:] if paths else words)
        raise UserError(f"submit {command}: cannot take {wrong}")
    return paths, options


def _default_results(command: Command, first: Path) -> Path:
    if command in ("evaluate", "predict"):
        return Path(f"{first.absolute().name}-{_SUFFIXES[command]}")
    if command in JOBS:
        return job_class(command).folder_type.default_path(first)
    return Path(f"{first.stem}-{_SUFFIXES[command]}")


def _check_site(options: batch.SiteOptions, ranks_per_node: int) -> None:
    """Checks the launcher, and that no two ranks get one GPU, if Horovod carries messages by NCCL.

    Raises:
        UserError: ranks could not begin.
    """
    if options.launcher == "srun" and not options.program:
        launch.check_srun_mpi(options.mpi)
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


def _check_datasets(job: batch.BatchJob, run_file: Path) -> None:
    """Checks the settings of each job of an array of datasets.

    Raises:
        UserError: some could not begin.
    """
    from flowpm_dist.cosmoflow.planning.memory import check_training_mesh
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

    def plan(folder: Path, settings: Settings) -> None:
        options = TrainingPlan.load(run_file, settings)
        check_training_mesh(options, job.ranks, source=run_file, shape=job.mesh)

    job.rows.planned(job.results, plan)


def _try(job: batch.BatchJob, first: Path, *, elsewhere: bool) -> None:
    """Lets a command check its arguments; for an array, the arguments of its first job.

    Args:
        job: the job.
        first: path of its run file or training.
        elsewhere: see `Request`.

    Raises:
        UserError: it could not begin.
    """
    words = []
    if job.elements:
        if job.command != "dataset":
            raise UserError(f"--array: {job.command} has no run file of its own")
        _check_datasets(job, first)
        words += [word for text in job.rows.texts(0) for word in ("--set", text)]
    if job.output:
        words += ["--output", f"{job.output}-0" if job.elements else job.output]
    words += ["--ranks", str(job.ranks), "--check", "--ignore-memory"]
    if elsewhere and job.command in ("dataset", "evaluate"):  # the others need no room
        words.append("--elsewhere")
    done = subprocess.run([*PROGRAM, *job.words, *words], capture_output=True, text=True)
    if done.returncode:
        message = done.stderr.strip().removeprefix("error: ")
        usage = f"submit {job.command}: {message}"
        raise UserError(usage if message.startswith("Usage") else message)


def _checked(
    job: batch.BatchJob, run_file: Path, *, elsewhere: bool
) -> tuple[batch.BatchJob, list[Any]]:
    """Returns the job without the work that is complete, and the work of each job that can resume.

    Args:
        job: the job.
        run_file: path of the run file, or of the first file or folder that it works on.
        elsewhere: see `Request`.

    Raises:
        UserError: some work could not begin, or all is complete.
    """
    if job.kind is None:
        _try(job, run_file, elsewhere=elsewhere)
        return job, []
    works = _planned(job, job.kind, run_file, elsewhere=elsewhere)
    return _without_complete(job, works), works


def _planned(job: batch.BatchJob, kind: Any, run_file: Path, *, elsewhere: bool) -> list[Any]:
    """Returns the work of each job, which is checked as by its own command.

    Args:
        job: the job.
        kind: its class.
        run_file: path of the run file.
        elsewhere: see `Request`.

    Raises:
        UserError: some could not begin.
    """
    ranks = 1 if job.alone else job.ranks

    def plan(folder: Path, settings: Settings) -> Any:
        resume = any(folder.glob(job.begun))
        request = Request(
            run_file, ranks, folder, resume, mesh=job.mesh, settings=settings, elsewhere=elsewhere
        )
        try:
            work = kind.plan(request)
        except OutputError:
            try:  # complete work has nothing left by which the script could resume it
                work = kind.plan(dataclasses.replace(request, resume=True))
            except UserError:
                work = None
            if work is None or not work.is_complete:
                raise
        except UserError as error:
            if "--ranks " not in str(error):
                raise
            hint = "(here --ranks is --nodes times --ranks-per-node)"
            raise UserError(f"{error}\n{hint}") from None
        if (most := work.costs.ranks or work.ranks) > job.ranks:
            raise UserError(
                f"{run_file} has jobs of {most} ranks; --nodes times "
                f"--ranks-per-node is {job.ranks}"
            )
        return work

    return job.rows.planned(job.results, plan)


def _without_complete(job: batch.BatchJob, works: Sequence[Any]) -> batch.BatchJob:
    """Returns the job without the work that is complete, and with the memory of a node.

    Raises:
        UserError: all is complete.
    """
    complete = [number for number, work in enumerate(works) if work.is_complete]
    if len(complete) == len(works):
        raise UserError(
            f"{job.output}{'-*' if job.elements else ''}: the work is complete; remove it to start "
            "again, or give another --output"
        )
    if job.alone:  # what the ranks take is not known
        return job
    memory = max(work.costs.estimate.memory for work in works)
    node = human_size(Estimate(job.ranks, job.ranks_per_node, memory).on_host)
    return dataclasses.replace(job, complete=complete, memory=node)


def _begin_folder(work: Any) -> None:
    """Begin the folder of a job, so that several processes can resume the job together."""
    work.folder.begin()
    write_run_file(work.folder.run_file, work.options.resolved())
    work.folder.release()


def _write(path: Path, text: str) -> None:
    """Writes a script, unless a user has edited the one that is there.

    Raises:
        UserError: it was edited, or cannot be written.
    """
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


def _described(job: batch.BatchJob) -> str:
    size = f"{job.ranks} rank{'s' * (job.ranks > 1)} on {job.nodes} node{'s' * (job.nodes > 1)}"
    size += f", {human_time(batch.seconds_of(job.time))}"
    size += f", about {job.memory} of memory a node" if job.memory else ""
    if job.workers:
        return f"{job.workers} workers, each with {size}"
    if not job.elements:
        return size
    left = job.elements - len(job.complete)
    size = f"{left} job{'s' * (left > 1)} of {size}"
    return f"{size}; {len(job.complete)} are complete" if job.complete else size


def _costs(job: batch.BatchJob, works: Sequence[Any]) -> Iterator[str]:
    """Yields lines on the checkpoints and disk space of all jobs left, and the time of one."""
    if not works:
        return
    costs, options = [work.costs for work in works], [work.options for work in works]
    if job.command == "simulate" and not all(each.output.checkpoint_every for each in options):
        yield job.checkpoint_warning
    yield f"disk: at most {human_size(sum(each.disk for each in costs))}"
    if job.alone:
        return
    if job.site.gpus_per_rank or batch.gpus_of_a_node(job.site.directives):
        fields = max(0, max(each.estimate.memory for each in costs) - process_bytes({}))
        text = f"memory of a GPU: about {human_size(fields)}, counted and not measured on one"
        yield f"{text}; a node's {job.memory} include it for each rank"
        yield "time: not known, as speeds are scaled by cores alone"
        return
    cores, longest = job.ranks * (job.site.threads or 1), (0.0, "")
    for each in costs:
        left = [pieces for pieces in each.pieces if pieces.left != 0]
        if any(pieces.left is None for pieces in left):
            yield f"time: {REST_OF_A_SEARCH}"
            return
        times = [pieces.scaled_seconds(cores) for pieces in left]
        if None in times:
            yield "time: not known, as no such job was complete on a host with this cache"
            return
        if not times:
            continue
        longest = max(longest, (sum(seconds for seconds, _ in times), times[0][1]))
    seconds, where = longest
    if not where:  # only results are left to be written
        return
    limit = batch.seconds_of(job.time)
    parts = f", in parts of {human_time(limit)}" if seconds > limit else ""
    text = f"time: about {human_time(seconds)}{' each' * (len(works) > 1)}{parts}"
    yield f"{text}, if the speed grows with the cores from {where}"


def _submit(path: Path) -> None:
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        common.refuse(f"there is no sbatch here: submit {path} where Slurm is", status=1)
    except subprocess.TimeoutExpired:
        common.refuse("sbatch has not answered within two minutes: does Slurm run?", status=1)
    if done.returncode:
        # Slurm's own words name the option.
        common.refuse(f"{done.stderr.strip()}\nWhat is always the same here belongs in "
                      f"{batch.default_site_file()}", status=1)  # fmt: skip
    print(done.stdout.strip())
