"""The folder of a training."""

from __future__ import annotations

from pathlib import Path

from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.work_folder import WorkFolder

MARK = "training.json"
CONTENTS = (
    MARK, "run.toml", "metrics.csv", "phases.json", "checkpoints", "tensorboard", "held-out",
    "statistics", "evaluation", "training.png", "phases.png",
)  # fmt: skip


class TrainedError(UserError):
    """A folder without a network that can be asked, or trainings that cannot be compared."""


class TrainingFolder(WorkFolder):
    """A folder that one training owns."""

    kind = "training"
    contents = CONTENTS
    kept = ("step",)

    @property
    def metrics(self) -> Path:
        """A row for each step."""
        return self.path / "metrics.csv"

    @property
    def held_out(self) -> Path:
        """The dataset of the splits "validation" and "test"."""
        return self.path / "held-out"

    @property
    def evaluation(self) -> Path:
        """What `flowpm-dist evaluate` leaves."""
        return self.path / "evaluation"

    def statistics(self, stream: str) -> Path:
        """What baselines see of the simulations of a stream."""
        return self.path / "statistics" / f"{stream}.npz"
