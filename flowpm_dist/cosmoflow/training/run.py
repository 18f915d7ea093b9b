"""A session of a training, from its plan to its last checkpoint."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.planning.phases import PHASES, PhaseClock
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.checkpoints import Checkpoints
from flowpm_dist.cosmoflow.training.held_out import hold_out
from flowpm_dist.cosmoflow.training.logs import TrainingLogs
from flowpm_dist.cosmoflow.training.mlperf_log import MLPerfLog
from flowpm_dist.cosmoflow.training.outcome import TrainingOutcome, write_phases
from flowpm_dist.cosmoflow.training.parts import (
    draws_of,
    network_of,
    optimiser_of,
    priors_of,
    standardiser_of,
)
from flowpm_dist.cosmoflow.training.sources import files_of, volumes_of
from flowpm_dist.cosmoflow.training.trained import restore_weights
from flowpm_dist.cosmoflow.training.training import StepReport, Trainer, mean_errors
from flowpm_dist.cosmoflow.volumes.draws import summary_of_draws, summary_of_passes
from flowpm_dist.cosmoflow.volumes.file_source import FilesDataset, in_order
from flowpm_dist.cosmoflow.volumes.record_batches import check_lane
from flowpm_dist.cosmoflow.volumes.records import DummyDataset
from flowpm_dist.cosmoflow.volumes.universes import Lanes
from flowpm_dist.io.files import write_text
from flowpm_dist.jobs.folder import write_run_file
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.stop import StopRequest
from flowpm_dist.observables.record import BARE
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

OF_NOISE = "drawn once per universe and reused each time the universe is used"
"""How the noise of what is seen goes with the draws, for the results."""


class TrainingRun:
    """One session of a training: its beginning, or where it goes on.

    Files that are to be staged have been, see `flowpm_dist.cosmoflow.training.sources.stage_files`.

    Args:
        plan: of the training.
        mesh: the ranks, of axes replica, row and col.
        folder: begun on rank 0.
        progress: of this rank.

    Raises:
        RecordError: files that cannot serve.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        mesh: ProcessMesh,
        folder: TrainingFolder,
        progress: Progress,
    ) -> None:
        self.plan = plan.with_mesh(str(mesh) or "replica:1")
        self.mesh, self.folder, self.progress = mesh, folder, progress
        self.lanes = Lanes.of(self.mesh, plan.training.batch)
        self.clock = PhaseClock()
        self.mlperf: MLPerfLog | None = None
        self.volumes = volumes_of(self.plan, mesh, folder, self.lanes, self.clock)
        files = self.volumes.dataset
        standardiser = standardiser_of(plan, None if files is None else files.header)
        count = len(standardiser.names)
        network = network_of(plan, self.mesh, parameters=count, channels=self.volumes.channels)
        network.broadcast_weights()
        optimiser = optimiser_of(plan)
        optimiser.build(network.weights)
        source, seed = self.volumes.source, plan.training.seed
        self.trainer = Trainer(network, optimiser, standardiser, source, self.clock, seed)
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            self.mesh,
            network.state,
            optimiser,
            plan.training.keep,
            folder.best,
        )

    def run(self, *, resume: bool) -> TrainingOutcome:
        """Trains to the end, or until a signal comes. On all ranks together.

        Args:
            resume: go on from the latest checkpoint, if there is one.

        Raises:
            DivergedError, RecordError, HaloError, WriteError: the checkpoints are as they were.
            TrainedError: there is nothing to go on from, or to start from.
        """
        first = self._resumed() if resume else 0
        if first == 0:
            self._take_weights()
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, self.plan.resolved())
        if self.volumes.maker is not None:
            hold_out(self.plan, self.volumes.maker, self.mesh, self.folder, self.progress)
        if self.plan.data.source != "dummy":
            check_lane(len(self._validation_set), self.lanes.batch, None)
        self._begin_mlperf_log()
        with ExitStack() as opened:
            opened.callback(self.trainer.source.close)
            progress = functools.partial(self.progress, "simulating")
            self.trainer.source.start(first, progress)
            self.clock.lap()
            if first == 0:
                self._begin()
            logs = None
            if self.mesh.rank == 0:
                logs = TrainingLogs(self.folder, first)
                opened.callback(logs.close)
            # Until here nothing is lost by ending at once.
            stop = opened.enter_context(StopRequest(self.mesh, "step", self.progress.say).heard())
            outcome = self._steps(first, stop, logs)
        if self.mesh.rank == 0:
            write_phases(outcome, self.folder, self.mesh)
            self._write_draws(outcome.step)
        return outcome

    def _write_draws(self, steps: int) -> None:
        """Writes how often each volume was drawn in the steps so far, and how batches vary."""
        plan, dataset = self.plan, self.volumes.dataset
        if plan.simulates:
            draws, priors = draws_of(plan), priors_of(plan)
            parameters = priors.draw("train", 0, draws.simulations)
            found = summary_of_draws(draws, parameters, steps, priors.names)
            found |= {"observation": (plan.observation or BARE).table(), "noise": OF_NOISE}
        elif dataset is not None:
            found = summary_of_passes(len(dataset), plan.training.batch, steps)
        else:
            return
        write_text(self.folder.draws, json.dumps(found, indent=1) + "\n")

    def _begin_mlperf_log(self) -> None:
        files = self.volumes.dataset
        if self.plan.training.preset != "mlperf" or files is None or self.mesh.rank:
            return
        self.mlperf = MLPerfLog(self.folder.mlperf_log, self.plan)
        nodes = max(1, self.mesh.size // max(1, launch.detect().local_size))
        counts = {"samples": len(files), "validation": len(self._validation_set)}
        self.mlperf.begin(ranks=self.mesh.size, nodes=nodes, **counts)

    def _resumed(self) -> int:
        """The step to go on with: that of the latest checkpoint that is whole."""
        said = int(str(self.folder.mark().get("step", 0)))
        found = self.checkpoints.restore()
        if found is None and int(self.mesh.world.broadcast(tf.constant(said))):
            raise TrainedError(
                f"{self.folder.path} has made {said} steps, but {self.folder.checkpoints} holds no "
                "checkpoint: put it back, or begin anew with --overwrite"
            )
        if found is None:
            return 0
        if found.note:
            self.progress.warn(found.note)
        return found.step

    def _take_weights(self) -> None:
        """Takes the weights of another training, if the plan names one."""
        other = self.plan.training.start_from
        if other is not None:
            folder = TrainingFolder(other).weights("best")
            restore_weights(folder, self.mesh, self.trainer.network.state)

    def _begin(self) -> None:
        """Calibrates first weights: see `Network.calibrate`."""
        asked = self.plan.training
        if asked.start_from is None and asked.calibrate:
            self.trainer.network.calibrate(self._some_volumes())
        self.clock.lap()

    def _recentre(self) -> None:
        """See `Network.recentre`."""
        if self.trainer.network.centre:
            self.trainer.network.recentre(self._some_volumes())

    def _some_volumes(self) -> Iterator[np.ndarray]:
        """Batches of about `training.calibrate` volumes of those there are to train on."""
        batches = -(-self.plan.training.calibrate // self.lanes.batch)
        return (batch.volumes for batch in self.trainer.source.preview(batches))

    def _steps(self, first: int, stop: StopRequest, logs: TrainingLogs | None) -> TrainingOutcome:
        steps, best = self.plan.total_steps, self.checkpoints.best
        enough = self._is_enough()
        if (first >= steps or enough) and self.mesh.rank == 0:
            self._mark(first, enough)
        self.progress.note(f"training from step {first} of {steps}; compiling")
        begin, totals = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
        report, validation, stopped, number = None, None, None, first
        while number < steps and stopped is None and not enough:
            started = time.perf_counter()
            if self.mlperf is not None:
                self.mlperf.step_begins(number)
            report = self.trainer.step(number)
            number += 1
            with self.clock("other"):
                stopped = stop.name()
                saves, validates = self._due(report, stopped)
                if saves or validates:
                    self._recentre()
                fresh = self._validation_loss() if validates else None
                if fresh is not None:
                    validation = fresh[0]
                    self.checkpoints.validated(fresh[0], number)
                    enough = self._is_enough()
            seconds = {**report.seconds, "other": self.clock.lap()["other"]}
            rate = self.plan.training.batch / (time.perf_counter() - started)
            self._tell(report, rate, validation)
            if logs is not None:
                made = self.trainer.source.simulations(report.step)
                samples = number * self.plan.training.batch
                logs.add(report, seconds, rate, fresh, samples=samples, simulations=made)
            # Only now: a row of every step that the checkpoint stands for is written.
            with self.clock("other"):
                if saves or enough:
                    if logs is not None:
                        logs.flush()
                    self._save(number, enough)
            seconds["other"] += self.clock.lap()["other"]
            for phase, value in seconds.items():
                totals[phase] += value
        if self.mlperf is not None:
            self.mlperf.end(success=number >= steps or enough)
        count = max(1, number - first)
        return TrainingOutcome(
            number,
            steps,
            None if report is None else report.loss,
            validation,
            time.perf_counter() - begin,
            {phase: total / count for phase, total in totals.items()},
            stopped if number < steps and not enough else None,
            (float(best.loss), int(best.step)) if int(best.step) else None,
            enough and number < steps,
        )

    def _is_enough(self) -> bool:
        """Whether validations have stopped getting better."""
        patience = self.plan.training.patience
        return patience is not None and int(self.checkpoints.best.waited) >= patience

    def _due(self, report: StepReport, stopped: str | None) -> tuple[bool, bool]:
        """Whether a checkpoint is due after a step, and a validation."""
        plan, number = self.plan, report.step + 1
        asked, end = plan.training, number == plan.total_steps
        saves = end or stopped is not None
        saves = saves or (plan.is_due(number, asked.checkpoint_every) and report.finite)
        return saves, end or plan.is_due(number, asked.validate_every)

    def _tell(self, report: StepReport, rate: float, validation: float | None) -> None:
        held = "" if validation is None else f"  validation {validation:.4f}"
        state = f"loss {report.loss:.4f}{held}  {rate:.2f} samples/s"
        self.progress("training", report.step + 1, self.plan.total_steps, state)

    def _validation_loss(self) -> tuple[float, float] | None:
        """Loss and mean absolute error of the volumes of validation."""
        if self.plan.data.source == "dummy":
            return None
        trainer, dataset = self.trainer, self._validation_set
        batches = in_order(dataset, self.lanes)
        if self.mlperf is not None:
            self.mlperf.validation_begins()
        found = mean_errors(trainer.network, trainer.standardiser, batches, len(dataset))
        # What is best, and when it is enough, must be the same on all ranks.
        loss, error = self.mesh.world.broadcast(tf.constant(found, tf.float64)).numpy()
        if self.mlperf is not None:
            self.mlperf.validated(float(error))
        return float(loss), float(error)

    @functools.cached_property
    def _validation_set(self) -> FilesDataset:
        dataset = files_of(self.plan, self.mesh, self.folder, "validation")
        assert not isinstance(dataset, DummyDataset)
        return dataset

    def _mark(self, step: int, enough: bool) -> None:
        """Marks the folder with the steps made. On rank 0."""
        steps = self.plan.total_steps
        early = {"ended_early": True} if enough and step < steps else {}
        self.folder.write_mark(complete=step >= steps or enough, step=step, steps=steps, **early)

    def _save(self, step: int, enough: bool) -> None:
        # Statistics first: what the buffer no longer holds is not simulated again on resuming.
        if self.volumes.statistics is not None:
            self.volumes.statistics.write()
        self.checkpoints.save(step)
        if self.mesh.rank == 0:
            self._mark(step, enough)
