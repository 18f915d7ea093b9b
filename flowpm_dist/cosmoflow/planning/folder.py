"""The folder of a training."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, read_json, write_json
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.folder import CHECKSUMS, WorkFolder
from flowpm_dist.jobs.results import RunRecord, changed, read_rows
from flowpm_dist.jobs.run_file import flat, toml_of

MARK = "training.json"
SCORES = "scores.json"
"""The file of an evaluation that is written last."""
OPENINGS = "test-set.json"
BEST = "best"
FRESH = "fresh"
CONTENTS = (
    MARK, "run.toml", "metrics.csv", "phases.json", "checkpoints", "tensorboard", "held-out",
    "statistics", "evaluation", "evaluation-validation", "training.png", "phases.png", "draws.json",
    BEST, OPENINGS, "mlperf.log", "summaries", "posterior", "predictions", FRESH,
    CHECKSUMS,
)  # fmt: skip


CAPTIONS = {
    "training.png": "The loss by step, and the validation loss.",
    "phases.png": "How the time of the training was spent.",
    "metrics.csv": "The steps of the training.",
    "predicted.png": "The predicted parameters against the true ones, of simulations held out.",
    "calibration.png": "How often the truth lies within the predicted errors.",
    "learning_curve.png": "The error by the number of simulations trained on.",
    "ranks.png": "The ranks of the true parameters among draws; uniform if calibrated.",
    "tarp.png": "The expected coverage of the posteriors; on the diagonal if calibrated.",
    "corner.png": "The posterior of the parameters.",
    "table.csv": "The errors of the network and of the methods it is compared with.",
}
"""What the figures and tables of trainings, evaluations and predictions show."""


def fresh_split(number: int) -> str:
    """Returns the name of a fresh test set, which is simulated when it is first needed."""
    return f"{FRESH}-{number}"


def is_fresh(split: str) -> bool:
    """Returns whether a split is a fresh test set."""
    return split.startswith(f"{FRESH}-")


class TrainedError(UserError):
    """A folder holds no usable network, or trainings cannot be compared."""


class TrainingFolder(WorkFolder):
    """A folder that one training owns.

    Attributes:
        metrics: the table with a row for each step.
        best: the folder of the weights with the least validation loss.
        draws: how often volumes were drawn, and how much batches vary.
        mlperf_log: the log in the form of MLPerf's benchmarks.
        held_out: the dataset of the splits "validation" and "test".
    """

    kind = "training"
    contents = CONTENTS
    begun = MARK
    resumed_keys = ("step",)
    captions = CAPTIONS

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metrics, self.best = self.path / "metrics.csv", self.path / BEST
        self.draws, self.mlperf_log = self.path / "draws.json", self.path / "mlperf.log"
        self.held_out = self.path / "held-out"

    @override
    def complete_message(self) -> str:
        mark = self.mark()
        early = ""
        if mark.get("ended_early"):
            early = f", of {mark.get('steps')}, as validations got no better"
        return f"The training in {self.path} is complete: {mark.get('step')} steps{early}."

    @override
    def record(self) -> RunRecord | None:
        mark, rows = self.mark(), read_rows(self.metrics)
        results: dict[str, Any] = {}
        for name in ("loss", "validation_loss"):
            values = [float(row[name]) for row in rows if row.get(name)]
            if values:
                results[name.replace("_", " ")] = values[-1]
        fresh = sorted((self.path / FRESH).glob("*/evaluation"))
        folders = [*fresh, *map(self.evaluation, ("test", "validation"))]
        results |= next(filter(None, map(errors_in, folders)), {})
        steps = f"{len(rows)} steps" if rows else ""
        if {"step", "steps"} <= set(mark):
            steps = f"{mark['step']}/{mark['steps']} steps"
        return self.recorded(steps, results)

    def weights(self, which: str) -> Path:
        """Returns the folder of the best or the last weights; the last ones if no best were kept.

        Args:
            which: "best" or "last".
        """
        has_best = which == "best" and any(self.best.glob(f"{self.unit}-*"))
        return self.best if has_best else self.checkpoints.path

    def saved_at(self, which: str) -> float | None:
        """Returns when weights were saved [s since 1970]; None if there are none.

        Args:
            which: "best" or "last".
        """
        paths = [*CheckpointStore(self.weights(which), self.unit).numbered().values()]
        return paths[-1].stat().st_mtime if paths else None

    def dataset(self, split: str) -> Path:
        """Returns the dataset that holds a split of simulations that was not trained on."""
        number = split.removeprefix(f"{FRESH}-")
        return self.path / FRESH / number if is_fresh(split) else self.held_out

    def evaluation(self, split: str = "test") -> Path:
        """Returns the folder that `flowpm-dist evaluate` writes for a split."""
        if is_fresh(split):
            return self.dataset(split) / "evaluation"
        return self.path / ("evaluation" if split == "test" else f"evaluation-{split}")

    def openings(self, split: str | None = "test") -> list[dict[str, Any]]:
        """Returns when a test set was opened: "time" (UTC) and "step" of each evaluation.

        Args:
            split: "test" or a fresh test set; None for all.
        """
        opened = read_json(self.path / OPENINGS).get("opened", [])
        return [each for each in opened if split in (None, each.get("split", "test"))]

    def open_test_set(self, step: int, split: str = "test") -> None:
        """Records that a network predicted for a test set. On rank 0.

        Args:
            step: number of steps that the network was trained for.
            split: "test" or a fresh test set.

        Raises:
            WriteError: the record cannot be written.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        opened = [*self.openings(None), {"time": now, "step": step, "split": split}]
        write_json(self.path / OPENINGS, {"opened": opened})

    def summaries(self, split: str) -> Path:
        """Returns the file of the summaries of a split, see `evaluation.summaries`."""
        return self.path / "summaries" / f"{split}.npz"

    def posterior(self, head: str) -> Path:
        """Returns the file of the posterior with a head, fitted to the network's features."""
        return self.path / "posterior" / f"{head.replace(':', '.')}.npz"

    def feature_density(self, step: int) -> Path:
        """Returns the file of the density of the network's features after a number of steps."""
        return self.path / "posterior" / f"features-{step}.npz"

    def prediction(self, name: str) -> Path:
        """Returns the folder of the posterior of a volume with a name."""
        return self.path / "predictions" / name

    def statistics(self, stream: str) -> Path:
        """Returns the file of the summary statistics of a stream, which baselines are fitted to."""
        return self.path / "statistics" / f"{stream}.npz"


def errors_in(evaluation: Path) -> dict[str, Any]:
    """Returns the errors of the main method of an evaluation, by name; none without scores."""
    scores = read_json(evaluation / SCORES)
    judged = scores.get("scores", {}).get(scores.get("main"), {})
    return {f"RMSE of {name} / mean's": each["rmse_over_mean"] for name, each in judged.items()}


def record_of_evaluation(folder: Path) -> RunRecord | None:
    """Returns what is in the folder of an evaluation; None if it is none."""
    scores = read_json(folder / SCORES)
    if scores.get("generator") != GENERATOR:
        return None
    trainings = [each["folder"] for each in scores["trainings"]]
    settings = {
        "evaluation.trainings": trainings,
        "evaluation.split": scores["split"],
        # Of an older version, it does not say. The training's own file may be any file by now.
        **flat(toml_of(scores["trainings"][0].get("run", ""))),
    }
    done, when = f"{scores['samples']} samples", changed(folder / SCORES)
    errors = errors_in(folder)
    return RunRecord(folder, "evaluation", "complete", done, when, errors, settings, CAPTIONS)
