"""A session of an emulation: truth, checkpoints, tables and figures of a `Learner`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.corrections.learner import Iteration, Learner
from flowpm_dist.corrections.loss import TERMS, Pair
from flowpm_dist.corrections.options import LearningOptions
from flowpm_dist.corrections.scores import FARTHER
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.emulate.folder import EmulationFolder
from flowpm_dist.emulate.options import KINDS, EmulationOptions
from flowpm_dist.emulate.truth import Truth
from flowpm_dist.evolution.corrections import load_correction
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.files import UnreadableError, read_arrays, save_arrays, versions
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import Table, read_rows, write_rows
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.jobs.session import CheckpointError, StopRequest
from meshimpl.process_mesh import ProcessMesh

COLUMNS = ("iteration", "universe", *TERMS, "seconds", "held out")
"""The columns of iterations.csv."""


class EmulationSession:
    """A session of an emulation, which begins or resumes it.

    Args:
        options: the checked run file.
        mesh: the ranks, of axes row and col.
        folder: the folder, begun on rank 0.
        progress: the progress of this rank.
    """

    def __init__(
        self,
        options: EmulationOptions,
        mesh: ProcessMesh,
        folder: EmulationFolder,
        progress: Progress,
    ) -> None:
        self.options, self.mesh, self.folder, self.progress = options, mesh, folder, progress
        self._stop = StopRequest(mesh, folder, "iteration", progress.say)
        self._laps: list[float] = []

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Learns to the end, or until a signal comes, and writes the results.

        Must be called on all ranks together.

        Args:
            resume: whether to go on from the checkpoint, if there is one.

        Returns:
            The scores, see `Learner.correction`, and the seconds of an iteration and of a converged
            run.
        """
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, self.options.resolved())
        with ExitStack() as opened:
            opened.enter_context(self._stop.heard())
            pairs, seconds_of_truth = self._truth()
            self._learner = self._begin(pairs)
            if resume:
                self._restore()
            if self.mesh.rank == 0:
                done = self._learner.steps.done
                self._table = Table(self.folder.iterations, COLUMNS, done + 1)
                opened.callback(self._table.close)
            self.progress.note("plain runs, then learning; compiling")
            correction = self._learner.run(self._after_iteration, self._end_if_stopped)
        scores = correction.scores
        if self.mesh.rank == 0:
            self._write()
            self.folder.write_mark(complete=True, iteration=self._learner.steps.done)
            if not scores["loss"] < scores["loss of plain runs"]:
                self.progress.warn("the correction is no better than plain runs")
            elif FARTHER in scores["verdict"]:
                self.progress.warn(f"with the correction, {scores['verdict']}")
            self._draw()
            with drawing(self.folder.path / "learning.png", self.progress.warn) as save:
                from flowpm_dist.emulate.figures import learning_figure

                save(learning_figure(read_rows(self.folder.iterations)))
        self.mesh.barrier()
        return {
            **scores,
            "seconds_per_iteration": float(np.median(self._laps)) if self._laps else None,
            "seconds_per_converged_run": seconds_of_truth,
        }

    def _truth(self) -> tuple[list[Pair], float | None]:
        """Returns the universes, and the seconds of a converged run if one was made."""
        options = self.options
        cosmologies = [Cosmology(**c.arguments()) for c in options.cosmologies()]
        simulations = {
            size: options.of_size(size).simulation(cosmologies[0], mesh=self.mesh)
            for size in dict.fromkeys(options.sizes())
        }
        truth = Truth(options, simulations, self.folder, self.progress, self._end_if_stopped)
        return truth.pairs(cosmologies), truth.seconds

    def _begin(self, pairs: Sequence[Pair]) -> Learner:
        settings = self.options.emulate
        begin, held_out = settings.start_from, settings.validation
        correction = (
            KINDS[settings.kind].begun(settings.seed) if begin is None else load_correction(begin)
        )
        options = dict(settings.part(LearningOptions))
        return Learner(correction, pairs[:-held_out], pairs[-held_out:], **options)

    def _after_iteration(self, iteration: Iteration) -> None:
        """Adds a line and a row for an iteration, on every rank, and ends if a signal came."""
        settings, number = self.options.emulate, iteration.number
        self._laps.append(iteration.seconds)
        last, failed = number == settings.iterations, iteration.failure is not None
        state = "failed" if failed else f"loss {iteration.losses['loss']:.4g}"
        row = {"iteration": number, "universe": iteration.universe, "seconds": iteration.seconds}
        if failed:
            self.progress.warn(
                f"iteration {number}, {iteration.universe}: {iteration.failure}; going back to the "
                "numbers before"
            )
        if iteration.held_out is not None:
            row["held out"] = iteration.held_out
            state += f"  held out {iteration.held_out:.4g}"
        if self.mesh.rank == 0:
            if iteration.is_best:
                self._write()
            self._table.add({**iteration.losses, **row})
        self.progress("iteration", number, settings.iterations, state)
        signal = None if last else self._stop.name()
        if signal is not None or last or failed or number % settings.checkpoint_every == 0:
            self._save()
        if iteration.is_best and not last and self.mesh.rank == 0:
            self._draw()
        if signal is not None:
            raise StopError(signal, f"after iteration {number} of {settings.iterations}")
        if last:
            self.progress.note("judging")

    def _write(self) -> None:
        """Writes the best correction, with its table. On rank 0."""
        correction, rows = self._learner.correction, self._learner.rows
        about = {"run file": self.options.resolved(), **correction.provenance, **versions()}
        dataclasses.replace(correction, provenance=about).save(self.folder.correction)
        numbered = [{"number": number, **row} for number, row in enumerate(rows)]
        write_rows(self.folder.scores, numbered, digits=9)

    def _draw(self) -> None:
        """Draws the scores of the best correction. On rank 0."""
        with drawing(self.folder.path / "correction.png", self.progress.warn) as save:
            from flowpm_dist.emulate.figures import correction_figure

            save(correction_figure(self._learner.rows))

    def _end_if_stopped(self) -> None:
        if (signal := self._stop.name()) is not None:
            raise StopError(signal, "before the first iteration")

    def _save(self) -> None:
        """Writes the checkpoint, on rank 0."""
        if self.mesh.rank == 0:
            steps = self._learner.steps
            save_arrays(self.folder.checkpoint, steps.arrays())
            self.folder.write_mark(complete=False, iteration=steps.done)

    def _restore(self) -> None:
        """Continues from the checkpoint, if iterations were made.

        Raises:
            CheckpointError: it is missing or cannot be read.
        """
        # Rank 0 decides: a file system may show the mark to other ranks later.
        marked = tf.constant(self.folder.mark().get("iteration", 0))
        path, made = self.folder.checkpoint, int(self.mesh.world.broadcast(marked))
        if not made:
            return
        try:
            self._learner.steps.restore(read_arrays(path))
        except (UnreadableError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} of {made} iterations is missing or damaged ({error}): put it back, or "
                f"begin anew with --overwrite; {self.folder.correction} can be emulate.start_from"
            ) from error
