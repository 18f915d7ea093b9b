"""A training from its run file to its last checkpoint: everything that `flowpm-dist train` does."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.checkpoints import Checkpoints
from flowpm_dist.cosmoflow.file_source import FileSource, in_order
from flowpm_dist.cosmoflow.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.held_out import Statistics, make_volumes
from flowpm_dist.cosmoflow.in_situ import InSituSource, Lanes, ReplayPlan, UniverseMaker
from flowpm_dist.cosmoflow.logs import COLUMNS, TensorBoard
from flowpm_dist.cosmoflow.parts import (
    block_of_volumes,
    header_of,
    maker_of,
    network_of,
    optimiser_of,
    standardiser_of,
)
from flowpm_dist.cosmoflow.phases import PHASES, PhaseClock
from flowpm_dist.cosmoflow.plan import TrainingPlan
from flowpm_dist.cosmoflow.record_batches import check_lane
from flowpm_dist.cosmoflow.records import (
    DummyDataset,
    RecordDataset,
    RecordError,
    finish_dataset,
    read_header,
    stage,
)
from flowpm_dist.cosmoflow.training import Source, StepReport, Trainer, mean_loss
from flowpm_dist.io.files import write_text
from flowpm_dist.jobs.progress import WorkProgress
from flowpm_dist.jobs.stop import StopRequest
from flowpm_dist.jobs.tables import Table, read_rows
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

HELD_OUT = ("validation", "test")


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
        step: updates made so far.
        steps: of the whole training.
        loss: of the last step.
        validation_loss: the latest, where there was one.
        seconds: of this session's steps.
        phases: seconds per step of each phase, in this session.
        stopped_by: name of the signal that ended it early.
    """

    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    seconds: float
    phases: dict[str, float]
    stopped_by: str | None


def stage_files(plan: TrainingPlan, progress: WorkProgress) -> None:
    """Copy the files of a run to the fast folder that it names, if any, once on each node.

    Before the ranks form a mesh: those that wait for others there do so for minutes at most.
    """
    data = plan.data
    if data.staging is None or data.folder is None or launch.detect().local_rank:
        return
    for split in ("train", "validation"):
        stage(
            data.folder,
            data.staging,
            split,
            progress=functools.partial(progress, f"staging {split}"),
        )


class TrainingRun:
    """One session of a training: its beginning, or where it goes on.

    Files that are to be staged have been, see `stage_files`.

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
        progress: WorkProgress,
    ) -> None:
        self.plan = plan.with_mesh(str(mesh) or "replica:1")
        self.mesh, self.folder, self.progress = mesh, folder, progress
        self.lanes = Lanes.of(self.mesh, plan.training.batch)
        self.clock = PhaseClock()
        self.maker: UniverseMaker | None = None
        self.statistics: Statistics | None = None
        dataset, channels = None, 1
        source: Source
        if plan.simulates:
            source = self._in_situ()
        else:
            files = self._dataset("train")
            dataset = files if isinstance(files, RecordDataset) else None
            channels = files.block_shape[-1]
            source = FileSource(
                files,
                self.mesh,
                self.lanes,
                seed=plan.training.seed,
                augment=plan.data.augment,
                clock=self.clock,
            )
        standardiser = standardiser_of(plan, dataset)
        count = len(standardiser.names)
        network = network_of(plan, self.mesh, parameters=count, channels=channels)
        network.broadcast_weights()
        optimiser = optimiser_of(plan)
        optimiser.build(network.weights)
        self.trainer = Trainer(
            network, optimiser, standardiser, source, self.clock, plan.training.seed
        )
        self.checkpoints = Checkpoints(
            folder.checkpoints, self.mesh, network.state, optimiser, plan.training.keep
        )

    def _in_situ(self) -> InSituSource:
        plan, data = self.plan, self.plan.data
        self.maker = maker_of(plan, self.mesh, self.lanes)
        names = self.maker.priors.names
        self.statistics = Statistics(self.folder.statistics("train"), self.mesh, names)
        return InSituSource(
            self.maker,
            self.mesh,
            ReplayPlan(data.simulations, data.reuse, data.buffer, data.fill),
            seed=plan.training.seed,
            augment=data.augment,
            clock=self.clock,
            made=self.statistics.add,
        )

    def _dataset(self, split: str) -> RecordDataset | DummyDataset:
        plan, data = self.plan, self.plan.data
        block = block_of_volumes(self.mesh)
        if data.source == "dummy":
            samples = max(64, plan.training.batch)
            return DummyDataset(plan.grid, plan.parameters, block=block, samples=samples)
        folder = self.folder.held_out if plan.simulates else data.folder
        assert folder is not None
        if data.staging is not None:
            folder = data.staging
        parameters = data.parameters if data.source == "files" else None
        return RecordDataset(folder, split, grid=plan.grid, block=block, parameters=parameters)

    def run(self, *, resume: bool) -> Outcome:
        """Train to the end, or until a signal comes. On all ranks together.

        Args:
            resume: go on from the latest checkpoint, if there is one.

        Raises:
            DivergedError, RecordError, HaloError, WriteError: the checkpoints are as they were.
        """
        first = self._resumed() if resume else 0
        if self.mesh.rank == 0:
            text = f"# As run by flowpm-dist.\n{self.plan.resolved()}"
            write_text(self.folder.run_file, text)
        if self.maker is not None:
            self._make_held_out(self.maker)
        if self.plan.data.source != "dummy":
            check_lane(len(self._validation_set), self.lanes.batch, None)
        with ExitStack() as opened:
            opened.callback(self.trainer.source.close)
            progress = functools.partial(self.progress, "simulating")
            self.trainer.source.start(first, progress)
            self.clock.lap()
            if first == 0:
                self._calibrate()
            logs = self._logs(first, opened)
            # Until here nothing is lost by ending at once.
            stop = opened.enter_context(StopRequest(self.mesh).heard())
            outcome = self._steps(first, stop, logs)
        if self.mesh.rank == 0:
            self._write_phases(outcome)
        return outcome

    def _resumed(self) -> int:
        """The step to go on with: that of the latest checkpoint."""
        said = int(str(self.folder.mark().get("step", 0)))
        found = self.checkpoints.restore()
        if found is None and int(self.mesh.world.broadcast(tf.constant(said))):
            raise TrainedError(
                f"{self.folder.path} has made {said} steps, but {self.folder.checkpoints} holds no "
                "checkpoint: put it back, or begin anew with --overwrite"
            )
        return found or 0

    def _make_held_out(self, maker: UniverseMaker) -> None:
        """Simulations of validation and test, unless they are there from an earlier session."""
        folder, header = self.folder.held_out, header_of(self.plan, self.mesh)
        try:
            there = set(read_header(folder)[1]) >= set(HELD_OUT)
        except (RecordError, OSError):
            there = False
        # As rank 0 sees it: file systems may show it to others later.
        there = bool(self.mesh.world.broadcast(tf.constant(int(there))))
        missing = [] if there else list(HELD_OUT)
        for split in missing:
            count = getattr(self.plan.data, split)
            make_volumes(
                maker,
                split,
                count,
                folder,
                header,
                self.mesh,
                Statistics(self.folder.statistics(split), self.mesh, maker.priors.names),
                overwrite=True,
                progress=functools.partial(self.progress, f"simulating for {split}"),
            )
        if missing and self.mesh.rank == 0:
            finish_dataset(folder, header)
        self.mesh.barrier()

    def _calibrate(self) -> None:
        """See `Network.calibrate`."""
        if self.plan.training.calibrate:
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

    def _logs(self, first: int, open_files: ExitStack) -> tuple[Table, TensorBoard] | None:
        if self.mesh.rank != 0:
            return None
        table = Table(self.folder.metrics, COLUMNS, first)
        open_files.callback(table.close)
        board = TensorBoard(self.folder.path / "tensorboard", first)
        open_files.callback(board.close)
        return table, board

    def _steps(
        self, first: int, stop: StopRequest, logs: tuple[Table, TensorBoard] | None
    ) -> Outcome:
        asked, steps = self.plan.training, self.plan.total_steps
        if first >= steps and self.mesh.rank == 0:
            self.folder.write_mark(complete=True, step=first, steps=steps)
        self.progress.note(f"training from step {first} of {steps}; compiling")
        begin, totals = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
        report, validation, stopped, number = None, None, None, first
        while number < steps and stopped is None:
            started = time.perf_counter()
            report = self.trainer.step(number)
            number += 1
            with self.clock("other"):
                stopped = stop.name()
                last = number == steps or stopped is not None
                saves = last or (number % asked.checkpoint_every == 0 and report.finite)
                validates, fresh = number % asked.validate_every == 0 or number == steps, None
                if saves or validates:
                    self._recentre()
                if validates:
                    fresh = self._validation_loss()
                    validation = fresh if fresh is not None else validation
            seconds = {**report.seconds, "other": self.clock.lap()["other"]}
            rate = asked.batch / (time.perf_counter() - started)
            self._tell(report, seconds, rate, fresh, validation, logs)
            # Only now: a row of every step that the checkpoint stands for is written.
            with self.clock("other"):
                if saves:
                    self._save(number)
            seconds["other"] += self.clock.lap()["other"]
            for phase, value in seconds.items():
                totals[phase] += value
        count = max(1, number - first)
        return Outcome(
            number,
            steps,
            None if report is None else report.loss,
            validation,
            time.perf_counter() - begin,
            {phase: total / count for phase, total in totals.items()},
            stopped,
        )

    def _tell(
        self,
        report: StepReport,
        seconds: dict[str, float],
        rate: float,
        fresh: float | None,
        validation: float | None,
        logs: tuple[Table, TensorBoard] | None,
    ) -> None:
        done, steps = report.step + 1, self.plan.total_steps
        held = "" if validation is None else f"  validation {validation:.4f}"
        state = f"loss {report.loss:.4f}{held}  {rate:.2f} samples/s"
        self.progress("training", done, steps, state)
        if logs is None:
            return
        table, board = logs
        values = {
            "loss": report.loss,
            "rate": report.rate,
            "gradient_norm": report.gradient_norm,
            "samples_per_second": rate,
            **({} if fresh is None else {"validation_loss": fresh}),
            **{f"{phase}_seconds": value for phase, value in seconds.items()},
        }
        batch = self.plan.training.batch
        made = self.trainer.source.simulations(report.step)
        counts = {"step": report.step, "samples": done * batch, "simulations": made}
        table.add({**counts, **values})
        board.add(report.step, **values)

    def _validation_loss(self) -> float | None:
        if self.plan.data.source == "dummy":
            return None
        trainer, dataset = self.trainer, self._validation_set
        batches = in_order(dataset, self.lanes)
        return mean_loss(trainer.network, trainer.standardiser, batches, len(dataset))

    @functools.cached_property
    def _validation_set(self) -> RecordDataset:
        dataset = self._dataset("validation")
        assert isinstance(dataset, RecordDataset)
        return dataset

    def _save(self, step: int) -> None:
        # Statistics first: what the buffer no longer holds is not simulated again on resuming.
        if self.statistics is not None:
            self.statistics.write()
        self.checkpoints.save(step)
        if self.mesh.rank == 0:
            complete = step == self.plan.total_steps
            self.folder.write_mark(complete=complete, step=step, steps=self.plan.total_steps)

    def _write_phases(self, outcome: Outcome) -> None:
        from flowpm_dist.cosmoflow.figures import phases_figure, training_figure
        from flowpm_dist.io.figure_style import save_figure

        path = self.folder.path
        if not any(outcome.phases.values()):
            return  # no step was left to do
        facts = {
            "seconds_per_step": outcome.phases,
            "mesh": str(self.mesh),
            "ranks": self.mesh.size,
            "threads_per_rank": launch.threads_per_rank(),
            "seconds": outcome.seconds,
        }
        write_text(path / "phases.json", json.dumps(facts, indent=1) + "\n")
        save_figure(phases_figure(outcome.phases), path / "phases.png")
        rows = read_rows(self.folder.metrics)
        if rows:
            held = [row for row in rows if row["validation_loss"]]
            save_figure(
                training_figure(
                    [int(row["step"]) for row in rows],
                    [float(row["loss"]) for row in rows],
                    [int(row["step"]) for row in held],
                    [float(row["validation_loss"]) for row in held],
                    [float(row["rate"]) for row in rows],
                ),
                path / "training.png",
            )
