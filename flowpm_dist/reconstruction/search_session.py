"""A session of a search: iterations.csv, checkpoints, the results."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.jobs.agreement import StopError, StopRequest
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import Table, read_rows, write_run_file
from flowpm_dist.reconstruction.checkpoints import PointCheckpoints
from flowpm_dist.reconstruction.lbfgs import LBFGS
from flowpm_dist.reconstruction.likelihoods import Annealing
from flowpm_dist.reconstruction.observed import model_of, observed_kind
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.results import LARGE, SMALL, write_results
from flowpm_dist.reconstruction.search import Row, Search, Stage, default_stages
from flowpm_dist.reconstruction.unknowns import Unknowns
from flowpm_dist.reconstruction.work import ReconstructionFolder
from flowpm_dist.statistics import compare
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

COMPARE_EVERY = 5
"""Iterations between comparisons with the truth."""

COLUMNS = (
    "iteration", "stage", "evaluations", "radius", "inflation", "loss", "data", "prior",
    "gradient_norm", "step", "seconds", f"r({LARGE})", f"r({SMALL})",
)  # fmt: skip
"""The columns of iterations.csv; parameters follow them."""


class SearchSession:
    """A session of a search for the most probable point, which begins or resumes it.

    Args:
        options: the checked run file, with the mesh of the search.
        mesh: the ranks, of axes row and col.
        folder: the folder, begun on rank 0.
        progress: the progress of this rank.

    Raises:
        VolumeError: a file that cannot be read.
        HaloError: a particle of the mock universe left the halo that was asked for.
    """

    def __init__(
        self,
        options: ReconstructionOptions,
        mesh: ProcessMesh,
        folder: ReconstructionFolder,
        progress: Progress,
    ) -> None:
        self.options, self.mesh, self.folder, self.progress = options, mesh, folder, progress
        progress.note("making the mock universe" if options.is_mock else "reading the data")
        self.model = model_of(options, mesh)
        self.observed = observed_kind(options).of(options, self.model)
        self.posterior = Posterior(self.model, self.observed.likelihood, options.priors.ranges)
        asked = options.search
        self.minimiser = LBFGS(asked.history)
        self.checkpoints = PointCheckpoints(folder.checkpoints, self.posterior.space, asked.keep)
        self.search = Search(
            self.posterior,
            self.minimiser,
            self._stages(),
            seed=asked.seed,
            tolerance=asked.tolerance,
            checkpoints=self.checkpoints,
            every=asked.checkpoint_every,
        )
        self._stop = StopRequest(mesh, "iteration", progress.say)
        self._table: Table | None = None
        self._correlation = ""

    def _stages(self) -> list[Stage]:
        asked = self.options.search
        if asked.stages is None:
            return default_stages(self.posterior, asked.evaluations)
        return [
            Stage(Annealing(radius, inflation), evaluations)
            for radius, inflation, evaluations in asked.stages
        ]

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Searches to the end, or until a signal comes, and writes the results.

        Must be called on all ranks together.

        Args:
            resume: whether to go on from the latest checkpoint, if there is one.

        Returns:
            The contents of result.json.

        Raises:
            StopError: a signal came; a checkpoint was written.
            NoProgressError, HaloError, CheckpointError, WriteError: the checkpoints are as they
                were.
        """
        options, search = self.options, self.search
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, options.resolved())
        self.progress.note(f"searching, {options.search.total} gradients; compiling")
        with ExitStack() as opened:
            opened.callback(self._close)
            # Until here nothing is lost by ending at once.
            opened.enter_context(self._stop.heard())
            begin = self._lap = time.perf_counter()
            point = search.run(self._after_iteration, resume=resume)
            if search.progress.iteration % options.search.checkpoint_every:
                self._save()
        seconds = time.perf_counter() - begin
        self.progress.note("writing the results")
        facts = {
            "iterations": search.progress.iteration,
            "evaluations": search.progress.evaluations,
            "seconds": seconds,
            "mesh": str(self.mesh),
            "ranks": self.mesh.size,
            "threads_per_rank": launch.threads_per_rank(),
        }
        if self.mesh.rank == 0 and (rows := read_rows(self.folder.iterations)):
            facts["seconds_per_evaluation"] = _typical_seconds(rows)
        facts = write_results(self.posterior, self.observed, self.folder, point, facts)
        if self.mesh.rank == 0:
            self.folder.write_mark(complete=options.sampler is None, searched=True)
        return facts

    def _after_iteration(self, row: Row, point: Unknowns) -> None:
        """Adds a line and a row for an iteration, on every rank, and ends if a signal came."""
        seconds = time.perf_counter() - self._lap
        values = {name: float(x) for name, x in self.posterior.parameters(point).items()}
        values |= self._compared(row, point)
        self._say(row)
        if self.mesh.rank == 0:
            if self._table is None:
                columns = (*COLUMNS, *self.posterior.space.names)
                self._table = Table(self.folder.iterations, columns, row.iteration)
            self._table.add({**asdict(row), "seconds": seconds, **values})
        if (signal := self._stop.name()) is not None:
            self._save()
            now, total = self.search.progress, self.options.search.total
            at = f"after iteration {now.iteration}, {now.evaluations} of {total} gradients"
            raise StopError(signal, at)
        self._lap = time.perf_counter()

    def _compared(self, row: Row, point: Unknowns) -> dict[str, float]:
        """Returns the correlation of the initial field with the truth's, now and then."""
        truth = self.observed.truth
        if truth is None or (row.iteration % COMPARE_EVERY and row.iteration > 1):
            return {}
        found = compare(Field(point.field, self.model.simulation.box), truth.state.white_noise)
        places = [int(np.argmin(np.abs(np.log(found.k / k)))) for k in (LARGE, SMALL)]
        shown = [f"r({found.k[i]:.2f}) {found.correlation[i]:.3f}" for i in places]
        self._correlation = "  " + "  ".join(dict.fromkeys(shown))
        names = (f"r({LARGE})", f"r({SMALL})")
        return {n: float(found.correlation[i]) for n, i in zip(names, places, strict=True)}

    def _say(self, row: Row) -> None:
        cells = self.model.simulation.box.cells
        data = row.data / max(1, self.posterior.likelihood.count)
        state = (
            f"loss {row.loss:.6g}  data {data:.4f}  prior {row.prior / cells:.4f}  "
            f"|gradient| {row.gradient_norm:.3g}{self._correlation}"
        )
        total = self.options.search.total
        stage = f"stage {row.stage}/{len(self.search.stages)}"
        self.progress(stage, min(row.evaluations, total), total, state)

    def _save(self) -> None:
        """Writes a checkpoint of the latest iteration."""
        self.checkpoints.save(self.search.progress, self.minimiser.memory())

    def _close(self) -> None:
        if self._table is not None:
            self._table.close()


def _typical_seconds(rows: list[dict[str, str]]) -> float:
    """Returns the seconds of one evaluation.

    This is the median over the iterations, so that compilation does not count.
    """
    ends = np.array([0, *(int(row["evaluations"]) for row in rows)])
    seconds = np.array([float(row["seconds"]) for row in rows])
    return float(np.median(seconds / np.maximum(1, np.diff(ends))))
