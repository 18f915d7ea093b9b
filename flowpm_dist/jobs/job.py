"""The base of all jobs, and the list of the jobs.

A job is added by its run file, its work, and a line in `JOBS`. Its run file is a `RunFile`, whose
`mesh_for` chooses the mesh of ranks. Its work is a class that says what it is, besides its folder:

    class CountFolder(WorkFolder):
        kind = "count"
        contents = ("count.json", "run.toml", "checkpoints")  # the first is the folder's mark

    class CountJob(Job[CountOptions, int]):
        command = Command("count", "Count to a number.")
        options_type, folder_type = CountOptions, CountFolder

        def describe(self) -> str: ...

        @property
        def costs(self) -> Costs: ...

        def work(self, progress: Progress) -> int: ...  # raises StopError where a signal stopped it

        def report(self, result: int) -> str: ...

The command line (`flowpm-dist count RUN.TOML --ranks --resume ...`), `--check`, `submit`, `runs`
and `flowpm_dist.run` follow from the class. Nothing here imports TensorFlow before the work begins.
"""

from __future__ import annotations

import importlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES, JobFolder
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, changed
from flowpm_dist.jobs.run_file import ConfigError, RunFile, Settings
from flowpm_dist.options import Problem
from flowpm_dist.options.regular_files import only_in
from flowpm_dist.simulation.cost import STARTER
from flowpm_dist.simulation.demand import Demand, Estimate
from flowpm_dist.simulation.speeds import COMPARABLE, Pieces
from meshimpl import launch

PROGRAM = [sys.executable, "-P", "-m", "flowpm_dist.cli"]
"""The command flowpm-dist of this Python; modules in the current folder are not imported."""
REST_OF_A_SEARCH = "not known, as the rest of a search may take any number of gradients"
"""Why there is no estimate of the time of a resumed search."""


class StopError(Exception):
    """A signal stopped a job; what was done is saved.

    Attributes:
        signal: name of the signal.
        place: the place where it was stopped, such as "after step 3 of 10".
    """

    def __init__(self, signal: str = "", place: str = "") -> None:
        super().__init__(signal, place)
        self.signal, self.place = signal, place


@dataclass(frozen=True)
class Request:
    """The arguments on the command line of a job.

    Attributes:
        run_file: path of the TOML file.
        ranks: number of ranks of the job.
        output: folder of the work.
        resume: whether the work in the folder is resumed.
        overwrite: whether other work in the folder may be replaced.
        mesh: shape of the mesh; replaces the shape in the run file.
        settings: values that replace values in the run file.
        elsewhere: whether the disk is not checked for room, as the work is not done here, or not
            yet.
        is_row: whether the work is a row of a table, whose steps nobody follows.
    """

    run_file: Path
    ranks: int
    output: Path
    resume: bool = False
    overwrite: bool = False
    mesh: str | None = None
    settings: Settings = field(default_factory=dict)
    elsewhere: bool = False
    is_row: bool = False


@dataclass(frozen=True)
class Command:
    """The command of a job.

    Attributes:
        name: what a user types.
        help: what it does, in a sentence.
        run_file: what the run file says, in a sentence.
        example: a command line.
        mesh_example: a shape of the mesh of ranks.
        steps: what `Progress` is given as the name of the work's steps, which `--trace` records;
            empty if all its counts are steps.
        takes_tables: whether one process does the job for each row of a table.
        starts_jobs: whether the work is to start other jobs: it has one process, and loads no
            TensorFlow.
    """

    name: str
    help: str
    run_file: str = "The run file."
    example: str = ""
    mesh_example: str = "row:2,col:2"
    steps: str = ""
    takes_tables: bool = False
    starts_jobs: bool = False


@dataclass(frozen=True)
class Costs:
    """What the work of a job takes.

    Attributes:
        demand: the memory, and settings that need less; None if the work is to start other jobs
            whose memory is not known.
        disk: the largest size that all files can have together [bytes].
        pieces: the pieces of the work; the first are the main ones.
        ranks: the largest number of ranks of the jobs that it starts at one time; None if it
            starts none.
        warnings: where that is too little, or more than the hardware has.
    """

    demand: Demand | None
    disk: int = FIGURES_AND_TABLES
    pieces: tuple[Pieces, ...] = ()
    ranks: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def estimate(self) -> Estimate:
        """The memory, disk space and time that the work will take."""
        if self.demand is None:
            return Estimate(1, 1, STARTER, self.disk)
        times = [pieces.seconds(self.demand.ranks) for pieces in self.pieces]
        known = [seconds for seconds in times if seconds is not None]
        total = sum(known) if known and len(known) == len(times) else None
        return self.demand.estimate(self.disk, total)

    @property
    def why_no_time(self) -> str:
        """Why the `estimate` has no time; empty where it has one, or where it never has."""
        if not self.pieces or self.estimate.seconds is not None:
            return ""
        if any(pieces.left is None for pieces in self.pieces):
            return REST_OF_A_SEARCH
        return (
            "no estimate yet. Each complete job records its speed on this host, for jobs with as "
            f"many ranks and threads and up to {COMPARABLE} times more or fewer cells"
        )

    def remember(self, seconds: Mapping[str, float]) -> None:
        """Keep the speed of complete work for the next estimates. On rank 0.

        Args:
            seconds: the duration of a piece by the name of the pieces [s].
        """
        for pieces in self.pieces:
            if self.demand is not None and pieces.name in seconds:
                pieces.remember(seconds[pieces.name], self.demand.ranks)


OptionsT = TypeVar("OptionsT", bound=RunFile)
ResultT = TypeVar("ResultT")


class Job(ABC, Generic[OptionsT, ResultT]):
    """A job whose run file was checked, so that its work can begin.

    Args:
        options: the checked run file, with the mesh of this job.
        mesh: shape of the mesh of ranks.
        request: the arguments on the command line.

    Attributes:
        folder: the folder of the work.
        stopped_by: the signal that came after the last step, while results were written.
    """

    command: ClassVar[Command]
    options_type: ClassVar[type[RunFile]]
    """The model of the run file."""
    folder_type: ClassVar[type[JobFolder]]

    def __init__(self, options: OptionsT, mesh: str, request: Request) -> None:
        self.options, self.mesh, self.request = options, mesh, request
        self.folder: Any = self.folder_type(request.output)
        self.stopped_by: str | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(parse_mesh(self.mesh, batched=True).values())

    @abstractmethod
    def describe(self) -> str:
        """Returns a line that says what the work is."""

    @property
    @abstractmethod
    def costs(self) -> Costs:
        """What the work takes."""

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.request.resume and bool(self.folder.is_complete)

    @classmethod
    def plan(cls, request: Request) -> Self:
        """Returns the job for a command line, after all checks that need no TensorFlow.

        Raises:
            UserError: the work cannot begin; the message says why, and what to do about it.
        """
        options: Any = cls.options_type.load(request.run_file, request.settings)
        mesh = options.mesh_for(request.ranks, source=request.run_file, shape=request.mesh)
        job = cls(options.with_mesh(mesh), mesh, request)
        # Rank 0 alone looks: soon it writes there.
        if launch.detect().rank == 0:
            job.check()
        return job

    def check(self) -> None:
        """Check that the work can begin or be resumed in its folder, without changing anything.

        Raises:
            OutputError: the folder cannot take the work.
            ConfigError: the run file describes other work than the work in the folder, or its input
                files have other values than then.
        """
        request, folder, options = self.request, self.folder, self.options
        needed = 0 if request.elsewhere else self.costs.disk
        folder.check(resume=request.resume, overwrite=request.overwrite, needed=needed)
        if not request.resume:
            return
        begun = f"the {folder.kind} in {folder.path}"
        if folder.run_file.exists():
            options.check_resumed(folder.run_file, request.run_file, begun)
        if then := folder.checksums():
            reason = f"it has other values than when {begun} was begun"
            problems = [
                Problem(key, f'= "{options.files[key]}": {reason}')
                for key, checksum in options.checksums().items()
                if then.get(key, checksum) != checksum
            ]
            if problems:
                raise ConfigError(request.run_file, problems)

    def while_loading(self) -> AbstractContextManager[None]:
        """Returns a context around the import of TensorFlow, to do other work in the meantime."""
        return nullcontext()

    @abstractmethod
    def work(self, progress: Progress) -> ResultT:
        """Do this rank's part of the work. TensorFlow is imported.

        The folder was begun on rank 0, which writes what is not of each rank. Other ranks pass a
        barrier before they read or write there.

        What only shows the results, such as figures, is made when they are complete and marked so,
        each inside a `flowpm_dist.io.errors.decoration`, and imports matplotlib there.

        Raises:
            StopError: a signal stopped the work; the results so far are saved.
        """

    @abstractmethod
    def report(self, result: ResultT) -> str:
        """Returns the message that is printed when the work is complete."""

    def speeds(self, result: ResultT) -> Mapping[str, float]:
        """Returns the duration of a piece of complete work by name of its `Pieces` [s].

        It is called on rank 0.
        """
        return {}


JOBS = {
    "simulate": "flowpm_dist.simulate.job:SimulationJob",
    "reconstruct": "flowpm_dist.reconstruction.work:ReconstructionJob",
    "train": "flowpm_dist.cosmoflow.training.job:TrainingJob",
    "emulate": "flowpm_dist.emulate.job:EmulationJob",
    "study": "flowpm_dist.studies.study:StudyJob",
    "tune": "flowpm_dist.studies.tuning.job:TuneJob",
}
"""Command -> module and name of its class."""

OTHER_RECORDS = (
    "flowpm_dist.cosmoflow.training.dataset:record",
    "flowpm_dist.cosmoflow.planning.folder:record_of_evaluation",
)
"""Functions that read the folders of other commands, as "module:name"."""


def job_class(command: str) -> type[Job[Any, Any]]:
    """Returns the class of a command's jobs."""
    job: type[Job[Any, Any]] = _object(JOBS[command])
    return job


def command_of(sections: set[str]) -> str:
    """Returns the command whose run files have these sections, or the most of them."""
    return max(JOBS, key=lambda name: len(sections & {*job_class(name).options_type.model_fields}))


def read_record(folder: Path) -> RunRecord | None:
    """Returns the record of a job's folder; None if it is no such folder, or may not be read.

    What symbolic links lead to outside the folder is not read.
    """
    try:
        with only_in(folder):
            for name in JOBS:
                if (record := job_class(name).folder_type(folder).record()) is not None:
                    return record
            others = (_object(name)(folder) for name in OTHER_RECORDS)
            return next((record for record in others if record is not None), None)
    except PermissionError:
        return None
    except Exception as error:  # whatever damaged files make the readers raise
        return RunRecord(folder, "-", "damaged", "", changed(folder), {"error:": str(error)})


def records_in(folder: Path) -> list[RunRecord]:
    """Returns the record of a job's folder, or the records of the folders in it, by name."""
    if (record := read_record(folder)) is not None:
        return [record]
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [record for path in inside if (record := read_record(path)) is not None]


def _object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
