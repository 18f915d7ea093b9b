"""The output folder of `flowpm-dist emulate`. Nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from typing_extensions import override

from flowpm_dist.io.files import read_json, snapshot_attributes
from flowpm_dist.jobs.folder import CHECKSUMS, WorkFolder
from flowpm_dist.jobs.results import RunRecord, read_rows
from flowpm_dist.simulate.options import output_name

MARK, CORRECTION = "emulation.json", "correction.json"
FIGURES = {
    "correction.png": "Power over the truth's and 1 - r with it, of the universes held out.",
    "learning.png": "The loss by iteration.",
}
CAPTIONS = {
    **FIGURES,
    "iterations.csv": "The iterations of the learning.",
    "scores.csv": "The universes held out, without and with the correction.",
}


class EmulationFolder(WorkFolder):
    """A folder that one emulation owns.

    Attributes:
        iterations: the table with a row for each iteration.
        truth: the states of converged runs.
        checkpoint: the latest numbers and what Adam remembers.
        correction: the result, written at each validation.
        scores: the table of the universes that were held out.
    """

    kind = "emulation"
    contents = (
        MARK, "run.toml", CHECKSUMS, "iterations.csv", "truth", "checkpoint.npz", CORRECTION,
        "scores.csv", *FIGURES,
    )  # fmt: skip
    begun = MARK
    resumed_keys = ("iteration",)
    unit = "iteration"
    captions = CAPTIONS

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.iterations, self.truth = self.path / "iterations.csv", self.path / "truth"
        self.checkpoint, self.correction = self.path / "checkpoint.npz", self.path / CORRECTION
        self.scores = self.path / "scores.csv"

    def states(self, number: int, times: Iterable[float]) -> dict[float, Path]:
        """Returns the folders of the states of a converged run, by scale factor.

        Args:
            number: the number of the run, from 0.
            times: scale factors.
        """
        return {a: self.truth / f"{number:03d}-{output_name(a)}" for a in times}

    def has_states(self, number: int, times: Iterable[float]) -> bool:
        """Returns whether the folder holds all states of a converged run, see `states`."""
        return all(
            (snapshot_attributes(path / "snapshot.zarr") or {}).get("complete")
            for path in self.states(number, times).values()
        )

    @override
    def last_checkpoint(self) -> tuple[Path, str] | None:
        done = self.mark().get("iteration")
        if done is None or not self.checkpoint.exists():
            return None
        return self.checkpoint, f"iteration {done}"

    @override
    def record(self) -> RunRecord | None:
        rows = read_rows(self.iterations)
        scores = read_json(self.correction).get("scores", {})
        names = {"loss": "loss held out", "verdict": "against no correction"}
        results = {names[key]: scores[key] for key in names if key in scores}
        return self.recorded(f"{len(rows)} iterations" if rows else "", results)
