"""A session of an emulation: learns, and judges on what was held out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.emulate.figures import correction_figure, learning_figure
from flowpm_dist.emulate.job import EmulationFolder
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.emulate.truth import EmulationError, Truth, Universe, nearest
from flowpm_dist.evolution.corrections import Correction, PotentialFilter, Range, load_correction
from flowpm_dist.evolution.integrators import INTEGRATORS
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import save_figure
from flowpm_dist.io.files import versions, written_whole
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import Table, read_rows
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.jobs.session import CheckpointError, StopError, StopRequest
from flowpm_dist.simulation.state import State
from flowpm_dist.statistics import Bins, bin_contents
from flowpm_dist.statistics.comparison import binned_compare
from meshimpl.process_mesh import ProcessMesh

FINER = 2
"""Cells of the mesh on which densities are compared, per particle spacing."""
BINS = 16
"""Bins of wavenumber up to the particles' Nyquist wavenumber."""
SAME_NOISE = 0.9
"""Least correlation of two universes of one white noise in the first bin."""
MOST_FAILURES = 5
"""Iterations in a row whose numbers are not finite, after which the work ends."""
SHOWN = (0.5, 1.0)
"""Wavenumbers whose scores are printed [h/Mpc]."""


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
        self._cosmologies = [
            Cosmology(**c.model_dump(exclude_none=True)) for c in options.cosmologies()
        ]
        self.simulation = options.simulation(self._cosmologies[0], mesh=mesh)
        self.box: Box = self.simulation.box
        self.fine = self.box.finer(FINER)
        nyquist = np.pi * min(
            n / length for n, length in zip(self.box.grid, self.box.size, strict=True)
        )
        lowest = 2 * np.pi / max(self.box.size)
        self.bins = Bins(min(BINS, int(nyquist / lowest) - 1), k_max=float(nyquist))
        self.k = bin_contents(self.fine, self.bins)[0]
        self._stop = StopRequest(mesh, folder, "iteration", progress.say)
        learned = options.emulate
        begin = learned.start_from
        self.correction: Correction = (
            PotentialFilter.begun(learned.seed) if begin is None else load_correction(begin)
        )
        decay = keras.optimizers.schedules.CosineDecay(learned.rate, learned.iterations)
        self._theta = tf.Variable(self.correction.theta, dtype=tf.float64)
        self._adam = keras.optimizers.Adam(decay, beta_2=0.99)
        self._adam.build([self._theta])
        self._done, self._failures = 0, 0

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Learns to the end, or until a signal comes, and writes the results.

        Must be called on all ranks together.

        Args:
            resume: whether to go on from the checkpoint, if there is one.

        Returns:
            The scores, see `_judge`.
        """
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, self.options.resolved())
        with ExitStack() as opened:
            opened.enter_context(self._stop.heard())
            truth = Truth(
                self.options,
                self.simulation,
                self.folder.truth,
                self.progress,
                self._end_if_stopped,
            )
            universes = truth.universes(self._cosmologies)
            held_out = universes[-self.options.emulate.validation :]
            learned_from = universes[: -self.options.emulate.validation]
            if resume:
                self._restore()
            self.progress.note("plain runs; compiling")
            plain = [self._compared(u, None) for u in held_out]
            if self.options.truth.pairs:
                others = [self._compared(u, None) for u in learned_from]
                self._check_same_noise(universes, [*others, *plain])
            scores = self._learn(learned_from, held_out, plain, opened)
        if self.mesh.rank == 0:
            self.folder.write_mark(complete=True, iteration=self._done)
        self.mesh.barrier()
        return scores

    # Learning

    def _compared(self, universe: Universe, theta: tf.Tensor | None) -> tf.Tensor:
        """Returns P over the truth's and r, float64 [time, 2, bin]; of plain runs without theta."""
        correction = None if theta is None else self.correction.with_theta(theta)
        simulation = self.simulation.with_correction(correction)
        simulation.halo = self.simulation.halo
        start = universe.start
        given: dict[str, Any] = (
            {"seed": start}
            if isinstance(start, int)
            else {"particles": (start.displacement, start.velocity)}
        )

        def look(state: State) -> tf.Tensor:
            truth = dataclasses.replace(state, displacement=Field(universe.at(state.a), self.box))
            found = binned_compare(state.density(FINER), truth.density(FINER), bins=self.bins)
            both = [found.transfer**2, found.correlation]
            return tf.stack([tf.cast(x, tf.float64) for x in both])

        times = sorted(universe.truth)
        return tf.stack(
            simulation.run(cosmology=universe.cosmology, outputs=times, on_output=look, **given)
        )

    def _losses(self, compared: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the means of the squared logarithm of P over the truth's, and of 1 - r^2."""
        power, r = compared[:, 0], compared[:, 1]
        return tf.reduce_mean(tf.math.log(power) ** 2), tf.reduce_mean(1.0 - r**2)

    def _loss(self, compared: tf.Tensor) -> tf.Tensor:
        power, phases = self._losses(compared)
        return power + self.options.emulate.correlation * phases

    def _learn(
        self,
        learned_from: Sequence[Universe],
        held_out: Sequence[Universe],
        plain: Sequence[tf.Tensor],
        opened: ExitStack,
    ) -> dict[str, Any]:
        asked = self.options.emulate
        columns = (
            "iteration",
            "universe",
            "loss",
            "ln P squared",
            "1 - r squared",
            "seconds",
            "held out",
        )
        table = None
        if self.mesh.rank == 0:
            table = Table(self.folder.iterations, columns, self._done + 1)
            opened.callback(table.close)
        self.progress.note("learning; compiling")
        scores: dict[str, Any] | None = None
        laps: list[float] = []
        for universe in self._order(learned_from):
            begin = time.perf_counter()
            theta = tf.convert_to_tensor(self._theta)
            with tf.GradientTape() as tape:
                tape.watch(theta)
                compared = self._compared(universe, theta)
                power, phases = self._losses(compared)
                loss = power + asked.correlation * phases
                share = loss / self.mesh.size  # each rank has the same loss
            gradient = tape.gradient(share, theta)
            self._step(gradient, loss, universe)
            laps.append(time.perf_counter() - begin)
            row = {
                "iteration": self._done,
                "universe": universe.name,
                "loss": float(loss),
                "ln P squared": float(power),
                "1 - r squared": float(phases),
                "seconds": laps[-1],
            }
            last = self._done == asked.iterations
            if last or self._done % asked.validate_every == 0:
                scores = self._judge(held_out, plain)
                row["held out"] = scores["loss"]
            if table is not None:
                table.add(row)
            state = f"loss {row['loss']:.4g}" + (
                f"  held out {scores['loss']:.4g}" if scores else ""
            )
            self.progress("iteration", self._done, asked.iterations, state)
            signal = self._stop.name()
            if signal is not None or last or self._done % asked.checkpoint_every == 0:
                self._save()
            if signal is not None:
                raise StopError(signal, f"after iteration {self._done} of {asked.iterations}")
        scores = scores or self._judge(held_out, plain)
        if self.mesh.rank == 0:
            save_figure(
                learning_figure(read_rows(self.folder.iterations)),
                self.folder.path / "learning.png",
            )
        return {**scores, "seconds_per_iteration": float(np.median(laps)) if laps else None}

    def _order(self, universes: Sequence[Universe]) -> Iterator[Universe]:
        """Yields the universe of each iteration that is left: all in turn, in a random order."""
        count = len(universes)
        while self._done < self.options.emulate.iterations:
            turn, place = divmod(self._done, count)
            order = np.random.default_rng([self.options.emulate.seed, turn]).permutation(count)
            yield universes[order[place]]

    def _step(self, gradient: tf.Tensor, loss: tf.Tensor, universe: Universe) -> None:
        """Makes a step of Adam; leaves the numbers as they are where they would not be finite.

        Raises:
            EmulationError: that has happened too often.
        """
        finite = bool(np.isfinite(loss)) and bool(np.isfinite(gradient.numpy()).all())
        if finite:
            # to the bit the same on every rank
            self._adam.apply([self.mesh.world.broadcast(gradient)], [self._theta])
            self._failures = 0
        else:
            self._failures += 1
            self.progress.warn(
                f"iteration {self._done + 1}: the loss of {universe.name} or its gradient is not "
                "finite; the correction stays as it was"
            )
            if self._failures == MOST_FAILURES:
                self._save()
                raise EmulationError(
                    f"the loss was not finite {MOST_FAILURES} times in a row: the last good "
                    f"correction is in {self.folder.path}; use a lower emulate.rate"
                )
        self._done += 1

    # Judging and saving

    def _judge(self, held_out: Sequence[Universe], plain: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Scores the universes that are held out; writes the correction, its table and picture.

        Returns:
            "loss", the mean; "shown", rows of some wavenumbers for the report.
        """
        theta = tf.convert_to_tensor(self._theta)
        corrected = [self._compared(u, theta) for u in held_out]
        loss = float(np.mean([self._loss(c).numpy() for c in corrected]))
        rows = [
            {
                "universe": universe.name,
                "a": a,
                "k [h/Mpc]": k,
                "P plain": before[t, 0, i],
                "P corrected": after[t, 0, i],
                "1 - r plain": 1.0 - before[t, 1, i],
                "1 - r corrected": 1.0 - after[t, 1, i],
            }
            for universe, before, after in zip(
                held_out, _numpy(plain), _numpy(corrected), strict=True
            )
            for t, a in enumerate(sorted(universe.truth))
            for i, k in enumerate(self.k.tolist())
        ]
        shown = _means_at(rows, SHOWN)
        scores = {"loss": loss, "universes held out": len(held_out), "mean": shown}
        self.correction = dataclasses.replace(
            self.correction,
            theta=theta.numpy(),
            trained=self._range(),
            scores=scores,
            provenance={
                "run file": self.options.resolved(),
                "iterations": self._done,
                **versions(),
            },
        )
        if self.mesh.rank == 0:
            self.correction.save(self.folder.correction)
            table = Table(self.folder.scores, ("number", *rows[0]), 0)
            for number, row in enumerate(rows):
                table.add({"number": number, **row})
            table.close()
            save_figure(correction_figure(rows), self.folder.path / "correction.png")
        return {"loss": loss, "shown": shown}

    def _range(self) -> Range:
        """Returns what is learned from."""
        options, steps = self.options, self.options.evolution
        edges = self.simulation.edges
        kind = type(steps.integrator)
        cell = float(np.prod(self.box.cell) ** (1 / 3) / steps.mesh_factor)
        values = [_numbers(c) for c in self.options.cosmologies()[: -options.emulate.validation]]
        names = [name for name in values[0] if all(name in each for each in values)]
        return Range(
            integrator=next((n for n, each in INTEGRATORS.items() if each is kind), kind.__name__),
            mesh_factor=steps.mesh_factor,
            deconvolve=steps.deconvolve,
            force_gradient=steps.force_gradient,
            steps=steps.step_count,
            a=(float(edges[0]), float(edges[-1])),
            cell=(cell, cell),
            cosmology={n: (min(v[n] for v in values), max(v[n] for v in values)) for n in names},
        )

    def _check_same_noise(self, universes: Sequence[Universe], plain: Sequence[tf.Tensor]) -> None:
        """Raises an EmulationError where a cheap run and the truth are not of one white noise."""
        for universe, compared in zip(universes, _numpy(plain), strict=True):
            r = compared[0, 1, 0]
            if not r > SAME_NOISE:
                raise EmulationError(
                    f"{universe.name}: the cheap run and the truth have r = {r:.2f} at "
                    f"k = {self.k[0]:.2g} h/Mpc: they are not of one white noise"
                )

    def _end_if_stopped(self) -> None:
        if (signal := self._stop.name()) is not None:
            raise StopError(signal, "before the first iteration")

    def _save(self) -> None:
        """Writes the checkpoint, on rank 0."""
        if self.mesh.rank == 0:
            remembered = {f"adam_{n}": v.numpy() for n, v in enumerate(self._adam.variables)}
            with written_whole(self.folder.checkpoint) as aside, aside.open("wb") as file:
                np.savez(file, theta=self._theta.numpy(), done=self._done, **remembered)
            self.folder.write_mark(complete=False, iteration=self._done)

    def _restore(self) -> None:
        """Goes on from the checkpoint, if there is one.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = self.folder.checkpoint
        if not bool(self.mesh.world.broadcast(tf.constant(path.exists()))):
            return
        try:
            with np.load(path, allow_pickle=False) as kept:
                self._theta.assign(kept["theta"])
                for n, variable in enumerate(self._adam.variables):
                    variable.assign(kept[f"adam_{n}"])
                self._done = int(kept["done"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): begin anew with --overwrite; "
                f"{self.folder.correction} can be emulate.start_from"
            ) from error


def _numbers(cosmology: CosmologyOptions) -> dict[str, float]:
    return cosmology.model_dump(exclude_none=True, exclude={"transfer"})


def _numpy(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    return [each.numpy() for each in tensors]


def _means_at(rows: Sequence[dict[str, Any]], wavenumbers: Sequence[float]) -> list[dict[str, Any]]:
    """Returns the mean of all universes in the bins nearest to some wavenumbers, for each time."""
    numbers = ("P plain", "P corrected", "1 - r plain", "1 - r corrected")
    ks = sorted({row["k [h/Mpc]"] for row in rows})
    chosen = sorted({nearest(ks, k) for k in wavenumbers if k <= ks[-1] * 1.1})
    found = []
    for a in sorted({row["a"] for row in rows}):
        for k in chosen:
            here = [row for row in rows if row["a"] == a and row["k [h/Mpc]"] == k]
            means = {name: float(np.mean([row[name] for row in here])) for name in numbers}
            found.append({"a": a, "k [h/Mpc]": k, **means})
    return found
