"""The command `flowpm-dist train`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from flowpm_dist.cosmoflow.planning.data_options import ArrayData
from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.planning.memory import (
    buffer_bytes,
    training_bytes,
    training_demand,
)
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.saved import SavedTraining, read_training
from flowpm_dist.cosmoflow.volumes.arrays import file_and_name
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.jobs.job import Command, Costs, Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulation.speeds import Pieces

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.training.session import TrainingOutcome

ENOUGH = 20
"""After so many steps, the compilation in the first step hardly changes their mean duration."""


class TrainingJob(Job[TrainingPlan, "TrainingOutcome"]):
    """A training that was checked and can begin."""

    command = Command(
        "train",
        "Train a network that finds parameters in volumes or maps, simulated as it learns.",
        run_file="What to simulate and learn.",
        example="flowpm-dist train run.toml --ranks 4",
        mesh_example="replica:2,row:2",
        steps="training",
    )
    options_type, folder_type = TrainingPlan, TrainingFolder

    @override
    def check(self) -> None:
        """Check the weights to start from, then as every job does.

        Raises:
            TrainedError: there are no weights to start from, they are in the folder itself, or they
                have seen volumes that are held out here.
            ObservationError: a file that the observation names has changed since it was begun.
        """
        self._check_start()
        super().check()
        if self.request.resume and self.options.simulates:
            SavedTraining(self.folder, self.options, complete=False).check_held_out()

    def _check_start(self) -> None:
        """Checks that there are weights to start from, which beginning does not delete.

        Of arrays, also that they have seen none that are held out here.
        """
        start = self.options.training.start_from
        continues = self.request.resume and self.folder.checkpoints.last is not None
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
    @override
    def is_complete(self) -> bool:
        mark = self.folder.mark()
        done = mark.get("step")
        if not (super().is_complete and isinstance(done, int)):
            return False
        is_saved = done in self.folder.checkpoints.numbered()
        return is_saved and (done >= self.options.training.steps or bool(mark.get("ended_early")))

    @override
    def describe(self) -> str:
        config = self.options
        weights = config.declaration.parameters(config.width, config.channels, config.outputs)
        buffer = buffer_bytes(config, config.box.grid, parse_mesh(self.mesh, batched=True))
        count = "" if config.declaration.is_keras else f"{weights:,} weights, "
        network = f"{config.network.name}, {count}mesh {self.mesh}"
        if not buffer:
            return network
        samples = "volumes" if config.lightcone is None else "universes' maps"
        size = f"{human_size(buffer)} on each rank"
        return f"{network}; {config.simulated.buffer} {samples} kept: {size}"

    @property
    @override
    def costs(self) -> Costs:
        plan, done = self.options, 0
        if self.request.resume:
            done = int(str(self.folder.mark().get("step", 0)))
        # For maps, the cells of the simulated box, which cost more than the pixels.
        cells = plan.cells if plan.lightcone is None else math.prod(plan.box.grid)
        left = (plan.training.steps - done) * plan.training.batch
        samples = Pieces(self._rate_name, cells, left)
        disk = training_bytes(plan, self.folder)
        return Costs(training_demand(plan, self.mesh), disk, (samples,))

    @property
    def _rate_name(self) -> str:
        return f"train {self.options.network.name}"

    @override
    def speeds(self, result: TrainingOutcome) -> Mapping[str, float]:
        seconds = sum(result.phases.values())
        if not seconds or result.step < ENOUGH:
            return {}
        return {self._rate_name: seconds / self.options.training.batch}

    @override
    def work(self, progress: Progress) -> TrainingOutcome:
        from flowpm_dist.cosmoflow.training.session import TrainingSession
        from flowpm_dist.cosmoflow.volumes.record_writer import stage_files
        from meshimpl.process_mesh import ProcessMesh

        mesh = ProcessMesh(self.mesh)
        if mesh.rank == 0 and self.options.files:
            self.folder.keep_checksums(self.options.checksums())
        stage_files(self.options, mesh, progress)
        return TrainingSession(self.options, mesh, self.folder, progress).run(
            resume=self.request.resume
        )

    @override
    def report(self, outcome: TrainingOutcome) -> str:
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
