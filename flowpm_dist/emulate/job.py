"""The work of `flowpm-dist emulate`.

Nothing here imports TensorFlow before the work begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from flowpm_dist.corrections.options import SPACING
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.grid.decomposition import finer_grid
from flowpm_dist.jobs.job import Command, Costs, Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.simulation.speeds import Pieces

CONVERGED = "emulate, converged runs"
"""The name under which the speed of converged runs is kept."""


class EmulationJob(Job[EmulationOptions, dict[str, Any]]):
    """An emulation that was checked and can begin."""

    command = Command(
        "emulate",
        "Learn a correction, with which cheap runs stand for converged ones.",
        run_file="Cheap runs, the truth, and how to learn.",
        example="flowpm-dist emulate run.toml --ranks 2 --output learned",
        steps="iteration",
    )
    options_type, folder_type = EmulationOptions, EmulationFolder

    @override
    def describe(self) -> str:
        options, steps = self.options, self.options.evolution
        if options.truth.pairs:
            truth = f"{len(options.truth.pairs)} universes of other codes"
        else:
            several = f"{options.truth.universes} + {options.emulate.validation} universes"
            truth = f"{several}, {options.truth.steps} steps on a mesh {options.truth.mesh_factor}"
            truth += " times as fine"
        learned = f"{options.emulate.kind} for {options.emulate.structure}"
        if options.emulate.structure == "pm":
            learned += f", {steps.step_count} steps at mesh_factor = {steps.mesh_factor:g}"
        return (
            f"{learned}, {' x '.join(map(str, options.box.grid))}; from {truth}; mesh {self.mesh}"
        )

    @property
    @override
    def costs(self) -> Costs:
        options, resume = self.options, self.request.resume
        done = self.folder.mark().get("iteration", 0) if resume else 0
        left = options.emulate.iterations - (done if isinstance(done, int) else 0)
        made = math.prod(options.box.grid) * options.evolution.step_count
        # A converged run: the cells of its force mesh, times its steps.
        truth = options.truth
        converged = math.prod(finer_grid(options.box.grid, truth.mesh_factor)) * truth.steps
        runs = 0 if truth.pairs else options.universes
        if resume:
            runs = sum(not self.folder.has_states(n, options.times) for n in range(runs))
        pieces = (Pieces(self.command.name, made, left), Pieces(CONVERGED, converged, runs))
        return Costs(options.demand(self.mesh), options.disk, pieces)

    @override
    def speeds(self, result: dict[str, Any]) -> Mapping[str, float]:
        measured = {
            self.command.name: result.get("seconds_per_iteration"),
            CONVERGED: result["seconds_per_converged_run"],
        }
        return {name: seconds for name, seconds in measured.items() if seconds is not None}

    def work(self, progress: Progress) -> dict[str, Any]:
        """Learns the correction and returns the scores, see `Job.work`.

        Raises:
            StopError: a signal stopped it; a checkpoint was written.
            LearningError: pairs that do not belong together, or numbers that are not finite.
            SnapshotError, HaloError, WriteError, CheckpointError: see `EmulationSession`.
        """
        from flowpm_dist.emulate.session import EmulationSession
        from meshimpl.process_mesh import ProcessMesh

        mesh = ProcessMesh(self.mesh)
        if mesh.rank == 0 and self.options.files:
            self.folder.keep_checksums(self.options.checksums())
        session = EmulationSession(self.options, mesh, self.folder, progress)
        return session.run(resume=self.request.resume)

    @override
    def report(self, result: dict[str, Any]) -> str:
        several = len({row[SPACING] for row in result["shown"]}) > 1
        lines = [
            f"{f'particles {row[SPACING]:g} Mpc/h apart, ' * several}a = {row['a']:g}, "
            f"k = {row['k [h/Mpc]']:.2f} h/Mpc: P over the truth's "
            f"{row['P plain']:.3f}, corrected {row['P corrected']:.3f}; 1 - r "
            f"{row['1 - r plain']:.1e}, corrected {row['1 - r corrected']:.1e}"
            for row in result["shown"]
        ]
        path, correction = self.folder.path, self.folder.correction.resolve()
        return f"""
Correction, a {self.options.emulate.kind}, in {path}:
  correction.png      power and correlation with the truth, of the universes held out
  learning.png        how it was learned; a row for each iteration in iterations.csv
  correction.json     the correction: correction = "{correction}" in [evolution]
  scores.csv          each universe held out; run.toml: the run with all its settings

Mean of the universes held out:
{chr(10).join(lines)}
Compared with no correction: {result["verdict"]}."""
