"""The folder of a reconstruction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from flowpm_dist.io.files import write_text
from flowpm_dist.jobs.folder import numbered_checkpoints
from flowpm_dist.jobs.work_folder import WorkFolder

MARK = "reconstruction.json"
CHECKSUMS = "checksums.json"
FIELDS = "reconstruction.zarr"
MAPS = ("convergence.zarr", "convergence.csv", "convergence.png")
FIGURES = ("slabs.png", "correlation.png", "power_spectrum.png", "loss.png", "chains.png")
CONTENTS = (
    MARK, "run.toml", "iterations.csv", "checkpoints", "chains", "draws.csv", FIELDS,
    "metrics.csv", "result.json", CHECKSUMS, *FIGURES, *MAPS,
)  # fmt: skip


class ReconstructionFolder(WorkFolder):
    """A folder that one reconstruction owns."""

    kind = "reconstruction"
    contents = CONTENTS
    begun = MARK
    kept = ("searched",)

    @property
    def iterations(self) -> Path:
        """The table with a row for each iteration."""
        return self.path / "iterations.csv"

    @property
    def fields(self) -> Path:
        """The fields of the universe that was found; they are moved here last."""
        return self.path / FIELDS

    @property
    def maps(self) -> Path:
        """The maps of a reconstruction from the convergence."""
        return self.path / MAPS[0]

    @property
    def chains(self) -> Path:
        """The checkpoints of the chains."""
        return self.path / "chains"

    @property
    def draws(self) -> Path:
        """The table with a row for each move of each chain."""
        return self.path / "draws.csv"

    @property
    def result(self) -> Path:
        """The numbers of the result."""
        return self.path / "result.json"

    def checksums(self) -> dict[str, str]:
        """Returns those of the files that were read at the beginning; empty if none are known."""
        try:
            found = json.loads((self.path / CHECKSUMS).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_checksums(self, found: Mapping[str, str]) -> None:
        """Keeps the checksums of the files that are read, by key of the run file. On rank 0.

        Raises:
            WriteError: they cannot be written.
        """
        write_text(self.path / CHECKSUMS, json.dumps(dict(found), indent=1) + "\n")

    @property
    def is_searched(self) -> bool:
        """Whether the search has ended, and its results are written."""
        return bool(self.mark().get("searched"))

    def last_iteration(self) -> int | None:
        """Returns the iteration of the search's latest checkpoint, or None if there is none."""
        return max(numbered_checkpoints(self.checkpoints, "iteration"), default=None)

    def last_move(self) -> int | None:
        """Returns the move of the chains' latest checkpoint, or None if there is none."""
        return max(numbered_checkpoints(self.chains, "iteration"), default=None)
