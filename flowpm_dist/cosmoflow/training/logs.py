"""The logs of a training: a table and events of each step, and MLPerf's log.

MLPerf's tools read the log of the benchmark. Each line is ":::MLLOG " and a JSON object, as the
package mlperf-logging 4.1 (mllog) writes them; keys are taken from the reference of MLPerf HPC
CosmoFlow (github.com/sparticlesteve/cosmoflow-benchmark). Their order differs in three places:
ranks and nodes come after the submission, the optimiser and dropout together, and eval_error before
epoch_stop. A training that is resumed adds a run of its own to the file.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.options import OPTIMISERS, MilestoneDecay
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.trainer import StepReport
from flowpm_dist.cosmoflow.volumes.sources import PHASES
from flowpm_dist.io.files import WriteError, no_link
from flowpm_dist.jobs.results import Table

COLUMNS = (
    "step", "samples", "simulations", "loss", "validation_loss", "validation_mae", "rate",
    "gradient_norm", "samples_per_second", *(f"{phase}_seconds" for phase in PHASES),
)  # fmt: skip
SUBMISSION = tuple(f"submission_{key}" for key in ("org", "division", "status", "platform"))
POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class TrainingLogs:
    """The table and TensorBoard's events of a session. On rank 0.

    Args:
        folder: the training's folder.
        first: step that this session begins with; its events go into a subfolder.

    Raises:
        WriteError: the table or the events cannot be written.
    """

    def __init__(self, folder: TrainingFolder, first: int) -> None:
        self._table = Table(folder.metrics, COLUMNS, first)
        self._events = folder.path / "tensorboard" / f"from-{first}"
        with self._events_written():
            self._writer = tf.summary.create_file_writer(str(self._events))

    def add(
        self,
        report: StepReport,
        seconds: dict[str, float],
        rate: float,
        validation: tuple[float, float] | None,
        **counts: int,
    ) -> None:
        """Adds a step.

        Args:
            report: the step's report.
            seconds: seconds of each phase.
            rate: samples per second.
            validation: loss and mean absolute error of validation, where they were found after
                this step, see `Regressor.mean_errors`.
            counts: `samples` seen so far, `simulations` made when the step began.

        Raises:
            WriteError: the row, or events of earlier steps, cannot be written.
        """
        values = {
            "loss": report.loss,
            "rate": report.rate,
            "gradient_norm": report.gradient_norm,
            "samples_per_second": rate,
            **{f"{phase}_seconds": value for phase, value in seconds.items()},
        }
        if validation is not None:
            values["validation_loss"], values["validation_mae"] = validation
        self._table.add({"step": report.step, **counts, **values})
        with self._events_written(), self._writer.as_default():
            for name, value in values.items():
                tf.summary.scalar(name, value, step=report.step)

    def flush(self) -> None:
        """Writes what is still in memory.

        Raises:
            WriteError: it cannot be written.
        """
        with self._events_written():
            self._writer.flush()

    def close(self) -> None:
        """Closes the table and the events.

        Events that cannot be written are dropped; `flush` reports them.
        """
        with contextlib.suppress(tf.errors.OpError):
            self._writer.close()
        self._table.close()

    @contextlib.contextmanager
    def _events_written(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            raise WriteError.of(self._events, error) from error


class MLPerfLog:
    """MLPerf's log of a session. On rank 0.

    Lines are appended to earlier sessions. Epochs are counted from 1, as in the reference.

    Args:
        path: the file; None to write nothing.
        plan: the training.
    """

    def __init__(self, path: Path | None, plan: TrainingPlan) -> None:
        self._path, self._plan = path, plan
        self._epoch: int | None = None

    def begin(self, *, ranks: int, nodes: int, samples: int, validation: int) -> None:
        """Writes what will be trained, before the data are read.

        Args:
            ranks, nodes: size of the job.
            samples, validation: volumes to train on, and to validate on.
        """
        options, rate = self._plan.training, self._plan.training.base_rate
        decay, optimiser = options.decay, type(options.optimiser)
        milestones = decay.milestones if isinstance(decay, MilestoneDecay) else ()
        name = next(name for name, model in OPTIMISERS.items() if model is optimiser)
        facts = {
            "seed": options.seed,
            "submission_benchmark": "cosmoflow",
            **dict.fromkeys(SUBMISSION, "UNDEFINED"),
            "number_of_ranks": ranks,
            "number_of_nodes": nodes,
            "accelerators_per_node": ranks // nodes,
        }
        settings = {
            "global_batch_size": options.batch,
            "train_samples": samples,
            "eval_samples": validation,
            "opt_name": name.upper(),
            "opt_base_learning_rate": rate,
            "opt_learning_rate_warmup_epochs": options.warmup,
            "opt_learning_rate_warmup_factor": rate / options.learning_rate,
            "opt_learning_rate_decay_boundary_epochs": [step for step, _ in milestones],
            "opt_learning_rate_decay_factor": max([f for _, f in milestones], default=1),
            "opt_weight_decay": options.weight_decay,
            "dropout": self._plan.network.dropout,
        }
        self._add(POINT, {"cache_clear": None})
        self._add(START, {"init_start": None})
        self._add(POINT, facts)
        self._add(END, {"init_stop": None})
        self._add(START, {"run_start": None})
        self._add(POINT, settings)

    def step_begins(self, step: int) -> None:
        """Writes that an epoch begins, and that the one before ends, if this is its first step."""
        epoch = 1 + step * (self._plan.training.epochs or 1) // self._plan.training.steps
        if epoch != self._epoch:
            self._close_epoch()
            self._epoch = epoch
            self._add(START, {"epoch_start": None})

    def validation_begins(self) -> None:
        """Writes that the network predicts the volumes of validation."""
        self._add(START, {"eval_start": None})

    def validated(self, error: float) -> None:
        """Writes the mean absolute error of validation; for `mlperf`, parameters from -1 to 1."""
        self._add(END, {"eval_stop": None})
        self._add(POINT, {"eval_error": error})

    def _close_epoch(self) -> None:
        if self._epoch is not None:
            self._add(END, {"epoch_stop": None})
            self._epoch = None

    def end(self, *, success: bool) -> None:
        """Writes that the session ends."""
        self._close_epoch()
        self._add(END, {"run_stop": None}, status="success" if success else "aborted")

    def _add(self, kind: str, values: Mapping[str, Any], **more: str) -> None:
        """Appends a line for each value, with the number of the epoch inside one."""
        if self._path is None:
            return
        epoch = {} if self._epoch is None else {"epoch_num": self._epoch}
        metadata = {"file": Path(__file__).name, "lineno": 0, **epoch, **more}
        try:
            with open(self._path, "a", opener=no_link) as file:
                for key, value in values.items():
                    now = time.time_ns() // 10**6
                    line = {"namespace": "", "time_ms": now, "event_type": kind}
                    line |= {"key": key, "value": value, "metadata": metadata}
                    file.write(f":::MLLOG {json.dumps(line)}\n")
        except OSError as error:
            raise WriteError.of(self._path, error) from error
