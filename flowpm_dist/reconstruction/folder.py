"""The output folder of `flowpm-dist reconstruct`. Nothing here imports TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.io.files import read_json
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.folder import CHECKSUMS, WorkFolder
from flowpm_dist.jobs.results import RunRecord, read_rows

MARK = "reconstruction.json"
FIELDS = "reconstruction.zarr"
MAPS = ("convergence.zarr", "convergence.csv", "convergence.png")
FIGURES = {
    "slabs.png": "A slab of the data, of the reconstruction and of what is left between them.",
    "correlation.png": "The correlation with the truth by wavenumber, and the ratio of amplitudes.",
    "power_spectrum.png": "The power of the reconstruction by wavenumber.",
    "loss.png": "Both parts of minus the log posterior, by the number of gradients.",
    "chains.png": "The values of each chain, move by move; the warm-up is grey.",
}
CAPTIONS = {
    **FIGURES,
    "convergence.png": "The convergence: the data, the reconstruction and what is left.",
    "convergence.csv": "The angular power of the data and of the reconstruction.",
    "metrics.csv": "The power of the reconstruction by wavenumber; with a truth, its correlation.",
    "iterations.csv": "The iterations of the search.",
    "draws.csv": "The moves of the chains.",
}


class ReconstructionFolder(WorkFolder):
    """A folder that one reconstruction owns.

    Attributes:
        iterations: the table with a row for each iteration.
        draws: the table with a row for each move of each chain.
        fields: the fields of the universe that was found; they are moved here last.
        chains: the checkpoints of the chains.
        result: the numbers of the result.
    """

    kind = "reconstruction"
    contents = (
        MARK, "run.toml", "iterations.csv", "checkpoints", "chains", "draws.csv", FIELDS,
        "metrics.csv", "result.json", CHECKSUMS, *FIGURES, *MAPS,
    )  # fmt: skip
    begun = MARK
    resumed_keys = ("searched",)
    unit = "iteration"
    captions = CAPTIONS

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.iterations, self.draws = self.path / "iterations.csv", self.path / "draws.csv"
        self.fields = self.path / FIELDS
        self.chains = CheckpointStore(self.path / "chains", self.unit)
        self.result = self.path / "result.json"

    @override
    def last_checkpoint(self) -> tuple[Path, str] | None:
        if (move := self.chains.last) is not None:
            return self.chains.path, f"move {move}"
        return super().last_checkpoint()

    @override
    def record(self) -> RunRecord | None:
        facts = read_json(self.result)
        results: dict[str, Any] = {}
        if "stopped" in facts:
            results["search"] = facts["stopped"]
        if "data_per_observed_cell" in facts:
            results["data in each cell"] = facts["data_per_observed_cell"]
        for name, parameter in facts.get("parameters", {}).items():
            results[f"{name} where the posterior is highest"] = parameter["value"]
        for row in facts.get("correlations", ()):
            results[f"r at {row['k [h/Mpc]']:.2f} h/Mpc"] = row["r initial field"]
        sampled = facts.get("sampling", {})
        for name, parameter in sampled.get("parameters", {}).items():
            results[f"{name}, mean of the draws"] = parameter["mean"]
        rows = read_rows(self.iterations)
        return self.recorded(f"{len(rows)} iterations" if rows else "", results)


def outcome_of(stopped: str | None, left: float | None) -> str:
    """Returns why a search stopped, and how far it is.

    Args:
        stopped, left: `Search.outcome`, and what is left to gain; None in results of an older
            version.
    """
    if stopped is None:
        return "An older version made the search; why it stopped was not written"
    to_gain = "" if left is None else f": about {left:.2g} of the log posterior left to gain"
    return {
        "converged": f"The search converged{to_gain}",
        "evaluations": f"The search has not converged when its gradients were used up{to_gain}",
        "stalled": f"The search stalled, as no step lowers the loss any more{to_gain}",
    }[stopped]
