"""The command `flowpm-dist train`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from flowpm_dist.cli.common import Mesh, Ranks, Set
from flowpm_dist.cli.preview import Check, IgnoreMemory
from flowpm_dist.cli.resumable import (
    Request,
    ResumableJob,
    output_option,
    overwrite_option,
    resume_option,
    start,
)
from flowpm_dist.config.trained import read_training
from flowpm_dist.config.training import load_training, warnings_of
from flowpm_dist.config.training_mesh import check_training_mesh, training_demand
from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder, training_bytes
from flowpm_dist.cosmoflow.planning.memory import buffer_bytes
from flowpm_dist.cosmoflow.planning.options import DataOptions
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.trained import Training
from flowpm_dist.cosmoflow.volumes.arrays import file_and_name
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.files import human_size
from flowpm_dist.jobs.estimate import Demand, Estimate
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.rates import Kind, kind_of, measured_rate, record_rate
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.training.run import TrainingOutcome

MAY_DIFFER = ("training.validate_every", "training.checkpoint_every", "training.keep",
              "data.staging")  # fmt: skip
MAY_GROW = ("training.steps", "training.epochs")
ENOUGH = 20
"""Steps from which on their mean duration is not that of the compilation in the first."""

RunFile = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="What to simulate and learn.")]


class TrainingJob(ResumableJob[TrainingPlan, TrainingFolder, "TrainingOutcome"]):
    """A training that was checked and can begin."""

    kind = TrainingFolder.kind
    begun = TrainingFolder.begun

    @classmethod
    def plan(cls, asked: Request) -> Self:
        """See `ResumableJob.plan`.

        Raises:
            ConfigError: what is wrong in the run file.
            OutputError: the training cannot be there.
            TrainedError: there are no weights to start from, they are in the folder itself, or they
                have seen volumes that are held out here.
            ObservationError: a file that the observation names has changed since it was begun.
        """
        config = load_training(asked.run_file, asked.settings)
        shape = check_training_mesh(config, asked.ranks, source=asked.run_file, shape=asked.mesh)
        folder = TrainingFolder(asked.output)
        planned = cls(config, shape, folder, asked)
        # Rank 0 alone looks: soon it writes there.
        if launch.detect().rank == 0:
            planned._check_start()
            planned.check_folder(
                config.resolved(),
                training_bytes(config, folder),
                may_differ=MAY_DIFFER,
                may_grow=MAY_GROW,
            )
            if asked.resume and config.simulates:
                Training(folder, config, complete=False).check_held_out()
        return planned

    def _check_start(self) -> None:
        """Checks that there are weights to start from, which beginning does not delete.

        Of arrays, also that they have seen none that are held out here.
        """
        start = self.config.training.start_from
        if start is None or self.is_begun:
            return
        if start.resolve() == self.folder.path.resolve():
            raise TrainedError(
                f"training.start_from is {start}, the folder of this training itself: give another "
                "--output"
            )
        ours, other = self.config.data, read_training(start).plan.data
        if ours.source == other.source == "arrays" and _volumes(ours) == _volumes(other):
            keys = ("seed", "test", "validation")
            changed = [f"data.{key}" for key in keys if getattr(ours, key) != getattr(other, key)]
            if changed:
                raise TrainedError(
                    f"training.start_from = {str(start)!r}: the same volumes were divided "
                    "otherwise there, so its weights may have seen some that are held out here; "
                    f"take its {', '.join(changed)}"
                )

    @property
    def is_begun(self) -> bool:
        """Whether it goes on from a checkpoint of its own."""
        return self.resume and (self.folder.checkpoints / "checkpoint").exists()

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do, and the last checkpoint is there."""
        mark = self.folder.mark()
        done = mark.get("step")
        if not (super().is_complete and isinstance(done, int)):
            return False
        kept = (self.folder.checkpoints / f"step-{done}.index").exists()
        return kept and (done >= self.config.total_steps or bool(mark.get("ended_early")))

    def complete_message(self) -> str:
        """See `ResumableJob.complete_message`."""
        done, steps = self.folder.mark().get("step"), self.config.total_steps
        early = "" if done == steps else f", of {steps}, as validations got no better"
        return f"The training in {self.folder.path} is complete: {done} steps{early}."

    def describe(self) -> str:
        """Returns a line that says what will be trained."""
        config = self.config
        weights = config.declaration.parameters(config.width, config.channels, config.outputs)
        kept = buffer_bytes(config, config.grid, parse_mesh(self.mesh, batched=True))
        count = "" if config.declaration.is_keras else f"{weights:,} weights, "
        told = f"{config.network.name}, {count}mesh {self.mesh}"
        if not kept:
            return told
        what = "volumes" if config.lightcone is None else "universes' maps"
        return f"{told}; {config.data.buffer} {what} kept: {human_size(kept)} on each rank"

    @property
    def resolved(self) -> str:
        """See `ResumableJob.resolved`."""
        return self.config.with_mesh(self.mesh).resolved()

    @property
    def demand(self) -> Demand:
        """See `ResumableJob.demand`."""
        return training_demand(self.config, self.mesh)

    @property
    def estimate(self) -> Estimate:
        """See `ResumableJob.estimate`."""
        config, demand = self.config, self.demand
        rate = measured_rate(self._kind, self._size)
        steps = config.total_steps - int(str(self.folder.mark().get("step", 0))) * self.resume
        seconds = None if rate is None else rate * self._cells * steps
        return demand.estimate(training_bytes(config, self.folder), seconds)

    def remember(self, outcome: TrainingOutcome) -> None:
        """See `ResumableJob.remember`."""
        seconds = sum(outcome.phases.values())
        if seconds and outcome.step >= ENOUGH:
            record_rate(self._kind, self._size, seconds / self._cells)

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `ResumableJob.warnings`."""
        return warnings_of(self.config)

    @property
    def _kind(self) -> Kind:
        ranks = math.prod(parse_mesh(self.mesh, batched=True).values())
        return kind_of(f"train {self.config.network.name}", ranks)

    @property
    def _cells(self) -> int:
        """Cells of a batch."""
        return self.config.training.batch * self._size

    @property
    def _size(self) -> int:
        """Cells of a volume; of maps those of the box behind them, which cost more."""
        config = self.config
        return config.cells if config.lightcone is None else math.prod(config.grid)

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """See `ResumableJob.last_checkpoint`."""
        import tensorflow as tf

        latest = tf.train.latest_checkpoint(str(self.folder.checkpoints))
        if latest is None:
            return None
        return self.folder.checkpoints, f"step {latest.rpartition('-')[2]}"

    def work(self, progress: Progress) -> TrainingOutcome:
        """See `ResumableJob.work`."""
        from flowpm_dist.cosmoflow.training.run import TrainingRun
        from flowpm_dist.cosmoflow.training.sources import stage_files
        from meshimpl.process_mesh import ProcessMesh

        mesh = ProcessMesh(self.mesh)
        stage_files(self.config, mesh, progress)
        return TrainingRun(self.config, mesh, self.folder, progress).run(resume=self.resume)

    def report(self, outcome: TrainingOutcome) -> str:
        """Returns where to look, and the figures that come first."""
        path, seconds = self.folder.path, sum(outcome.phases.values())
        shares = sorted(outcome.phases.items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {100 * s / seconds:.0f} %" for name, s in shares if s) or "-"
        losses = [] if outcome.loss is None else [f"loss {outcome.loss:.4f}"]
        if outcome.validation_loss is not None:
            losses.append(f"of validation {outcome.validation_loss:.4f}")
        if outcome.best is not None:
            losses.append("the least of validation {:.4f} after step {}".format(*outcome.best))
        if outcome.ended_early:
            losses.append("ended early")
        rate = f"; {self.config.training.batch / seconds:.1f} samples/s" if seconds else ""
        return f"""
Training in {path}:
  training.png  losses and learning rate; numbers, a row for each step, in metrics.csv
  phases.png    where the time went: {told}; seconds in phases.json
  tensorboard   the same live: tensorboard --logdir {path / "tensorboard"}
  checkpoints   the latest after step {outcome.step}; best: the weights of the least validation loss
  draws.json    how often volumes were drawn; run.toml: the run with all its settings

{outcome.step} of {outcome.steps} steps: {", ".join(losses)}{rate}.
Next: flowpm-dist evaluate {path}"""


def add_to(app: typer.Typer) -> None:
    """Add this command to a program."""
    app.command(epilog="Example: [bold]flowpm-dist train run.toml --ranks 4[/bold]")(train)


def train(
    run_file: RunFile,
    ranks: Ranks = None,
    mesh: Mesh = None,
    output: Annotated[Path | None, output_option(TrainingJob.kind)] = None,
    resume: Annotated[bool, resume_option(TrainingJob.kind)] = False,
    overwrite: Annotated[bool, overwrite_option(TrainingJob.kind)] = False,
    check: Check = False,
    ignore_memory: IgnoreMemory = False,
    changes: Set = None,
) -> None:
    """Train a network that finds parameters in volumes or maps, simulated as it learns."""
    start(
        TrainingJob, run_file, ranks, mesh, output, resume=resume, overwrite=overwrite,
        check=check, ignore_memory=ignore_memory, changes=changes,
    )  # fmt: skip


def _volumes(data: DataOptions) -> tuple[Path, str]:
    """Returns the file of a training's arrays, and the name of the data set in it."""
    assert data.volumes is not None  # of arrays
    file, name = file_and_name(data.volumes)
    return file.resolve(), name
