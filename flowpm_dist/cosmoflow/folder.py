"""The folder of a training."""

from __future__ import annotations

from pathlib import Path

from flowpm_dist.cosmoflow.plan import TrainingPlan
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.work_folder import WorkFolder

LOGS_OF_A_STEP = 2048  # [bytes]
MARK = "training.json"
CONTENTS = (
    MARK, "run.toml", "metrics.csv", "phases.json", "checkpoints", "tensorboard", "held-out",
    "statistics", "evaluation", "training.png", "phases.png",
)  # fmt: skip


class TrainedError(UserError):
    """A folder holds no usable network, or trainings cannot be compared."""


class TrainingFolder(WorkFolder):
    """A folder that one training owns."""

    kind = "training"
    contents = CONTENTS
    kept = ("step",)

    @property
    def metrics(self) -> Path:
        """The table with a row for each step."""
        return self.path / "metrics.csv"

    @property
    def held_out(self) -> Path:
        """The dataset of the splits "validation" and "test"."""
        return self.path / "held-out"

    @property
    def evaluation(self) -> Path:
        """The folder that `flowpm-dist evaluate` writes."""
        return self.path / "evaluation"

    def statistics(self, stream: str) -> Path:
        """Returns the file of the summary statistics of a stream, which baselines are fitted to."""
        return self.path / "statistics" / f"{stream}.npz"


def training_bytes(plan: TrainingPlan, folder: TrainingFolder) -> int:
    """Returns the size of what a training will write, about and at most [bytes]."""
    itemsize = 8 if plan.network.precision == "float64" else 4
    weights = plan.declaration.parameters(plan.width, outputs=plan.outputs)
    # Adam keeps two numbers for each weight; a new checkpoint is written before the oldest goes.
    needed = (plan.training.keep + 1) * 3 * weights * itemsize
    if plan.simulates and not folder.held_out.exists():
        needed += (plan.data.validation + plan.data.test) * plan.width**3 * itemsize
    return needed + FIGURES_AND_TABLES + LOGS_OF_A_STEP * plan.total_steps
