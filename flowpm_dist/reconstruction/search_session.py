"""A search from its plan to its results: iterations.csv, checkpoints, the results."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.jobs.folder import write_run_file
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.stop import StopError, StopRequest
from flowpm_dist.jobs.tables import Table, read_rows
from flowpm_dist.reconstruction.checkpoints import PointCheckpoints
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.logs import COLUMNS, LARGE, SMALL
from flowpm_dist.reconstruction.parts import minimiser_of, model_of, observed_of, stages_of
from flowpm_dist.reconstruction.plan import ReconstructionPlan
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.results import Results
from flowpm_dist.reconstruction.search import Row, Search
from flowpm_dist.reconstruction.unknowns import Unknowns
from flowpm_dist.statistics import compare
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

COMPARE_EVERY = 5
"""Iterations between comparisons with the truth."""


@dataclass(frozen=True)
class ReconstructionOutcome:
    """The outcome of a reconstruction.

    Attributes:
        iteration, evaluations: made so far in the search.
        stopped_by: name of the signal that ended it early.
        stopped_at: where, in words.
        facts: what result.json holds; empty when it was stopped.
    """

    iteration: int
    evaluations: int
    stopped_by: str | None
    facts: dict[str, Any]
    stopped_at: str = ""


class SearchSession:
    """One session of a search for the most probable point: its beginning, or where it goes on.

    Args:
        plan: checked.
        mesh: the ranks, of axes row and col.
        folder: begun on rank 0.
        progress: of this rank.
        run_text: the run file with all defaults, which the results keep.

    Raises:
        VolumeError: a file that cannot be read.
        HaloError: a particle of the mock universe left the halo that was asked for.
    """

    def __init__(
        self,
        plan: ReconstructionPlan,
        mesh: ProcessMesh,
        folder: ReconstructionFolder,
        progress: Progress,
        run_text: str,
    ) -> None:
        self.plan, self._run_text = plan, run_text
        self.mesh, self.folder, self.progress = mesh, folder, progress
        progress.note("making the mock universe" if plan.is_mock else "reading the data")
        self.model = model_of(plan, mesh)
        self.observed = observed_of(plan, self.model)
        self.posterior = Posterior(self.model, self.observed.likelihood, plan.priors.ranges)
        asked = plan.search
        self.minimiser = minimiser_of(asked)
        self.checkpoints = PointCheckpoints(folder.checkpoints, self.posterior.space, asked.keep)
        self.search = Search(
            self.posterior,
            self.minimiser,
            stages_of(asked, self.posterior),
            seed=asked.seed,
            tolerance=asked.tolerance,
            checkpoints=self.checkpoints,
            every=asked.checkpoint_every,
        )
        self._stop = StopRequest(mesh, "iteration", progress.say)
        self._table: Table | None = None
        self._stopped_by: str | None = None
        self._correlation = ""

    def run(self, *, resume: bool) -> ReconstructionOutcome:
        """Searches to the end, or until a signal comes, and writes the results.

        On all ranks together.

        Args:
            resume: go on from the latest checkpoint, if there is one.

        Raises:
            NoProgressError, HaloError, CheckpointError, WriteError: the checkpoints are as they
                were.
        """
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, self._run_text)
        self.progress.note(f"searching, {self.plan.evaluations} gradients; compiling")
        with ExitStack() as opened:
            opened.callback(self._close)
            # Until here nothing is lost by ending at once.
            opened.enter_context(self._stop.heard())
            begin = self._lap = time.perf_counter()
            try:
                point = self.search.run(self._told, resume=resume)
            except StopError:
                now = self.search.progress
                at = (
                    f"after iteration {now.iteration}, {now.evaluations} of "
                    f"{self.plan.evaluations} gradients"
                )
                return ReconstructionOutcome(
                    now.iteration, now.evaluations, self._stopped_by, {}, at
                )
            if self.search.progress.iteration % self.plan.search.checkpoint_every:
                self._save()
        seconds = time.perf_counter() - begin
        self.progress.note("writing the results")
        facts = self._results(point, seconds)
        now = self.search.progress
        if self.mesh.rank == 0:
            self.folder.write_mark(complete=not self.plan.sampler.draws, searched=True)
        return ReconstructionOutcome(now.iteration, now.evaluations, None, facts)

    def _told(self, row: Row, point: Unknowns) -> None:
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
        self._stopped_by = self._stop.name()
        if self._stopped_by is not None:
            self._save()
            raise StopError
        self._lap = time.perf_counter()

    def _compared(self, row: Row, point: Unknowns) -> dict[str, float]:
        """Returns the correlation of the initial field with the truth's, now and then."""
        mock = self.observed.mock
        if mock is None or (row.iteration % COMPARE_EVERY and row.iteration > 1):
            return {}
        found = compare(Field(point.field, self.model.simulation.box), mock.white_noise)
        places = [int(np.argmin(np.abs(np.log(found.k / k)))) for k in (LARGE, SMALL)]
        told = [f"r({found.k[i]:.2f}) {found.correlation[i]:.3f}" for i in places]
        self._correlation = "  " + "  ".join(dict.fromkeys(told))
        names = (f"r({LARGE})", f"r({SMALL})")
        return {n: float(found.correlation[i]) for n, i in zip(names, places, strict=True)}

    def _say(self, row: Row) -> None:
        cells = self.model.simulation.box.cells
        data = row.data / max(1, self.posterior.likelihood.count)
        state = (
            f"loss {row.loss:.6g}  data {data:.4f}  prior {row.prior / cells:.4f}  "
            f"|gradient| {row.gradient_norm:.3g}{self._correlation}"
        )
        total = self.plan.evaluations
        stage = f"stage {row.stage}/{len(self.search.stages)}"
        self.progress(stage, min(row.evaluations, total), total, state)

    def _save(self) -> None:
        """Writes a checkpoint of the latest iteration."""
        self.checkpoints.save(self.search.progress, self.minimiser.memory())

    def _results(self, point: Unknowns, seconds: float) -> dict[str, Any]:
        now = self.search.progress
        facts: dict[str, Any] = {
            "iterations": now.iteration,
            "evaluations": now.evaluations,
            "seconds": seconds,
            "mesh": str(self.mesh),
            "ranks": self.mesh.size,
            "threads_per_rank": launch.threads_per_rank(),
        }
        if self.mesh.rank == 0 and (rows := read_rows(self.folder.iterations)):
            facts["seconds_per_evaluation"] = _typical_seconds(rows)
        return Results(self.plan, self.folder, self.posterior, self.observed, self._run_text).write(
            point, facts
        )

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
