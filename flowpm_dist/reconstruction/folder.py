"""The folder of a reconstruction."""

from __future__ import annotations

from pathlib import Path

from flowpm_dist.io.work_folder import WorkFolder

MARK = "reconstruction.json"
FIELDS = "reconstruction.zarr"
FIGURES = ("slabs.png", "correlation.png", "power_spectrum.png", "loss.png")
CONTENTS = (
    MARK, "run.toml", "iterations.csv", "checkpoints", FIELDS, "metrics.csv", "result.json",
    *FIGURES,
)  # fmt: skip


class ReconstructionFolder(WorkFolder):
    """A folder that one reconstruction owns."""

    kind = "reconstruction"
    contents = CONTENTS

    @property
    def iterations(self) -> Path:
        """A row for each iteration."""
        return self.path / "iterations.csv"

    @property
    def fields(self) -> Path:
        """The universe that was found; moved here last."""
        return self.path / FIELDS

    def last_iteration(self) -> int | None:
        """Of the latest checkpoint; None where there is none."""
        there = sorted(self.checkpoints.glob("iteration-*.zarr"))
        return int(there[-1].stem.rpartition("-")[2]) if there else None
