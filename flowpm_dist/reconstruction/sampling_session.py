"""Chains from a plan to their results: draws.csv, chains.png, samples, R-hat."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import zarr

from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.files import WriteError, remove, write_json
from flowpm_dist.io.snapshot import chunk_shape, load_snapshot, new_array
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import Table, read_rows
from flowpm_dist.jobs.session import StopRequest
from flowpm_dist.reconstruction.chains import Chains, Move, first_points, warm_up
from flowpm_dist.reconstruction.checkpoints import PointCheckpoints
from flowpm_dist.reconstruction.diagnostics import (
    Rows,
    large_modes,
    mode_names,
    sampling_facts,
    usual_energy_error,
    values_of,
)
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.observed import model_of, observed_kind
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.unknowns import Unknowns
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4
"""Numbers whose traces are drawn."""

COLUMNS = (
    "move", "chain", "drawn", "evaluations", "radius", "inflation", "step", "acceptance",
    "energy_error", "loss", "data", "prior", "seconds",
)  # fmt: skip
"""The columns of draws.csv; parameters and the largest modes follow them."""

MOMENTS = ("mean", "standard_deviation")
"""The moments of the draws of a chain that are kept."""

SAMPLES = "samples"
"""The group of the draws in reconstruction.zarr."""

MEANINGS = {
    "white_noise": "draws of the white noise from the posterior",
    **dict.fromkeys(MOMENTS, "white noise over all draws of a chain"),
}


class SamplingSession:
    """One session of chains over the posterior of a reconstruction whose search has ended.

    Args:
        options: the checked run file, which asks for draws.
        mesh: the ranks; the chains are spread over its axis replica.
        folder: with the results of the search.
        progress: the display of progress of this rank.

    Raises:
        VolumeError: a file that cannot be read.
    """

    def __init__(
        self,
        options: ReconstructionOptions,
        mesh: ProcessMesh,
        folder: ReconstructionFolder,
        progress: Progress,
    ) -> None:
        self.mesh, self.folder, self.progress = mesh, folder, progress
        self._samples = folder.fields / SAMPLES
        assert options.sampler is not None
        self.options, self.sampler = options, options.sampler
        settings = options.sampler
        model = model_of(options, mesh)
        self.box = model.simulation.box_of(settings.chains)
        likelihood = observed_kind(options).kept_likelihood(options, self.box, folder.path)
        self.posterior = Posterior(model, likelihood, options.priors.ranges)
        self.chains = Chains(
            self.posterior,
            settings.method.sampler(),
            warm_up=warm_up(self.posterior, settings.warm_up, easy=settings.start == "prior"),
            draws=settings.draws,
            checkpoints=PointCheckpoints(folder.chains.path, self.posterior.space),
            every=settings.checkpoint_every,
        )
        self._stop = StopRequest(mesh, folder, "move", progress.say)
        self._table: Table | None = None
        self._laps: list[float] = []  # seconds of a gradient, of each move of this session
        self._evaluations: int | None = None
        self._latest: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=20)

    def _found(self, name: str) -> tf.Tensor:
        """Returns this rank's block of a field that the search has written."""
        array = load_snapshot(self.folder.fields).arrays[name]
        return tf.constant(np.asarray(array[self.box.place[-3:]]), self.box.dtype)

    def _start(self) -> Unknowns:
        """Returns where the chains begin."""
        about = None
        if self.sampler.start == "found":
            parameters = json.loads(self.folder.result.read_text())["parameters"]
            values = {name: parameters[name]["value"] for name in self.posterior.priors}
            about = self.posterior.point(self._found("white_noise"), values)
        return first_points(self.posterior, self.sampler.method.seed, about)

    def run(self) -> dict[str, Any]:
        """Moves to the end, or until a signal comes, and writes the results.

        On all ranks together. Resumes from the latest checkpoint, if there is one.

        Returns:
            The numbers of the chains in result.json.

        Raises:
            StopError: a signal came; a checkpoint was written.
            FloatingPointError, HaloError, CheckpointError, WriteError: the checkpoints are as they
                were.
        """
        self.progress.note(f"{self.sampler.chains} chains begin; compiling")
        begun = self.folder.chains.last is not None
        resumed = bool(self.mesh.world.broadcast(tf.constant(begun)))
        if self.mesh.rank == 0 and not (resumed and self._samples.exists()):
            self._create_samples()
        self.mesh.barrier()
        with ExitStack() as opened:
            opened.enter_context(self._stop.heard())
            self._opened = opened
            self._lap = time.perf_counter()
            self.chains.run(self._start, self._after_move, resume=resumed)
            self.chains.save()
        for name, moment in zip(MOMENTS, self.chains.moments(), strict=True):
            self._write_sample(name, moment)
        self.mesh.barrier()
        truth = self._truth()
        facts: dict[str, Any] = {}
        if self.mesh.rank == 0:
            rows = read_rows(self.folder.draws)
            facts = {
                **sampling_facts(rows, self.sampler, self.posterior.space.names, truth),
                "evaluations": self.chains.progress.evaluations,
                "seconds_per_evaluation": float(np.median(self._laps)) if self._laps else None,
                "mesh": str(self.mesh),
            }
            whole = json.loads(self.folder.result.read_text())
            write_json(self.folder.result, {**whole, "sampling": facts})
            self.folder.write_mark(complete=True, searched=True)
            with drawing(self.folder.path / "chains.png", self.progress.warn) as save:
                save(self._figure(rows, truth))
        self.mesh.barrier()
        return facts

    def _create_samples(self) -> None:
        """Creates the arrays of the draws of the white noise and of their moments. On rank 0.

        Raises:
            WriteError: they cannot be written; the job must end then.
        """
        box, draws = self.box, self.sampler.draws // self.sampler.keep_every
        dtype = np.dtype(box.dtype.as_numpy_dtype)
        chunk = chunk_shape(box.block, dtype.itemsize)
        try:
            remove(self._samples, ignore_errors=True)
            group = zarr.create_group(self._samples)
            for name, meaning in MEANINGS.items():
                more = (draws,) if name == "white_noise" else ()
                shape, chunks = (*more, *box.shape.to_integer_list), (1,) * (len(more) + 1) + chunk
                axes = ("draw", "chain", "x", "y", "z")[1 - len(more) :]
                new_array(group, name, shape, chunks, dtype, axes, "1", meaning)
        except OSError as error:
            raise WriteError.of(self._samples, error) from error

    def _write_sample(self, name: str, point: Unknowns, *number: int) -> None:
        """Writes the white noise of this rank's chains to one of the arrays.

        Args:
            name: the array, see `MEANINGS`.
            point: the unknowns of all chains.
            number: for a draw, its number among those that are kept, from 0.

        Raises:
            WriteError: on a rank that cannot write; the job must end then.
        """
        path = self._samples / name
        place: Any = (*number, *self.box.place)
        try:
            zarr.open_array(path, mode="r+")[place] = np.asarray(point.field)
        except OSError as error:
            raise WriteError.of(path, error) from error

    def _after_move(self, move: Move) -> None:
        """Adds rows and a line for a move, on every rank, and ends if a signal came."""
        now, before = time.perf_counter(), self._evaluations
        self._evaluations = self.chains.progress.evaluations
        if before is not None:  # the first move of a session is compiled in it
            self._laps.append((now - self._lap) / max(1, self._evaluations - before))
        draw, every = move.draw, self.sampler.keep_every
        modes = large_modes(draw.point.field, self.box)
        if move.drawn and move.drawn % every == 0:
            self._write_sample("white_noise", draw.point, move.drawn // every - 1)
        if self.mesh.rank == 0:
            self._add(move, modes, now - self._lap)
        self._latest.append((draw.acceptance, draw.energy_error))
        self._say(move)
        if (signal := self._stop.name()) is not None:
            self.chains.save()
            raise StopError(signal, f"after move {move.number} of {self.chains.moves}")
        self._lap = now

    def _add(self, move: Move, modes: np.ndarray, seconds: float) -> None:
        """Adds a row for each chain to draws.csv."""
        draw, annealing = move.draw, move.phase.annealing
        parameters = self.posterior.parameters(draw.point)
        if self._table is None:
            columns = (*COLUMNS, *parameters, *mode_names())
            self._table = Table(self.folder.draws, columns, move.number)
            self._opened.callback(self._table.close)
        of_chains = parameters | {
            "acceptance": draw.acceptance,
            "energy_error": draw.energy_error,
            **{name: getattr(draw.evaluation, name) for name in ("loss", "data", "prior")},
        }
        for chain in range(len(modes)):
            row = {
                "move": move.number,
                "chain": chain + 1,
                "drawn": move.drawn,
                "evaluations": draw.evaluations,
                "radius": annealing.radius,
                "inflation": annealing.inflation,
                "step": draw.step,
                "seconds": seconds,
            }
            row |= {name: float(x[chain]) for name, x in of_chains.items()}
            self._table.add(row | dict(zip(mode_names(), map(float, modes[chain]), strict=True)))

    def _say(self, move: Move) -> None:
        evaluation, cells = move.draw.evaluation, self.box.cells
        data = float(np.mean(evaluation.data)) / max(1, self.posterior.likelihood.count)
        # What leads the step size, of the latest moves.
        acceptance = np.mean([accepted for accepted, _ in self._latest])
        quality = f"acceptance {acceptance:.2f}"
        if self.sampler.name == "microcanonical":
            error = usual_energy_error([error for _, error in self._latest])
            quality = "no energy error yet" if math.isnan(error) else f"energy error {error:.1e}"
            quality += "" if acceptance == 1 else f"  failed {1 - acceptance:.0%}"
        state = (
            f"data {data:.4f}  prior {float(np.mean(evaluation.prior)) / cells:.4f}  "
            f"{quality}  step {move.draw.step:.3f}"
        )
        self.progress("draws" if move.drawn else "warm-up", move.number, self.chains.moves, state)

    def _truth(self) -> dict[str, float] | None:
        """Returns the true values of the modes and parameters that are watched, where known.

        On all ranks together.
        """
        if not self.options.is_mock:
            return None
        zeros = self.posterior.space.zeros()
        modes = large_modes(zeros.field + self._found("truth_white_noise"), self.box)[0]
        return {
            **self.options.own_values,
            **dict(zip(mode_names(), map(float, modes), strict=True)),
        }

    def _figure(self, rows: Rows, truth: dict[str, float] | None) -> Figure:
        from flowpm_dist.reconstruction.figures import chains_figure

        names = (*self.posterior.space.names, *mode_names())[:SHOWN]
        values, traces, known = values_of(rows, names, self.sampler.chains), {}, {}
        for i, name in enumerate(names):
            label = name if name in self.posterior.space.names else f"mode {name}"
            traces[label] = values[..., i]
            if truth is not None and name in truth:
                known[label] = truth[name]
        warm_up = sum(phase.moves for phase in self.chains.stages[:-1])
        return chains_figure(traces, known, warm_up)
