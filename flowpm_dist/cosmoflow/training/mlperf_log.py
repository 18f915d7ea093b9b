"""The log of a training in the form of MLPerf's benchmarks, for their tools to read.

Each line is ":::MLLOG " and a JSON object, as the package mlperf-logging 4.1 (mllog) writes them;
keys are those of the reference of MLPerf HPC CosmoFlow
(github.com/sparticlesteve/cosmoflow-benchmark). They come in its order but for ranks and nodes,
which come after the submission here, for those of the optimiser and of dropout, which are told
together, and for eval_error, which comes before epoch_stop. A training that is resumed adds a run
of its own to the file.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flowpm_dist.cosmoflow.network.schedules import scaled_rate
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.io.files import WriteError

POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class MLPerfLog:
    """The log of a session. On rank 0.

    Lines are appended to those of earlier sessions. Epochs are counted from 1, as in the reference.

    Args:
        path: of the file.
        plan: of the training.
    """

    def __init__(self, path: Path, plan: TrainingPlan) -> None:
        self._path, self._plan = path, plan
        self._epoch: int | None = None

    def begin(self, *, ranks: int, nodes: int, samples: int, validation: int) -> None:
        """Tells what will be trained, before the data are read.

        Args:
            ranks, nodes: of the job.
            samples, validation: volumes to train on, and to validate on.
        """
        asked, network = self._plan.training, self._plan.network
        rate = scaled_rate(
            asked.learning_rate, asked.batch, asked.reference_batch, rule=asked.rate_rule
        )
        milestones = asked.milestones or ()
        self._add(POINT, "cache_clear")
        self._add(START, "init_start")
        self._add(POINT, "seed", asked.seed)
        self._add(POINT, "submission_benchmark", "cosmoflow")
        for key in ("org", "division", "status", "platform"):
            self._add(POINT, f"submission_{key}", "UNDEFINED")
        self._add(POINT, "number_of_ranks", ranks)
        self._add(POINT, "number_of_nodes", nodes)
        self._add(POINT, "accelerators_per_node", ranks // nodes)
        self._add(END, "init_stop")
        self._add(START, "run_start")
        told = {
            "global_batch_size": asked.batch,
            "train_samples": samples,
            "eval_samples": validation,
            "opt_name": asked.optimiser.upper(),
            "opt_base_learning_rate": rate,
            "opt_learning_rate_warmup_epochs": asked.warmup,
            "opt_learning_rate_warmup_factor": rate / asked.learning_rate,
            "opt_learning_rate_decay_boundary_epochs": [step for step, _ in milestones],
            "opt_learning_rate_decay_factor": max([f for _, f in milestones], default=1),
            "opt_weight_decay": asked.weight_decay,
            "dropout": network.dropout,
        }
        for key, value in told.items():
            self._add(POINT, key, value)

    def step_begins(self, step: int) -> None:
        """Tells that an epoch begins, and that the one before ends, if this is its first step."""
        epoch = self._epoch_of(step)
        if epoch != self._epoch:
            self._close_epoch()
            self._epoch = epoch
            self._add(START, "epoch_start", epoch_num=epoch)

    def validation_begins(self) -> None:
        """Tells that the volumes of validation are asked about."""
        self._add(START, "eval_start", epoch_num=self._epoch)

    def validated(self, error: float) -> None:
        """Tells the mean absolute error of validation; of `mlperf`, parameters from -1 to 1."""
        self._add(END, "eval_stop", epoch_num=self._epoch)
        self._add(POINT, "eval_error", error, epoch_num=self._epoch)

    def _close_epoch(self) -> None:
        if self._epoch is not None:
            self._add(END, "epoch_stop", epoch_num=self._epoch)
            self._epoch = None

    def _epoch_of(self, step: int) -> int:
        epochs = self._plan.training.epochs or 1
        return 1 + step * epochs // self._plan.total_steps

    def end(self, *, success: bool) -> None:
        """Tells that the session ends."""
        self._close_epoch()
        self._add(END, "run_stop", status="success" if success else "aborted")

    def _add(self, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        line = {
            "namespace": "",
            "time_ms": time.time_ns() // 10**6,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": Path(__file__).name, "lineno": 0, **metadata},
        }
        try:
            with self._path.open("a") as file:
                file.write(f":::MLLOG {json.dumps(line)}\n")
        except OSError as error:
            raise WriteError.of(self._path, error) from error
