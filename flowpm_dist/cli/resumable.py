"""What commands share whose work can be stopped and resumed: planning, beginning and ending."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import typer

from flowpm_dist.cli.common import begin_job, default_output, job, job_size, planning, stoppable
from flowpm_dist.cli.preview import Preview
from flowpm_dist.config.checks import check_resumed
from flowpm_dist.config.settings import Settings, parse_settings
from flowpm_dist.jobs.estimate import Demand, Estimate
from flowpm_dist.jobs.folder import JobFolder, OutputError
from flowpm_dist.jobs.progress import Progress
from meshimpl import launch


class Outcome(Protocol):
    """How a session of a resumable job ended."""

    @property
    def stopped_by(self) -> str | None:
        """Name of the signal that ended the session before the work was complete."""

    @property
    def stopped_at(self) -> str:
        """Where the session was stopped, such as "after step 3 of 10"."""


@dataclass(frozen=True)
class Request:
    """What a command line asks of a resumable job.

    Attributes:
        run_file: TOML file.
        ranks: number of ranks of the job.
        output: folder of the work.
        resume: whether the work in the folder is resumed.
        overwrite: whether other work in the folder may be replaced.
        mesh: shape of the mesh, instead of the run file's.
        settings: values in place of the run file's own.
    """

    run_file: Path
    ranks: int
    output: Path
    resume: bool = False
    overwrite: bool = False
    mesh: str | None = None
    settings: Settings = field(default_factory=dict)


ConfigT = TypeVar("ConfigT")
FolderT = TypeVar("FolderT", bound=JobFolder)
OutcomeT = TypeVar("OutcomeT", bound=Outcome)


class ResumableJob(ABC, Generic[ConfigT, FolderT, OutcomeT]):
    """Work that was checked and can begin.

    Args:
        config: the checked run file.
        mesh: shape of the mesh of ranks.
        folder: of the work.
        asked: the command line.
    """

    kind: ClassVar[str]
    """What the work is called."""
    suffix: ClassVar[str] = ""
    """What folders are named after that are not named after the kind."""
    begun: ClassVar[str]
    """See `JobFolder.begun`."""

    def __init__(self, config: ConfigT, mesh: str, folder: FolderT, asked: Request) -> None:
        self.config, self.mesh, self.folder = config, mesh, folder
        self.run_file, self.resume, self.overwrite = asked.run_file, asked.resume, asked.overwrite

    @classmethod
    @abstractmethod
    def plan(cls, asked: Request) -> Self:
        """Check everything that can be checked before the work begins.

        Raises:
            UserError: the work cannot begin; the message says why, and what to do about it.
        """

    @abstractmethod
    def describe(self) -> str:
        """Returns a line that says what the work is."""

    @property
    def meshes(self) -> tuple[str, ...]:
        """Shapes of all meshes of ranks that the work uses."""
        return (self.mesh,)

    @property
    @abstractmethod
    def resolved(self) -> str:
        """The run file with all its settings."""

    @property
    @abstractmethod
    def demand(self) -> Demand:
        """The memory that the work takes, and what would take less."""

    @property
    @abstractmethod
    def estimate(self) -> Estimate:
        """What the work will take."""

    @property
    def preview(self) -> Preview:
        """What is told of the work before it begins."""
        output = self.folder.path
        return Preview(
            self.resolved,
            self.demand,
            self.estimate,
            output,
            explains_mesh=True,
            warnings=self.warnings,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the work."""
        return ()

    @abstractmethod
    def remember(self, outcome: OutcomeT) -> None:
        """Keep how fast the complete work was, for the next estimate. On rank 0."""

    @abstractmethod
    def last_checkpoint(self) -> tuple[Path, str] | None:
        """Returns the folder of the latest checkpoint and where it stands, such as "step 3"."""

    def beside_loading(self) -> AbstractContextManager[None]:
        """Returns the context in which TensorFlow is loaded, for what is done meanwhile."""
        return nullcontext()

    @abstractmethod
    def work(self, progress: Progress) -> OutcomeT:
        """Do the work as one of the ranks; the folder has begun, and TensorFlow is loaded."""

    @abstractmethod
    def report(self, outcome: OutcomeT) -> str:
        """Returns what a user reads when the work is complete."""

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.resume and self.folder.is_complete

    def complete_message(self) -> str:
        """Returns what a user reads when nothing is left to do."""
        return f"The {self.kind} in {self.folder.path} is complete."

    def check_folder(
        self,
        resolved: str,
        needed: int,
        *,
        may_differ: Iterable[str],
        may_grow: Iterable[str] = (),
    ) -> None:
        """Check that the work can begin or be resumed in its folder, without changing anything.

        Args:
            resolved: the run file with all defaults.
            needed: estimated size of what will be written [bytes].
            may_differ: keys of the run file that may differ from those of the resumed work.
            may_grow: keys that may be greater.

        Raises:
            OutputError: the folder cannot take the work.
            ConfigError: the run file asks for other work than that in the folder.
        """
        folder = self.folder
        folder.check(resume=self.resume, overwrite=self.overwrite, needed=needed)
        if self.resume and folder.run_file.exists():
            check_resumed(
                folder.run_file,
                resolved,
                self.run_file,
                f"the {self.kind} in {folder.path}",
                may_differ=may_differ,
                may_grow=may_grow,
            )

    def kept(self) -> str:
        """Returns a sentence on the checkpoints there are, for a user whose work was stopped."""
        last = self.last_checkpoint()
        if last is None:
            return "there is no checkpoint yet"
        folder, place = last
        return (
            f"the checkpoints in {folder} are intact, the last after {place}: go on with --resume"
        )

    def run(self) -> None:
        """Work as one of the ranks of the job; exit with a status if a signal stopped the work."""
        with stoppable(self.kept):
            outcome = self._run()
        if outcome.stopped_by is not None:
            sys.exit(128 + signal.Signals[outcome.stopped_by])

    def _run(self) -> OutcomeT:
        rank = launch.detect().rank
        first = f"{self.describe()}\n{self.preview.told}"
        with job(first, self.kept, self.beside_loading()) as progress:
            from flowpm_dist.jobs.shared_folder import check_seen_by_all
            from meshimpl import ProcessMesh, initialise

            initialise(self.meshes)
            check_seen_by_all(self.folder.path, ProcessMesh(self.mesh))
            if rank == 0:
                self.folder.begin(resume=self.resume, overwrite=self.overwrite)
            outcome = self.work(progress)
        if rank == 0:
            self._tell(outcome)
        # A rank that exits with a status ends the others: all must be printed before.
        ProcessMesh(self.mesh).barrier()
        return outcome

    def _tell(self, outcome: OutcomeT) -> None:
        if outcome.stopped_by is None:
            print(self.report(outcome), flush=True)
            self.remember(outcome)
            return
        name = launch.stop_name(outcome.stopped_by)
        message = f"stopped by {name} {outcome.stopped_at}; go on with --resume"
        print(message, file=sys.stderr, flush=True)


def start(
    kind: type[ResumableJob[ConfigT, FolderT, OutcomeT]],
    run_file: Path,
    ranks: int | None,
    mesh: str | None,
    output: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    check: bool,
    ignore_memory: bool,
    changes: list[str] | None,
) -> None:
    """Plan the work of a command, start the ranks, and do the work. Mistakes end the process.

    Args:
        kind: class of the job.
        run_file: TOML file.
        ranks: value of `--ranks`.
        mesh: value of `--mesh`.
        output: value of `--output`; by default a folder that is named after the run file.
        resume, overwrite: whether `--resume` and `--overwrite` were given.
        check, ignore_memory: likewise.
        changes: values of `--set`.
    """
    output = output or default_output(run_file, kind.suffix or kind.kind)
    with planning():
        if resume and overwrite:
            raise OutputError(
                f"--resume goes on with a {kind.kind}, --overwrite drops it: give one"
            )
        settings = parse_settings(changes or [])
        planned = kind.plan(
            Request(run_file, job_size(ranks), output, resume, overwrite, mesh, settings)
        )
        if not planned.is_complete:
            planned.preview.check_memory(ignore=ignore_memory)
    if planned.is_complete:
        if launch.detect().rank == 0:
            print(planned.complete_message())
        return
    if check:
        planned.preview.show()
        return
    begin_job(ranks, stop_as=signal.SIGUSR1)
    planned.run()


def output_option(kind: str, suffix: str = "") -> typer.models.OptionInfo:
    """Returns the option --output of a kind of work, see `ResumableJob.suffix`."""
    named = f"by default RUN-{suffix or kind}"
    return typer.Option(metavar="DIR", help=f"Folder of the {kind}; {named}.")


def resume_option(kind: str) -> typer.models.OptionInfo:
    """Returns the option --resume of a kind of work."""
    return typer.Option("--resume", help=f"Go on with the {kind} in DIR.")


def overwrite_option(kind: str) -> typer.models.OptionInfo:
    """Returns the option --overwrite of a kind of work."""
    return typer.Option("--overwrite", help=f"Replace the {kind} in DIR.")
