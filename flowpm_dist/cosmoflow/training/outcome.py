"""The outcome of a session of a training, and its figures."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.io.files import write_text, written_whole
from flowpm_dist.jobs.tables import read_rows
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of a training.

    Attributes:
        step: updates made so far.
        steps: of the whole training.
        loss: of the last step.
        validation_loss: the latest, where there was one.
        seconds: of this session's steps.
        phases: seconds per step of each phase, in this session.
        stopped_by: name of the signal that ended it before its last step.
        best: least validation loss and the step after which it was found, if there was one.
        ended_early: whether validations stopped getting better, see `TrainingOptions.patience`.
    """

    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    seconds: float
    phases: dict[str, float]
    stopped_by: str | None
    best: tuple[float, int] | None = None
    ended_early: bool = False

    @property
    def stopped_at(self) -> str:
        """Where the training was stopped, in words."""
        return f"after step {self.step} of {self.steps}"


def write_phases(outcome: TrainingOutcome, folder: TrainingFolder, mesh: ProcessMesh) -> None:
    """Writes phases.json, phases.png and training.png, if a step was made. On rank 0.

    Args:
        outcome: of the session.
        folder: of the training, with metrics.csv.
        mesh: the ranks.

    Raises:
        WriteError: a file cannot be written.
    """
    from flowpm_dist.cosmoflow.scores.figures import phases_figure, training_figure
    from flowpm_dist.io.figure_style import save_figure

    if not any(outcome.phases.values()):
        return
    path = folder.path
    facts = {
        "seconds_per_step": outcome.phases,
        "mesh": str(mesh),
        "ranks": mesh.size,
        "threads_per_rank": launch.threads_per_rank(),
        "seconds": outcome.seconds,
    }
    write_text(path / "phases.json", json.dumps(facts, indent=1) + "\n")
    with written_whole(path / "phases.png") as aside:
        save_figure(phases_figure(outcome.phases), aside)
    rows = read_rows(folder.metrics)
    if rows:
        held = [row for row in rows if row["validation_loss"]]
        figure = training_figure(
            [int(row["step"]) for row in rows],
            [float(row["loss"]) for row in rows],
            [int(row["step"]) for row in held],
            [float(row["validation_loss"]) for row in held],
            [float(row["rate"]) for row in rows],
        )
        with written_whole(path / "training.png") as aside:
            save_figure(figure, aside)
