"""The base of all jobs: checks a run file, estimates its costs, does, stops and resumes the work.

A job consists of two files in its own room, and a line in `JOBS`, at the end of this file. One file
holds its options, a `RunFile`, which is also the plan of the work. The other file holds its folder
and its work:

    class CountFolder(WorkFolder):
        kind = "count"
        contents = ("count.json", "run.toml", "checkpoints")  # the first is the folder's mark

    class CountJob(Job[CountOptions, int]):
        name, help = "count", "Count to a number."
        options_type, folder_type = CountOptions, CountFolder

        @property
        def demand(self) -> Demand: ...

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.files import only_in
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES, JobFolder, WorkFolder, numbered_checkpoints
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, changed, record_of_work
from flowpm_dist.jobs.run_file import ConfigError, Settings, write_run_file
from flowpm_dist.options import Options, Problem
from flowpm_dist.simulation.cost import STARTER, kind_of, measured_seconds, record_rate
from flowpm_dist.simulation.demand import Demand, Estimate
from meshimpl import launch

PROGRAM = [sys.executable, "-P", "-m", "flowpm_dist.cli"]
"""The command flowpm-dist of this Python, which imports nothing in place of its own modules."""


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
    """

    run_file: Path
    ranks: int
    output: Path
    resume: bool = False
    overwrite: bool = False
    mesh: str | None = None
    settings: Settings = field(default_factory=dict)


OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")


class Job(ABC, Generic[OptionsT, ResultT]):
    """A job whose run file was checked, so that its work can begin.

    Args:
        options: the checked run file, with the mesh of this job.
        mesh: shape of the mesh of ranks.
        request: the arguments on the command line.
    """

    name: ClassVar[str]
    """The command."""
    help: ClassVar[str]
    """What the command does, in a sentence."""
    asks: ClassVar[str] = "The run file."
    """What the run file says, in a sentence."""
    example: ClassVar[str] = ""
    """A command line."""
    mesh_example: ClassVar[str] = "row:2,col:2"
    options_type: ClassVar[type[Options]]
    """The model of the run file."""
    folder_type: ClassVar[type[JobFolder]]
    suffix: ClassVar[str] = ""
    """What folders are named after where that is not the kind of the work."""
    unit: ClassVar[str] = "step"
    """What checkpoints are counted in."""
    counted: ClassVar[str] = ""
    """What `Progress` is given as the name of the work's steps, which `--trace` records; empty if
    all its counts are steps."""
    takes_tables: ClassVar[bool] = False
    """Whether one process does the job for each row of a table."""
    starts_jobs: ClassVar[bool] = False
    """Whether the work is to start other jobs: it has one process, and loads no TensorFlow."""

    def __init__(self, options: OptionsT, mesh: str, request: Request) -> None:
        self.options, self.mesh = options, mesh
        self.resume, self.overwrite = request.resume, request.overwrite
        self.run_file, self.folder = request.run_file, self.make_folder(request.output)
        self.stopped_by: str | None = None
        """The signal that came after the last step, while results were written."""

    @classmethod
    def named(cls) -> str:
        """Returns the word that the default name of a folder adds to the run file's name."""
        return cls.suffix or cls.folder_type.kind

    @classmethod
    def plan(cls, request: Request) -> Self:
        """Returns the job for a command line, after all checks that need no TensorFlow.

        Raises:
            UserError: the work cannot begin; the message says why, and what to do about it.
        """
        model: Any = cls.options_type
        options = model.load(request.run_file, request.settings)
        mesh = cls.choose_mesh(options, request.ranks, source=request.run_file, shape=request.mesh)
        job = cls(options.with_mesh(mesh), mesh, request)
        # Rank 0 alone looks: soon it writes there.
        if launch.detect().rank == 0:
            job.check()
        return job

    @classmethod
    def choose_mesh(
        cls, options: OptionsT, ranks: int, *, source: Path, shape: str | None = None
    ) -> str:
        """Returns the mesh's shape: the given one, else the run file's, else one that fits.

        Args:
            options: the checked run file.
            ranks: number of ranks of the job.
            source: path of the run file, for messages.
            shape: value of `--mesh`.

        Raises:
            ConfigError: the shape does not fit.
        """
        plan: Any = options
        return str(plan.mesh_for(ranks, source=source, shape=shape))

    def make_folder(self, path: Path) -> Any:
        """Returns the folder of the work, a `folder_type`."""
        return self.folder_type(path)

    def check(self) -> None:
        """Check that the work can begin or be resumed in its folder, without changing anything.

        Raises:
            OutputError: the folder cannot take the work.
            ConfigError: the run file describes other work than the work in the folder, or its input
                files have other values than then.
        """
        self.folder.check(resume=self.resume, overwrite=self.overwrite, needed=self.disk)
        if not self.resume:
            return
        options: Any = self.options
        begun = f"the {self.kind} in {self.folder.path}"
        if self.folder.run_file.exists():
            options.check_resumed(self.folder.run_file, self.run_file, begun)
        if then := self.folder.checksums():
            what = f"it has other values than when {begun} was begun"
            problems = [
                Problem(key, f'= "{options.files[key]}": {what}')
                for key, found in options.checksums().items()
                if then.get(key, found) != found
            ]
            if problems:
                raise ConfigError(self.run_file, problems)

    @property
    def kind(self) -> str:
        """What the work is called."""
        return self.folder_type.kind

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(parse_mesh(self.mesh, batched=True).values())

    @property
    def most_ranks(self) -> int:
        """The number of ranks that the work, or the jobs that it starts, need at one time."""
        return self.ranks

    def prepare(self) -> None:
        """Begin the folder, so that several processes can resume the job together."""
        self.folder.begin(resume=self.resume, overwrite=self.overwrite)
        write_run_file(self.folder.run_file, self.resolved)
        self.folder.release()

    @abstractmethod
    def describe(self) -> str:
        """Returns a line that says what the work is."""

    @property
    def meshes(self) -> tuple[str, ...]:
        """Shapes of all meshes of ranks that the work uses."""
        return (self.mesh,)

    @property
    def resolved(self) -> str:
        """The run file with all its settings."""
        options: Any = self.options
        return str(options.resolved())

    @property
    @abstractmethod
    def demand(self) -> Demand | None:
        """The memory that the work needs, and settings that need less; None if it starts jobs."""

    @property
    def disk(self) -> int:
        """The largest size that all files of the work can have together [bytes]."""
        return FIGURES_AND_TABLES

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user, printed before the work begins."""
        return ()

    @property
    def rate_name(self) -> str:
        """Name under which the speed is kept; jobs with the same name are comparable."""
        return self.name

    @property
    @abstractmethod
    def cells(self) -> int:
        """The number of cells in one piece of the work; the duration is proportional to it."""

    @property
    def remaining(self) -> int | None:
        """The number of pieces that are left, such as steps; None if it is not known."""
        return None

    def seconds_per_piece(self, result: ResultT) -> float | None:
        """Returns the duration of a piece of complete work, on rank 0; None if it is not known."""
        return None

    @property
    def _rate_kind(self) -> str:
        return kind_of(self.rate_name, self.ranks)

    @property
    def estimate(self) -> Estimate:
        """The memory, disk space and time that the work will need."""
        left = self.remaining
        seconds = None if left is None else measured_seconds(self._rate_kind, self.cells, left)
        demand = self.demand
        if demand is None:
            return Estimate(1, 1, STARTER, self.disk, seconds)
        return demand.estimate(self.disk, seconds)

    def remember(self, result: ResultT) -> None:
        """Keep the speed of the complete work for the next estimate. Called on rank 0."""
        if (seconds := self.seconds_per_piece(result)) is not None:
            record_rate(self._rate_kind, self.cells, seconds / self.cells)

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """Returns the folder of the latest checkpoint and when it was made, such as "step 3"."""
        folder = self.folder.checkpoints
        numbers = numbered_checkpoints(folder, self.unit)
        return (folder, f"{self.unit} {numbers[-1]}") if numbers else None

    def saved(self) -> str:
        """Returns a sentence about the existing checkpoints, for a user whose work was stopped."""
        last = self.last_checkpoint()
        if last is None:
            return "there is no checkpoint yet"
        folder, place = last
        return (
            f"the checkpoints in {folder} are intact, the last after {place}: go on with --resume"
        )

    def during_tensorflow_import(self) -> AbstractContextManager[None]:
        """Returns a context around the import of TensorFlow, to do other work in the meantime."""
        return nullcontext()

    @abstractmethod
    def work(self, progress: Progress) -> ResultT:
        """Do this rank's part of the work. The folder exists, and TensorFlow is imported.

        What only shows the results, such as figures, is made when they are complete and marked so,
        each inside a `flowpm_dist.io.errors.decoration`, and imports matplotlib there.

        Raises:
            StopError: a signal stopped the work; the results so far are saved.
        """

    @abstractmethod
    def report(self, result: ResultT) -> str:
        """Returns the message that is printed when the work is complete."""

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.resume and bool(self.folder.is_complete)

    def complete_message(self) -> str:
        """Returns the message that is printed when nothing is left to do."""
        return f"The {self.kind} in {self.folder.path} is complete."

    @classmethod
    def record(cls, path: Path) -> RunRecord | None:
        """Returns the entry of a folder in `flowpm-dist runs`; None if it holds no such job."""
        folder = cls.folder_type(path)
        return record_of_work(folder) if isinstance(folder, WorkFolder) else None


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
    found: type[Job[Any, Any]] = _object(JOBS[command])
    return found


def command_of(sections: set[str]) -> str:
    """Returns the command whose run files have these sections, or the most of them."""
    return max(JOBS, key=lambda name: len(sections & {*job_class(name).options_type.model_fields}))


def read_record(folder: Path) -> RunRecord | None:
    """Returns what is in the folder of a job; None if it is none, or may not be read.

    What symbolic links lead to outside the folder is not read.
    """
    readers = [*(job_class(name).record for name in JOBS), *map(_object, OTHER_RECORDS)]
    try:
        with only_in(folder):
            return next((found for read in readers if (found := read(folder)) is not None), None)
    except PermissionError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return RunRecord(folder, "-", "damaged", "", changed(folder), {"error:": str(error)})


def records_in(folder: Path) -> list[RunRecord]:
    """Returns what is in the folder of a job, or in the folders inside a folder, by name."""
    if (record := read_record(folder)) is not None:
        return [record]
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [record for path in inside if (record := read_record(path)) is not None]


def _object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
