"""The command `flowpm-dist train`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.cosmoflow.planning.folder import FRESH, TrainedError, TrainingFolder, errors_in
from flowpm_dist.cosmoflow.planning.memory import (
    buffer_bytes,
    check_training_mesh,
    training_bytes,
    training_demand,
)
from flowpm_dist.cosmoflow.planning.options import ArrayData
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.saved import SavedTraining, read_training
from flowpm_dist.cosmoflow.volumes.arrays import file_and_name
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.files import human_size
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, read_rows, record_of_work
from flowpm_dist.simulation.demand import Demand

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.training.session import TrainingOutcome

ENOUGH = 20
"""After so many steps, the compilation in the first step hardly changes their mean duration."""


class TrainingJob(Job[TrainingPlan, "TrainingOutcome"]):
    """A training that was checked and can begin."""

    name = "train"
    help = "Train a network that finds parameters in volumes or maps, simulated as it learns."
    asks = "What to simulate and learn."
    example = "flowpm-dist train run.toml --ranks 4"
    mesh_example = "replica:2,row:2"
    counted = "training"
    options_type, folder_type = TrainingPlan, TrainingFolder
    folder: TrainingFolder

    @classmethod
    def choose_mesh(
        cls, options: TrainingPlan, ranks: int, *, source: Path, shape: str | None = None
    ) -> str:
        """See `Job.choose_mesh`."""
        return check_training_mesh(options, ranks, source=source, shape=shape)

    def check(self) -> None:
        """See `Job.check`.

        Raises:
            TrainedError: there are no weights to start from, they are in the folder itself, or they
                have seen volumes that are held out here.
            ObservationError: a file that the observation names has changed since it was begun.
        """
        self._check_start()
        super().check()
        if self.resume and self.options.simulates:
            SavedTraining(self.folder, self.options, complete=False).check_held_out()

    def _check_start(self) -> None:
        """Checks that there are weights to start from, which beginning does not delete.

        Of arrays, also that they have seen none that are held out here.
        """
        start = self.options.training.start_from
        continues = self.resume and (self.folder.checkpoints / "checkpoint").exists()
        if start is None or continues:
            return
        if start.resolve() == self.folder.path.resolve():
            raise TrainedError(
                f"training.start_from is {start}, the folder of this training itself: give another "
                "--output"
            )
        ours, other = self.options.data, read_training(start).plan.data
        if not (isinstance(ours, ArrayData) and isinstance(other, ArrayData)):
            return
        (file, name), (there, named) = (file_and_name(data.volumes) for data in (ours, other))
        if (file.resolve(), name) == (there.resolve(), named):
            keys = ("seed", "test", "validation")
            changed = [f"data.{key}" for key in keys if getattr(ours, key) != getattr(other, key)]
            if changed:
                raise TrainedError(
                    f"training.start_from = {str(start)!r}: the same volumes were divided "
                    "otherwise there, so its weights may have seen volumes that are held out "
                    f"here; use its {', '.join(changed)}"
                )

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do, and the last checkpoint is there."""
        mark = self.folder.mark()
        done = mark.get("step")
        if not (super().is_complete and isinstance(done, int)):
            return False
        kept = (self.folder.checkpoints / f"step-{done}.index").exists()
        return kept and (done >= self.options.training.steps or bool(mark.get("ended_early")))

    def complete_message(self) -> str:
        """See `Job.complete_message`."""
        done, steps = self.folder.mark().get("step"), self.options.training.steps
        early = "" if done == steps else f", of {steps}, as validations got no better"
        return f"The training in {self.folder.path} is complete: {done} steps{early}."

    def describe(self) -> str:
        """Returns a line that says what will be trained."""
        config = self.options
        weights = config.declaration.parameters(config.width, config.channels, config.outputs)
        kept = buffer_bytes(config, config.grid, parse_mesh(self.mesh, batched=True))
        count = "" if config.declaration.is_keras else f"{weights:,} weights, "
        network = f"{config.network.name}, {count}mesh {self.mesh}"
        if not kept:
            return network
        what = "volumes" if config.lightcone is None else "universes' maps"
        return f"{network}; {config.simulated.buffer} {what} kept: {human_size(kept)} on each rank"

    @property
    def demand(self) -> Demand:
        """See `Job.demand`."""
        return training_demand(self.options, self.mesh)

    @property
    def disk(self) -> int:
        """See `Job.disk`."""
        return training_bytes(self.options, self.folder)

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Job.warnings`."""
        return self.options.warnings

    @property
    def rate_name(self) -> str:
        """See `Job.rate_name`."""
        return f"train {self.options.network.name}"

    @property
    def cells(self) -> int:
        """Cells of a volume; for maps, the cells of the simulated box, which cost more."""
        config = self.options
        return config.cells if config.lightcone is None else math.prod(config.grid)

    @property
    def remaining(self) -> int:
        """The samples of the steps that are left."""
        done = int(str(self.folder.mark().get("step", 0))) * self.resume
        return (self.options.training.steps - done) * self.options.training.batch

    def seconds_per_piece(self, result: TrainingOutcome) -> float | None:
        """See `Job.seconds_per_piece`."""
        seconds = sum(result.phases.values())
        if not seconds or result.step < ENOUGH:
            return None
        return seconds / self.options.training.batch

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """See `Job.last_checkpoint`."""
        import tensorflow as tf

        latest = tf.train.latest_checkpoint(str(self.folder.checkpoints))
        if latest is None:
            return None
        return self.folder.checkpoints, f"step {latest.rpartition('-')[2]}"

    def work(self, progress: Progress) -> TrainingOutcome:
        """See `Job.work`."""
        from flowpm_dist.cosmoflow.training.session import TrainingSession
        from flowpm_dist.cosmoflow.volumes.record_writer import stage_files
        from meshimpl.process_mesh import ProcessMesh

        mesh = ProcessMesh(self.mesh)
        if mesh.rank == 0 and self.options.files:
            self.folder.keep_checksums(self.options.checksums())
        stage_files(self.options, mesh, progress)
        return TrainingSession(self.options, mesh, self.folder, progress).run(resume=self.resume)

    def report(self, outcome: TrainingOutcome) -> str:
        """Returns where to look, and the figures that come first."""
        path, seconds = self.folder.path, sum(outcome.phases.values())
        shares = sorted(outcome.phases.items(), key=lambda item: -item[1])
        where = ", ".join(f"{name} {100 * s / seconds:.0f} %" for name, s in shares if s) or "-"
        losses = [] if outcome.loss is None else [f"loss {outcome.loss:.4f}"]
        if outcome.validation_loss is not None:
            losses.append(f"of validation {outcome.validation_loss:.4f}")
        if outcome.best is not None:
            losses.append("the least of validation {:.4f} after step {}".format(*outcome.best))
        if outcome.ended_early:
            losses.append("ended early")
        rate = f"; {self.options.training.batch / seconds:.1f} samples/s" if seconds else ""
        return f"""
Training in {path}:
  training.png  losses and learning rate; numbers, a row for each step, in metrics.csv
  phases.png    where the time went: {where}; seconds in phases.json
  tensorboard   the same live: tensorboard --logdir {path / "tensorboard"}
  checkpoints   the latest after step {outcome.step}; best: the weights of the least validation loss
  draws.json    how often volumes were drawn; run.toml: the run with all its settings

{outcome.step} of {outcome.steps} steps: {", ".join(losses)}{rate}.
Next: flowpm-dist evaluate {path}"""

    @classmethod
    def record(cls, path: Path) -> RunRecord | None:
        """See `Job.record`."""
        folder = TrainingFolder(path)
        mark = folder.mark()
        results: dict[str, Any] = {}
        rows = read_rows(folder.metrics)
        for name in ("loss", "validation_loss"):
            values = [float(row[name]) for row in rows if row.get(name)]
            if values:
                results[name.replace("_", " ")] = values[-1]
        fresh = sorted((folder.path / FRESH).glob("*/evaluation"))
        folders = [*fresh, *map(folder.evaluation, ("test", "validation"))]
        results |= next(filter(None, map(errors_in, folders)), {})
        steps = f"{len(rows)} steps" if rows else ""
        if {"step", "steps"} <= set(mark):
            steps = f"{mark['step']}/{mark['steps']} steps"
        return record_of_work(folder, steps, results)
