"""A session of a training, from its plan to its last checkpoint."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.checkpoints import Checkpoints, restore_weights
from flowpm_dist.cosmoflow.training.held_out import hold_out
from flowpm_dist.cosmoflow.training.logs import MLPerfLog, TrainingLogs
from flowpm_dist.cosmoflow.training.trainer import StepReport, Trainer, optimiser_of, regressor_of
from flowpm_dist.cosmoflow.volumes.draws import (
    Lanes,
    priors_of,
    summary_of_draws,
    summary_of_passes,
)
from flowpm_dist.cosmoflow.volumes.generations import Statistics
from flowpm_dist.cosmoflow.volumes.record_files import Block
from flowpm_dist.cosmoflow.volumes.records import Dataset, check_lane
from flowpm_dist.cosmoflow.volumes.sources import (
    PHASES,
    PhaseClock,
    in_order,
    source_of,
    stored_split,
)
from flowpm_dist.cosmoflow.volumes.universes import draws_of
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.errors import decoration
from flowpm_dist.io.files import write_json
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import read_rows
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.jobs.session import StopRequest
from flowpm_dist.observables.record import BARE
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

NOISE_DRAWS = "drawn once per universe and reused each time the universe is used"
"""How often noise of the observation is drawn, for the results."""


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of a training.

    Attributes:
        step: updates made so far.
        steps: updates of the whole training.
        loss: loss of the last step.
        validation_loss: the latest, where there was one.
        seconds: seconds of this session's steps.
        phases: seconds per step of each phase, in this session.
        best: least validation loss and the step after which it was found, if there was one.
        ended_early: whether validations stopped getting better, see `TrainingOptions.patience`.
    """

    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    seconds: float
    phases: dict[str, float]
    best: tuple[float, int] | None = None
    ended_early: bool = False


class TrainingSession:
    """One session of a training, from its beginning or from its latest checkpoint.

    Call `flowpm_dist.cosmoflow.volumes.record_writer.stage_files` before, which copies files to
    fast local storage.

    Args:
        plan: the training.
        mesh: the ranks, of axes replica, row and col.
        folder: the training's folder, begun on rank 0.
        progress: this rank's progress.

    Raises:
        RecordError: files that are damaged or do not match the plan.
    """

    def __init__(
        self, plan: TrainingPlan, mesh: ProcessMesh, folder: TrainingFolder, progress: Progress
    ) -> None:
        self.plan = plan.with_mesh(str(mesh) or "replica:1")
        mesh.check_equal("a training", folder=folder.path, **dict(self.plan))
        self.mesh, self.folder, self.progress = mesh, folder, progress
        self.lanes, self.clock = Lanes.of(mesh, plan.training.batch), PhaseClock()
        self.statistics = Statistics(folder.statistics("train"), mesh, tuple(plan.priors.ranges))
        self.source = source_of(plan, mesh, folder, self.lanes, self.clock, self.statistics.add)
        self.files = self.source.dataset
        self.regressor = regressor_of(plan, mesh, None if self.files is None else self.files.header)
        self.network = self.regressor.network
        self.network.broadcast_weights()
        optimiser, options = optimiser_of(plan), plan.training
        optimiser.build(self.network.weights)
        self.trainer = Trainer(self.regressor, optimiser, self.source, self.clock, options.seed)
        self.checkpoints = Checkpoints(
            folder.checkpoints.path, mesh, self.network.state, optimiser, options.keep, folder.best
        )
        keeps_log = options.preset == "mlperf" and self.files is not None and mesh.rank == 0
        self.mlperf = MLPerfLog(folder.mlperf_log if keeps_log else None, self.plan)

    def run(self, *, resume: bool) -> TrainingOutcome:
        """Trains to the last step, or until a signal stops it. Called on all ranks together.

        Args:
            resume: whether to continue from the latest checkpoint, if there is one.

        Raises:
            StopError: a signal stopped the training before its last step; a checkpoint was written.
            DivergedError, RecordError, HaloError, WriteError: the training cannot continue; its
                checkpoints are unchanged.
            TrainedError: there is no checkpoint to continue from, or no weights to start from.
        """
        first = self._resumed() if resume else 0
        if first == 0:
            self._take_weights()
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, self.plan.resolved())
        if maker := self.source.maker:
            hold_out(self.plan, self.mesh, self.folder, self.progress, maker=maker)
        if self.plan.data.source != "dummy":
            check_lane(len(self._validation_set), self.lanes.batch, None)
        if self.files is not None:
            nodes = max(1, self.mesh.size // max(1, launch.detect().local_size))
            counts = {"samples": len(self.files), "validation": len(self._validation_set)}
            self.mlperf.begin(ranks=self.mesh.size, nodes=nodes, **counts)
        with ExitStack() as opened:
            opened.callback(self.source.close)
            self.source.start(first, functools.partial(self.progress, "simulating"))
            self.clock.lap()
            options = self.plan.training
            if first == 0 and options.start_from is None and options.calibrate:
                self.network.calibrate(self._some_volumes())
            self.clock.lap()
            logs = None
            if self.mesh.rank == 0:
                logs = TrainingLogs(self.folder, first)
                opened.callback(logs.close)
            # Until here nothing is lost by ending at once.
            stop = opened.enter_context(
                StopRequest(self.mesh, self.folder, "step", self.progress.say).heard()
            )
            outcome, stopped = self._steps(first, stop, logs)
        if self.mesh.rank == 0:
            self._show(outcome)
        if stopped is not None:
            raise StopError(stopped, f"after step {outcome.step} of {outcome.steps}")
        return outcome

    def _resumed(self) -> int:
        """The step to continue with, from the latest checkpoint that is whole."""
        marked = int(str(self.folder.mark().get("step", 0)))
        checkpoint = self.checkpoints.restore()
        if checkpoint is None and int(self.mesh.world.broadcast(tf.constant(marked))):
            raise TrainedError(self.folder.no_checkpoint(f"{marked} steps"))
        if checkpoint is not None and checkpoint.note:
            self.progress.warn(checkpoint.note)
        return 0 if checkpoint is None else checkpoint.step

    def _take_weights(self) -> None:
        """Takes the weights of another training, if the plan names one."""
        other = self.plan.training.start_from
        if other is not None:
            folder = TrainingFolder(other).weights("best")
            restore_weights(folder, self.mesh, self.network.state)

    def _some_volumes(self) -> Iterator[np.ndarray]:
        """Returns batches with about `training.calibrate` of the training volumes."""
        batches = -(-self.plan.training.calibrate // self.lanes.batch)
        return (batch.volumes for batch in self.source.preview(batches))

    def _steps(
        self, first: int, stop: StopRequest, logs: TrainingLogs | None
    ) -> tuple[TrainingOutcome, str | None]:
        """Makes the steps; returns the signal that ended them early, if any, too."""
        steps, batch = self.plan.training.steps, self.plan.training.batch
        best, enough = self.checkpoints.best, self._is_enough()
        if (first >= steps or enough) and self.mesh.rank == 0:
            self._mark(first, enough)
        self.progress.note(f"training from step {first} of {steps}; compiling")
        begin, totals = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
        report, validation, stopped, number = None, None, None, first
        while number < steps and stopped is None and not enough:
            started = time.perf_counter()
            self.mlperf.step_begins(number)
            report = self.trainer.step(number)
            number += 1
            with self.clock("other"):
                stopped = stop.name()
                saves, validates = self._due(report, stopped)
                if (saves or validates) and self.network.centre:
                    self.network.recentre(self._some_volumes())
                fresh = self._validation_errors() if validates else None
                if fresh is not None:
                    validation = fresh[0]
                    self.checkpoints.validated(validation, number)
                    enough = self._is_enough()
            seconds = {**report.seconds, "other": self.clock.lap()["other"]}
            rate = batch / (time.perf_counter() - started)
            held = "" if validation is None else f"  validation {validation:.4f}"
            state = f"loss {report.loss:.4f}{held}  {rate:.2f} samples/s"
            self.progress("training", number, steps, state)
            if logs is not None:
                counts = {"samples": number * batch}
                counts["simulations"] = self.source.simulations(report.step)
                logs.add(report, seconds, rate, fresh, **counts)
            # Only now: the table has a row of every step that the checkpoint includes.
            with self.clock("other"):
                if saves or enough:
                    if logs is not None:
                        logs.flush()
                    self._save(number, enough)
            seconds["other"] += self.clock.lap()["other"]
            for phase, value in seconds.items():
                totals[phase] += value
        complete = number >= steps or enough
        with decoration("end of mlperf.log", self.progress.warn):
            self.mlperf.end(success=complete)
        outcome = TrainingOutcome(
            step=number,
            steps=steps,
            loss=None if report is None else report.loss,
            validation_loss=validation,
            seconds=time.perf_counter() - begin,
            phases={phase: total / max(1, number - first) for phase, total in totals.items()},
            best=(float(best.loss), int(best.step)) if int(best.step) else None,
            ended_early=enough and number < steps,
        )
        return outcome, None if complete else stopped

    def _is_enough(self) -> bool:
        """Whether validations have stopped getting better."""
        patience = self.plan.training.patience
        return patience is not None and int(self.checkpoints.best.waited) >= patience

    def _due(self, report: StepReport, stopped: str | None) -> tuple[bool, bool]:
        """Whether a checkpoint is due after a step, and a validation."""
        plan, number = self.plan, report.step + 1
        options, end = plan.training, number == plan.training.steps
        saves = end or stopped is not None
        saves = saves or (plan.is_due(number, options.checkpoint_every) and report.finite)
        return saves, end or plan.is_due(number, options.validate_every)

    def _validation_errors(self) -> tuple[float, float] | None:
        """Loss and mean absolute error of the volumes of validation."""
        if self.plan.data.source == "dummy":
            return None
        dataset = self._validation_set
        self.mlperf.validation_begins()
        errors = self.regressor.mean_errors(in_order(dataset, self.lanes), len(dataset))
        # The best, and when it is enough, must be the same on all ranks.
        loss, error = self.mesh.world.broadcast(tf.constant(errors, tf.float64)).numpy()
        self.mlperf.validated(float(error))
        return float(loss), float(error)

    @functools.cached_property
    def _validation_set(self) -> Dataset:
        plan, mesh, held_out = self.plan, self.mesh, self.folder.held_out
        return stored_split(plan, "validation", held_out, Block.of(mesh), mesh, staged=True)

    def _mark(self, step: int, enough: bool) -> None:
        """Marks the folder with the steps made. On rank 0."""
        steps = self.plan.training.steps
        early = {"ended_early": True} if enough and step < steps else {}
        self.folder.write_mark(complete=step >= steps or enough, step=step, steps=steps, **early)

    def _save(self, step: int, enough: bool) -> None:
        # Statistics first: volumes that left the buffer are not simulated again on resuming.
        if self.plan.simulates:
            self.statistics.write()
        self.checkpoints.save(step)
        if self.mesh.rank == 0:
            self._mark(step, enough)

    def _write_draws(self, steps: int) -> None:
        """Writes how often each volume was drawn in the steps so far, and how batches vary."""
        plan = self.plan
        if plan.simulates:
            draws, priors = draws_of(plan), priors_of(plan)
            parameters = priors.draw("train", 0, draws.simulations)
            summary = summary_of_draws(draws, parameters, steps, priors.names)
            summary |= {"observation": (plan.record or BARE).table(), "noise": NOISE_DRAWS}
        elif self.files is not None:
            summary = summary_of_passes(len(self.files), plan.training.batch, steps)
        else:
            return
        write_json(self.folder.draws, summary)

    def _write_phases(self, outcome: TrainingOutcome) -> None:
        """Writes phases.json, if a step was made."""
        if not any(outcome.phases.values()):
            return
        facts = {
            "seconds_per_step": outcome.phases,
            "mesh": str(self.mesh),
            "ranks": self.mesh.size,
            "threads_per_rank": launch.threads_per_rank(),
            "seconds": outcome.seconds,
        }
        write_json(self.folder.path / "phases.json", facts)

    def _show(self, outcome: TrainingOutcome) -> None:
        """Writes the phases, the draws and the figures of a training. On rank 0."""
        path, warn = self.folder.path, self.progress.warn
        with decoration("phases.json", warn):
            self._write_phases(outcome)
        with decoration("draws.json", warn):
            self._write_draws(outcome.step)
        if not any(outcome.phases.values()):
            return
        with drawing(path / "phases.png", warn) as save:
            from flowpm_dist.cosmoflow.scores.figures import phases_figure

            save(phases_figure(outcome.phases))
        with drawing(path / "training.png", warn) as save:
            from flowpm_dist.cosmoflow.scores.figures import training_figure

            if rows := read_rows(self.folder.metrics):
                save(training_figure(rows))
