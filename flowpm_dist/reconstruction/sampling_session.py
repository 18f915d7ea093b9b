"""Chains from a plan to their results: draws.csv, chains.png, samples, R-hat."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.stats import norm

from flowpm_dist.io.figure_style import save_figure
from flowpm_dist.io.files import write_text, written_whole
from flowpm_dist.io.snapshot import Snapshot, load_snapshot
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.stop import StopError, StopRequest
from flowpm_dist.jobs.tables import read_rows
from flowpm_dist.observables.observations import Observations
from flowpm_dist.reconstruction.chains import Chains, Move, warm_up
from flowpm_dist.reconstruction.checkpoints import PointCheckpoints
from flowpm_dist.reconstruction.diagnostics import large_modes
from flowpm_dist.reconstruction.draws_table import DrawsTable, Rows, mode_names, values_of
from flowpm_dist.reconstruction.figures import Trace, chains_figure
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.likelihoods import Likelihood
from flowpm_dist.reconstruction.observed_maps import likelihood_of_maps
from flowpm_dist.reconstruction.parts import likelihood_of, model_of, sampler_of
from flowpm_dist.reconstruction.plan import ReconstructionPlan
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.samples import SampleFile
from flowpm_dist.reconstruction.sampling_facts import sampling_facts
from flowpm_dist.reconstruction.unknowns import Unknowns, Use
from meshimpl.process_mesh import ProcessMesh

SHOWN = 4
"""Numbers whose traces are drawn."""


class SamplingSession:
    """One session of chains over the posterior of a reconstruction whose search has ended.

    Args:
        plan: with draws asked for.
        mesh: the ranks; the chains are spread over its axis replica.
        folder: with the results of the search.
        progress: of this rank.

    Raises:
        VolumeError: a file that cannot be read.
    """

    def __init__(
        self,
        plan: ReconstructionPlan,
        mesh: ProcessMesh,
        folder: ReconstructionFolder,
        progress: Progress,
    ) -> None:
        self.plan, self.mesh, self.folder, self.progress = plan, mesh, folder, progress
        asked = plan.sampler
        model = model_of(plan, mesh)
        self.box = model.simulation.box_of(asked.chains)
        self._found = load_snapshot(folder.fields)
        self.posterior = Posterior(model, self._likelihood(), plan.priors.ranges)
        self.chains = Chains(
            self.posterior,
            sampler_of(asked),
            warm_up=warm_up(self.posterior, asked.warm_up, easy=asked.start == "prior"),
            draws=asked.draws,
            checkpoints=PointCheckpoints(folder.chains, self.posterior.space),
            every=asked.checkpoint_every,
        )
        self._file = SampleFile(folder.fields, self.box, asked.draws // asked.keep_every)
        self._stop = StopRequest(mesh, "move", progress.say)
        self._table: DrawsTable | None = None
        self._latest: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=20)
        self.stopped_by: str | None = None

    def _likelihood(self) -> Likelihood:
        """Returns the likelihood of the data that the search kept."""
        plan = self.plan
        if plan.lightcone is not None:
            maps = load_snapshot(self.folder.maps)["data"]
            return likelihood_of_maps(plan.lightcone, self.box, np.swapaxes(maps, -1, -2))
        observations = Observations(plan.observation, plan.grid, plan.data.file)
        block = observations.block(self.box.offset, self.box.block)
        return likelihood_of(plan, self.box, block, self._block_of(self._found, "data"))

    def _block_of(self, snapshot: Snapshot, name: str) -> np.ndarray:
        return np.asarray(snapshot.arrays[name][self.box.place[-3:]])

    def _start(self) -> Unknowns:
        """Returns where the chains begin.

        That is at draws of the prior, or about the point that was found, as if the universe were
        linear.
        """
        space = self.posterior.space
        away = space.normal(self.plan.sampler.seed, Use.START)
        if self.plan.sampler.start == "prior":
            return away
        block = tf.constant(self._block_of(self._found, "white_noise"), self.box.dtype)
        found = json.loads(self.folder.result.read_text())["parameters"]
        normal = [
            norm.ppf((found[name]["value"] - low) / (high - low))
            for name, (low, high) in self.posterior.priors.items()
        ]
        zeros = space.zeros()
        same = Unknowns(zeros.field + block, zeros.parameters + np.array(normal, np.float64))
        scaling = self.posterior.curvature().scaling()
        return scaling.from_even(scaling.to_even(same) + away)

    def run(self) -> dict[str, Any]:
        """Moves to the end, or until a signal comes, and writes the results.

        On all ranks together. Goes on from the latest checkpoint, if there is one.

        Returns:
            What result.json holds of the chains; empty where `stopped_by` tells a signal.

        Raises:
            FloatingPointError, HaloError, CheckpointError, WriteError: the checkpoints are as they
                were.
        """
        self.progress.note(f"{self.plan.sampler.chains} chains begin; compiling")
        begun = self.folder.last_move() is not None
        resumed = bool(self.mesh.world.broadcast(tf.constant(begun)))
        self._file.begin(fresh=not resumed)
        with ExitStack() as opened:
            opened.callback(self._close)
            opened.enter_context(self._stop.heard())
            self._lap = time.perf_counter()
            try:
                self.chains.run(self._start, self._told, resume=resumed)
            except StopError:
                return {}
            self.chains.save()
        self._file.finish(*self.chains.moments())
        truth = self._truth()
        facts: dict[str, Any] = {}
        if self.mesh.rank == 0:
            rows = read_rows(self.folder.draws)
            facts = {
                **sampling_facts(rows, self.plan.sampler, self.posterior.space.names, truth),
                "evaluations": self.chains.progress.evaluations,
                "mesh": str(self.mesh),
            }
            whole = json.loads(self.folder.result.read_text())
            text = json.dumps({**whole, "sampling": facts}, indent=1, default=float)
            write_text(self.folder.result, text + "\n")
            self._draw(rows, truth)
        self.mesh.barrier()
        return facts

    def _told(self, move: Move) -> None:
        """Adds rows and a line for a move, on every rank, and ends if a signal came."""
        now = time.perf_counter()
        draw, every = move.draw, self.plan.sampler.keep_every
        modes = large_modes(draw.point.field, self.box)
        if move.drawn and move.drawn % every == 0:
            self._file.keep(move.drawn // every - 1, draw.point)
        if self.mesh.rank == 0:
            self._add(move, modes, now - self._lap)
        self._latest.append((draw.acceptance, draw.energy_error))
        self._say(move)
        self.stopped_by = self._stop.name()
        if self.stopped_by is not None:
            self.chains.save()
            raise StopError
        self._lap = now

    def _add(self, move: Move, modes: np.ndarray, seconds: float) -> None:
        values = self.posterior.parameters(move.draw.point)
        if self._table is None:
            self._table = DrawsTable(self.folder.draws, tuple(values), move.number)
        self._table.add(move, values, modes, seconds)

    def _say(self, move: Move) -> None:
        found, cells = move.draw.evaluation, self.box.cells
        data = float(np.mean(found.data)) / max(1, self.posterior.likelihood.count)
        state = (
            f"data {data:.4f}  prior {float(np.mean(found.prior)) / cells:.4f}  "
            f"{self._quality()}  step {move.draw.step:.3f}"
        )
        what = "draws" if move.drawn else "warm-up"
        self.progress(what, move.number, self.chains.moves, state)

    def _quality(self) -> str:
        """Returns what leads the step size, of the latest moves."""
        acceptance = np.mean([accepted for accepted, _ in self._latest])
        if self.plan.sampler.method != "microcanonical":
            return f"acceptance {acceptance:.2f}"
        errors = [error for _, error in self._latest if np.isfinite(error).all()]
        error = f"energy error {np.mean(errors):.1e}" if errors else "no energy error yet"
        return error if acceptance == 1 else f"{error}  failed {1 - acceptance:.0%}"

    def _truth(self) -> dict[str, float] | None:
        """Returns the true values of the modes and parameters that are watched, where known.

        On all ranks together.
        """
        if not self.plan.is_mock:
            return None
        zeros = self.posterior.space.zeros()
        block = tf.constant(self._block_of(self._found, "truth_white_noise"), self.box.dtype)
        modes = large_modes(zeros.field + block, self.box)[0]
        return {**self.plan.own_values, **dict(zip(mode_names(), map(float, modes), strict=True))}

    def _draw(self, rows: Rows, truth: dict[str, float] | None) -> None:
        names = (*self.posterior.space.names, *mode_names())[:SHOWN]
        values, traces = values_of(rows, names, self.plan.sampler.chains), []
        for i, name in enumerate(names):
            label = name if name in self.posterior.space.names else f"mode {name}"
            traces.append(Trace(label, values[..., i], None if truth is None else truth.get(name)))
        warm_up = sum(phase.moves for phase in self.chains.phases[:-1])
        with written_whole(self.folder.path / "chains.png") as aside:
            save_figure(chains_figure(traces, warm_up), aside)

    def _close(self) -> None:
        if self._table is not None:
            self._table.close()
