"""The work of `flowpm-dist emulate`.

Nothing here imports TensorFlow before the work begins.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.corrections.options import SPACING
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.grid.decomposition import finer_grid
from flowpm_dist.io.files import read_json
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, read_rows, record_of_work
from flowpm_dist.simulation.cost import kind_of, measured_rate, record_rate
from flowpm_dist.simulation.demand import Demand, Estimate

CONVERGED = "emulate, converged runs"
"""The name under which their speed is kept."""


class EmulationJob(Job[EmulationOptions, dict[str, Any]]):
    """An emulation that was checked and can begin."""

    name = "emulate"
    help = "Learn a correction, with which cheap runs stand for converged ones."
    asks = "Cheap runs, the truth, and how to learn."
    example = "flowpm-dist emulate run.toml --ranks 2 --output learned"
    options_type, folder_type = EmulationOptions, EmulationFolder
    unit = counted = "iteration"
    folder: EmulationFolder

    def describe(self) -> str:
        """Returns a line that says what will be learned."""
        options, steps = self.options, self.options.evolution
        if options.truth.pairs:
            truth = f"{len(options.truth.pairs)} universes of other codes"
        else:
            several = f"{options.truth.universes} + {options.emulate.validation} universes"
            truth = f"{several}, {options.truth.steps} steps on a mesh {options.truth.mesh_factor}"
            truth += " times as fine"
        what = f"{options.emulate.kind} for {options.emulate.structure}"
        if options.emulate.structure == "pm":
            what += f", {steps.step_count} steps at mesh_factor = {steps.mesh_factor:g}"
        return f"{what}, {' x '.join(map(str, options.box.grid))}; from {truth}; mesh {self.mesh}"

    @property
    @override
    def demand(self) -> Demand:
        return self.options.demand(self.mesh)

    @property
    @override
    def disk(self) -> int:
        return self.options.disk

    @property
    @override
    def cells(self) -> int:
        return math.prod(self.options.box.grid) * self.options.evolution.step_count

    @property
    def remaining(self) -> int:
        """The number of iterations that are left."""
        done = self.folder.mark().get("iteration", 0) if self.resume else 0
        return self.options.emulate.iterations - (done if isinstance(done, int) else 0)

    @override
    def seconds_per_piece(self, result: dict[str, Any]) -> float | None:
        seconds: float | None = result.get("seconds_per_iteration")
        return seconds

    @property
    def estimate(self) -> Estimate:
        """See `Job.estimate`; the converged runs that are left to be made are included."""
        found, options, cells = super().estimate, self.options, self._converged_cells
        left = 0 if options.truth.pairs else options.universes
        if self.resume:
            left = sum(not self.folder.has_states(n, options.times) for n in range(left))
        if not left or found.seconds is None:
            return found
        rate = measured_rate(kind_of(CONVERGED, self.ranks), cells)
        seconds = None if rate is None else found.seconds + left * rate * cells
        return dataclasses.replace(found, seconds=seconds)

    def remember(self, result: dict[str, Any]) -> None:
        """See `Job.remember`; the speed of converged runs is kept, too."""
        super().remember(result)
        if (seconds := result["seconds_per_converged_run"]) is not None:
            cells = self._converged_cells
            record_rate(kind_of(CONVERGED, self.ranks), cells, seconds / cells)

    @property
    def _converged_cells(self) -> int:
        """The cells of a converged run: of its force mesh, times its steps."""
        truth = self.options.truth
        return math.prod(finer_grid(self.options.box.grid, truth.mesh_factor)) * truth.steps

    @override
    def last_checkpoint(self) -> tuple[Path, str] | None:
        done = self.folder.mark().get("iteration")
        if done is None or not self.folder.checkpoint.exists():
            return None
        return self.folder.checkpoint, f"iteration {done}"

    def work(self, progress: Progress) -> dict[str, Any]:
        """See `Job.work`. Returns the scores.

        Raises:
            StopError: a signal stopped it; a checkpoint was written.
            LearningError: pairs that do not belong together, or numbers that are not finite.
            SnapshotError, HaloError, WriteError, CheckpointError: see `EmulationSession`.
        """
        from flowpm_dist.emulate.session import EmulationSession
        from meshimpl.process_mesh import ProcessMesh

        session = EmulationSession(self.options, ProcessMesh(self.mesh), self.folder, progress)
        return session.run(resume=self.resume)

    def report(self, result: dict[str, Any]) -> str:
        """Returns where to look, and the figures that come first."""
        several = len({row[SPACING] for row in result["shown"]}) > 1
        lines = [
            f"{f'particles {row[SPACING]:g} Mpc/h apart, ' * several}a = {row['a']:g}, "
            f"k = {row['k [h/Mpc]']:.2f} h/Mpc: P over the truth's "
            f"{row['P plain']:.3f}, corrected {row['P corrected']:.3f}; 1 - r "
            f"{row['1 - r plain']:.1e}, corrected {row['1 - r corrected']:.1e}"
            for row in result["shown"]
        ]
        path = self.folder.path
        return f"""
Correction, a {self.options.emulate.kind}, in {path}:
  correction.png      power and correlation with the truth, of the universes held out
  learning.png        how it was learned; a row for each iteration in iterations.csv
  correction.json     the correction: correction = "{self.folder.correction}" in [evolution]
  scores.csv          each universe held out; run.toml: the run with all its settings

Mean of the universes held out:
{chr(10).join(lines)}"""

    @classmethod
    @override
    def record(cls, path: Path) -> RunRecord | None:
        folder = EmulationFolder(path)
        rows = read_rows(folder.iterations)
        scores = read_json(folder.correction).get("scores", {})
        results = {} if "loss" not in scores else {"loss held out": scores["loss"]}
        return record_of_work(folder, f"{len(rows)} iterations" if rows else "", results)
