"""Chains from a run file to their results: draws.csv, chains.png, samples, R-hat."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.stats import norm

from flowpm_dist.config.reconstruction import ReconstructionConfig
from flowpm_dist.io.figure_style import save_figure
from flowpm_dist.io.files import write_text, written_whole
from flowpm_dist.io.snapshot import Snapshot, load_snapshot
from flowpm_dist.jobs.progress import WorkProgress
from flowpm_dist.jobs.stop import StopError, StopRequest
from flowpm_dist.jobs.tables import Table, read_rows
from flowpm_dist.reconstruction.chains import Chains, Move, warm_up
from flowpm_dist.reconstruction.checkpoints import Checkpoints
from flowpm_dist.reconstruction.diagnostics import (
    Convergence,
    convergence,
    large_modes,
    wave_numbers,
)
from flowpm_dist.reconstruction.figures import Trace, chains_figure
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.logs import MOVE_COLUMNS
from flowpm_dist.reconstruction.observations import Observations
from flowpm_dist.reconstruction.parts import likelihood_of, model_of, sampler_of
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.samples import SampleFile
from flowpm_dist.reconstruction.unknowns import Unknowns
from meshimpl.process_mesh import ProcessMesh

Rows = list[dict[str, str]]

START = 3
"""Key of the draws that chains begin with, not those of momenta."""

LEAST_DRAWS = 4
"""Of which R-hat can be told."""

SHOWN = 4
"""Numbers whose traces are drawn."""


class Sampling:
    """One session of chains over the posterior of a reconstruction whose search has ended.

    Args:
        config: checked, with draws asked for.
        mesh: the ranks; the chains are spread over its axis replica.
        folder: with the results of the search.
        progress: of this rank.

    Raises:
        VolumeError: a file that cannot be read.
    """

    def __init__(
        self,
        config: ReconstructionConfig,
        mesh: ProcessMesh,
        folder: ReconstructionFolder,
        progress: WorkProgress,
    ) -> None:
        self.config, self.mesh, self.folder, self.progress = config, mesh, folder, progress
        asked = config.sampler
        model = model_of(config, mesh)
        self.box = model.simulation.box_of(asked.chains)
        self._found = load_snapshot(folder.fields)
        block = Observations(config.data, config.box.grid).block(self.box.offset, self.box.block)
        data = self._block_of(self._found, "data")
        likelihood = likelihood_of(config, self.box, block, data)
        self.posterior = Posterior(model, likelihood, config.priors.ranges)
        self.chains = Chains(
            self.posterior,
            sampler_of(config),
            warm_up=warm_up(self.posterior, asked.warm_up, easy=asked.start == "prior"),
            draws=asked.draws,
            checkpoints=Checkpoints(folder.chains, self.posterior.space),
            every=asked.checkpoint_every,
        )
        self._file = SampleFile(folder.fields, self.box, asked.draws // asked.keep_every)
        self._stop = StopRequest(mesh)
        self._table: Table | None = None
        self._latest: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=20)
        self.stopped_by: str | None = None

    def _block_of(self, snapshot: Snapshot, name: str) -> np.ndarray:
        return np.asarray(snapshot.arrays[name][self.box.place[-3:]])

    def _start(self) -> Unknowns:
        """Points of the prior; or about the one that was found, as if the universe were linear."""
        space = self.posterior.space
        away = space.normal(self.config.sampler.seed, START)
        if self.config.sampler.start == "prior":
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
        """Move to the end, or until a signal comes, and write the results. On all ranks together.

        Goes on from the latest checkpoint, if there is one.

        Returns:
            What result.json holds of the chains; empty where `stopped_by` tells a signal.

        Raises:
            FloatingPointError, HaloError, CheckpointError, WriteError: the checkpoints are as they
                were.
        """
        self.progress.note(f"{self.config.sampler.chains} chains begin; compiling")
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
            facts = self._facts(rows, truth)
            whole = json.loads(self.folder.result.read_text())
            text = json.dumps({**whole, "sampling": facts}, indent=1, default=float)
            write_text(self.folder.result, text + "\n")
            self._draw(rows, truth)
        self.mesh.barrier()
        return facts

    def _told(self, move: Move) -> None:
        """After each move, on every rank: rows, a line, and an end if a signal came."""
        now = time.perf_counter()
        draw, every = move.draw, self.config.sampler.keep_every
        modes = large_modes(draw.point.field, self.box)
        if move.drawn and move.drawn % every == 0:
            self._file.keep(move.drawn // every - 1, draw.point)
        if self.mesh.rank == 0:
            self._add_rows(move, modes, now - self._lap)
        self._latest.append((draw.acceptance, draw.energy_error))
        self._say(move)
        self.stopped_by = self._stop.name()
        if self.stopped_by is not None:
            self.chains.save()
            raise StopError
        self._lap = now

    def _add_rows(self, move: Move, modes: np.ndarray, seconds: float) -> None:
        draw = move.draw
        values = self.posterior.parameters(draw.point)
        if self._table is None:
            columns = (*MOVE_COLUMNS, *values, *_mode_names())
            self._table = Table(self.folder.draws, columns, move.number)
        for chain in range(self.config.sampler.chains):
            row = {
                "move": move.number,
                "chain": chain + 1,
                "drawn": move.drawn,
                "evaluations": draw.evaluations,
                "radius": move.phase.annealing.radius,
                "inflation": move.phase.annealing.inflation,
                "step": draw.step,
                "acceptance": float(draw.acceptance[chain]),
                "energy_error": float(draw.energy_error[chain]),
                "loss": float(draw.evaluation.loss[chain]),
                "data": float(draw.evaluation.data[chain]),
                "prior": float(draw.evaluation.prior[chain]),
                "seconds": seconds,
            }
            row |= {name: float(x[chain]) for name, x in values.items()}
            row |= dict(zip(_mode_names(), map(float, modes[chain]), strict=True))
            self._table.add(row)

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
        """Of the latest moves, what the step size is led by."""
        acceptance = np.mean([accepted for accepted, _ in self._latest])
        if self.config.sampler.method == "hmc":
            return f"acceptance {acceptance:.2f}"
        errors = [error for _, error in self._latest if np.isfinite(error).all()]
        error = f"energy error {np.mean(errors):.1e}" if errors else "no energy error yet"
        return error if acceptance == 1 else f"{error}  failed {1 - acceptance:.0%}"

    def _truth(self) -> dict[str, float] | None:
        """Of the numbers that are watched, where it is known. On all ranks together."""
        if not self.config.is_mock:
            return None
        zeros = self.posterior.space.zeros()
        block = tf.constant(self._block_of(self._found, "truth_white_noise"), self.box.dtype)
        modes = large_modes(zeros.field + block, self.box)[0]
        own = {**self.config.cosmology.model_dump(), **self.posterior.model.bias}
        return {
            **{name: own[name] for name in self.posterior.space.names},
            **dict(zip(_mode_names(), map(float, modes), strict=True)),
        }

    def _values(self, rows: Rows, names: tuple[str, ...]) -> np.ndarray:
        """Of moves, [move, chain, name]."""
        chains = self.config.sampler.chains
        values = np.array([[float(row[name]) for name in names] for row in rows])
        return values.reshape(len(rows) // chains, chains, len(names))

    def _facts(self, rows: Rows, truth: dict[str, float] | None) -> dict[str, Any]:
        asked = self.config.sampler
        drawn = [row for row in rows if int(row["drawn"])]
        facts: dict[str, Any] = {
            "method": asked.method,
            "chains": asked.chains,
            "draws": asked.draws,
            "warm_up": asked.warm_up,
            "start": asked.start,
            "evaluations": self.chains.progress.evaluations,
            "seconds": sum(float(row["seconds"]) for row in rows[:: asked.chains]),
            "mesh": str(self.mesh),
            **{name: _mean(drawn, name) for name in ("acceptance", "energy_error", "step")},
        }
        modes = self._values(drawn, _mode_names())
        found = convergence(modes) if len(modes) >= LEAST_DRAWS else None
        facts["modes"] = _of_modes(modes, found, truth)
        names = self.posterior.space.names
        values = self._values(drawn, names)
        checked = convergence(values) if names and found is not None else None
        facts["parameters"] = {
            name: _of_parameter(values[..., i], i, checked, truth[name] if truth else None)
            for i, name in enumerate(names)
        }
        return facts

    def _draw(self, rows: Rows, truth: dict[str, float] | None) -> None:
        names = (*self.posterior.space.names, *_mode_names())[:SHOWN]
        values, traces = self._values(rows, names), []
        for i, name in enumerate(names):
            label = name if name in self.posterior.space.names else f"mode {name}"
            traces.append(Trace(label, values[..., i], None if truth is None else truth[name]))
        warm_up = sum(phase.moves for phase in self.chains.phases[:-1])
        with written_whole(self.folder.path / "chains.png") as aside:
            save_figure(chains_figure(traces, warm_up), aside)

    def _close(self) -> None:
        if self._table is not None:
            self._table.close()


def _mean(rows: Rows, name: str) -> float:
    """Of what is finite: where a move failed, its energy error is not."""
    values = np.array([float(row[name]) for row in rows])
    return float(np.mean(values[np.isfinite(values)]))


def _mode_names() -> tuple[str, ...]:
    waves = [f"({x} {y} {z})" for x, y, z in wave_numbers()]
    return (*(f"re{w}" for w in waves), *(f"im{w}" for w in waves))


def _of_modes(
    modes: np.ndarray, found: Convergence | None, truth: dict[str, float] | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"count": modes.shape[-1]}
    if found is not None:
        facts |= {
            "rhat_max": float(found.rhat.max()),
            "rhat_median": float(np.median(found.rhat)),
            "ess_min": float(found.ess.min()),
            "ess_median": float(np.median(found.ess)),
        }
    if truth is not None:
        true = np.array([truth[name] for name in _mode_names()])
        away = (true - modes.mean((0, 1))) / modes.std((0, 1))
        facts["mean_square_of_truth_in_standard_deviations"] = float(np.mean(away**2))
    return facts


def _of_parameter(
    values: np.ndarray, number: int, found: Convergence | None, truth: float | None
) -> dict[str, float]:
    facts = {"mean": float(values.mean()), "standard_deviation": float(values.std())}
    if found is not None:
        facts |= {"rhat": float(found.rhat[number]), "ess": float(found.ess[number])}
    return facts if truth is None else {**facts, "truth": truth}
