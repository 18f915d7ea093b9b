"""A session of an emulation: learns, and judges on what was held out."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.emulate.job import EmulationFolder
from flowpm_dist.emulate.learner import Learner
from flowpm_dist.emulate.options import FINER, KINDS, SPACING, EmulationOptions
from flowpm_dist.emulate.truth import EmulationError, Truth, Universe, nearest
from flowpm_dist.evolution.corrections import (
    LPT_ONLY,
    Correction,
    Range,
    StateCorrection,
    force_cell,
    load_correction,
)
from flowpm_dist.evolution.integrators import name_of
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.errors import decoration
from flowpm_dist.io.files import UnreadableError, read_arrays, save_arrays, versions
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import Table, read_rows
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.jobs.session import CheckpointError, StopRequest
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import Axis, State
from flowpm_dist.statistics import Bins, bin_contents
from flowpm_dist.statistics.comparison import binned_compare
from meshimpl.compat import mtf
from meshimpl.process_mesh import ProcessMesh

BINS = 16
"""Bins of wavenumber up to the particles' Nyquist wavenumber."""
SAME_NOISE = 0.9
"""Least correlation of two universes of one white noise in the first bin."""
SPACES = ("", "redshift space ")
"""Beginnings of the columns of scores.csv, of the spaces in `Compared`."""
SHOWN = (0.5, 1.0)
"""Wavenumbers whose scores are printed [h/Mpc]."""


LINE_OF_SIGHT: Literal["z"] = "z"
"""Where redshift space is compared: the axis that no ranks split. Networks are turned instead."""
TERMS = ("loss", "ln P squared", "1 - r squared", "distance squared", "in redshift space")
"""The loss, and what it is a weighted sum of."""
COLUMNS = ("iteration", "universe", *TERMS, "seconds", "held out")
"""The columns of iterations.csv."""


@dataclass(frozen=True)
class Compared:
    """A universe at some times, compared with the truth.

    Attributes:
        power: P over the truth's, float64 [time, space, bin]: in real space, and in redshift space
            if that is learned.
        correlation: r with the truth, likewise.
        distance: the mean squared distance of particles from the truth's, float64 [time]
            [spacing^2].
    """

    power: tf.Tensor
    correlation: tf.Tensor
    distance: tf.Tensor


class BoxComparison:
    """Compares the density and the particles of a box with the truth's.

    Args:
        box: the box.

    Attributes:
        k: the mean wavenumber of each bin, float64 [bin] [h/Mpc].
    """

    def __init__(self, box: Box) -> None:
        self._spacing = force_cell(box.size, box.grid)
        nyquist = np.pi * min(n / length for n, length in zip(box.grid, box.size, strict=True))
        lowest = 2 * np.pi / max(box.size)
        self._bins = Bins(min(BINS, int(nyquist / lowest) - 1), k_max=float(nyquist))
        self.k = bin_contents(box.finer(FINER), self._bins)[0]
        self._distance = box.function(
            lambda _, a, b: mtf.reduce_mean(mtf.square(a - b)),
            ours=box.vector_shape,
            theirs=box.vector_shape,
        )

    def densities(self, ours: Field, truth: Field) -> list[tf.Tensor]:
        """Returns P over the truth's, and r, of each bin."""
        found = binned_compare(ours, truth, bins=self._bins)
        return [found.transfer**2, found.correlation]

    def distance(self, ours: tf.Tensor, truth: tf.Tensor) -> tf.Tensor:
        """Returns the mean squared distance of particles [spacing^2], from displacements."""
        return 3.0 * self._distance(ours, truth) / self._spacing**2


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
        self._simulations = {
            size: options.of_size(size).simulation(self._cosmologies[0], mesh=mesh)
            for size in dict.fromkeys(options.sizes())
        }
        self._comparisons = {
            size: BoxComparison(simulation.box) for size, simulation in self._simulations.items()
        }
        self._stop = StopRequest(mesh, folder, "iteration", progress.say)
        learned = options.emulate
        begin = learned.start_from
        self.correction: Correction = (
            KINDS[learned.kind].begun(learned.seed) if begin is None else load_correction(begin)
        )
        # Its range is what is learned from here.
        self.correction = dataclasses.replace(
            self.correction, trained=None, scores={}, provenance={}
        )
        seen = learned.chosen("redshift_space")
        self._axes: list[Axis | None] = [None, LINE_OF_SIGHT] if seen else [None]
        self._kept: dict[str, list[State]] = {}
        self._painted: dict[tuple[str, float, Axis | None], Field] = {}
        if isinstance(self.correction, StateCorrection):
            force = options.solver.force_correction
            self.correction = dataclasses.replace(self.correction, force=force)
        theta = np.asarray(self.correction.theta, np.float64)
        self.learner = Learner(theta, learned.chosen("rate"), learned.iterations, mesh)

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Learns to the end, or until a signal comes, and writes the results.

        Must be called on all ranks together.

        Args:
            resume: whether to go on from the checkpoint, if there is one.

        Returns:
            The scores, see `_judge`, and the seconds of an iteration and of a converged run.
        """
        if self.mesh.rank == 0:
            write_run_file(self.folder.run_file, self.options.resolved())
        with ExitStack() as opened:
            opened.enter_context(self._stop.heard())
            truth = Truth(
                self.options,
                self._simulations,
                self.folder,
                self.progress,
                self._end_if_stopped,
            )
            universes = truth.universes(self._cosmologies)
            held_out = universes[-self.options.emulate.validation :]
            learned_from = universes[: -self.options.emulate.validation]
            times = [a for universe in learned_from for a in universe.truth]
            self._times = min(times), max(times)
            if resume:
                self._restore()
            self.progress.note("plain runs; compiling")
            plain = [self._plain(universe) for universe in held_out]
            if self.options.truth.pairs:
                for universe in learned_from:
                    self._plain(universe)
            seconds = self._learn(learned_from, held_out, plain, opened)
            self.progress.note("judging")
            best = self._corrected(held_out, tf.constant(self.learner.best))
            scores = self._judge(held_out, plain, best)
            self._write(scores)
        if self.mesh.rank == 0:
            self.folder.write_mark(complete=True, iteration=self.learner.done)
            if not scores["loss"] < scores["loss of plain runs"]:
                self.progress.warn("the correction is no better than plain runs")
            self._draw(scores["rows"])
            with decoration("learning.png", self.progress.warn):
                from flowpm_dist.emulate.figures import learning_figure
                from flowpm_dist.io.figures import save_figure

                figure = learning_figure(read_rows(self.folder.iterations))
                save_figure(figure, self.folder.path / "learning.png")
        self.mesh.barrier()
        return {
            **scores,
            "seconds_per_iteration": seconds,
            "seconds_per_converged_run": truth.seconds,
        }

    # Learning

    def _compared(self, universe: Universe, theta: tf.Tensor | None) -> Compared:
        """Returns a universe compared with the truth; of the plain run without theta."""
        correction = None if theta is None else self.correction.with_theta(theta)
        if isinstance(self.correction, StateCorrection):
            states = self._states(universe)
            if isinstance(correction, StateCorrection):
                moving = len(self._axes) > 1
                states = [state.corrected(correction, velocities=moving) for state in states]
            found = [self._compare_state(universe, state) for state in states]
        else:
            simulation = universe.simulation.with_correction(correction)
            compare = functools.partial(self._compare_state, universe)
            found = self._run(simulation, universe, on_output=compare)
        return Compared(*(tf.stack(each) for each in zip(*found, strict=True)))

    def _states(self, universe: Universe) -> list[State]:
        """Returns the states of the run without what is learned, which is made once."""
        if universe.name not in self._kept:
            self._kept[universe.name] = self._run(universe.simulation, universe)
        return self._kept[universe.name]

    def _run(self, simulation: Simulation, universe: Universe, **more: Any) -> list[Any]:
        """Returns the cheap run at the times of the truth."""
        start = universe.start
        given: dict[str, Any] = (
            {"seed": start}
            if isinstance(start, int)
            else {"particles": (start.displacement, start.velocity)}
        )
        times, cosmology = sorted(universe.truth), universe.cosmology
        if self.options.emulate.structure == LPT_ONLY:
            return [simulation.lpt(a=a, cosmology=cosmology, **given) for a in times]
        return simulation.run(cosmology=cosmology, outputs=times, **given, **more)

    def _compare_state(self, universe: Universe, state: State) -> list[tf.Tensor]:
        """Returns the values of `Compared` at the time of a state."""
        a, comparison = nearest(list(universe.truth), state.a), self._comparison_of(universe)
        particles = universe.truth[a]
        displacement, velocity = (
            Field(x, state.box) for x in (particles.displacement, particles.velocity)
        )
        truth = dataclasses.replace(state, displacement=displacement, velocity=velocity)
        found = []
        for axis in self._axes:
            key = universe.name, a, axis
            if key not in self._painted:
                self._painted[key] = truth.density(FINER, redshift_space=axis)
            ours = state.density(FINER, redshift_space=axis)
            found.append(comparison.densities(ours, self._painted[key]))
        power, correlation = (tf.stack(each) for each in zip(*found, strict=True))
        distance = comparison.distance(state.displacement.block, particles.displacement)
        return [tf.cast(x, tf.float64) for x in (power, correlation, distance)]

    def _comparison_of(self, universe: Universe) -> BoxComparison:
        return self._comparisons[universe.simulation.box.size]

    def _plain(self, universe: Universe) -> Compared:
        """Returns what `_compared` returns of the plain run.

        Raises:
            EmulationError: it and the truth are not of one white noise.
        """
        compared = self._compared(universe, None)
        r = float(compared.correlation[0, 0, 0])
        if not r > SAME_NOISE:
            k = self._comparison_of(universe).k[0]
            raise EmulationError(
                f"{universe.name}: the cheap run and the truth have r = {r:.2f} at "
                f"k = {k:.2g} h/Mpc: they are not of one white noise"
            )
        self._end_if_stopped()
        return compared

    def _losses(self, compared: Compared) -> list[tf.Tensor]:
        """Returns the loss, and its terms, which are means over times and bins; see `TERMS`.

        The last term is missing where redshift space is not learned.
        """
        power = tf.reduce_mean(tf.math.log(compared.power) ** 2, axis=[0, 2])
        phases = tf.reduce_mean(1.0 - compared.correlation**2, axis=[0, 2])
        distance = tf.reduce_mean(compared.distance)
        chosen = self.options.emulate.chosen
        correlation = self.options.emulate.correlation
        weights = [1.0, correlation, chosen("displacement")]
        terms = [power[0], phases[0], distance]
        if len(self._axes) > 1:
            weights.append(chosen("redshift_space"))
            terms.append(power[1] + correlation * phases[1])
        # a term without weight has no gradient to be computed
        total = sum(w * term for w, term in zip(weights, terms, strict=True) if w)
        return [tf.convert_to_tensor(total), *terms]

    def _mean_loss(self, compared: Sequence[Compared]) -> float:
        return float(np.mean([self._losses(each)[0].numpy() for each in compared]))

    def _learn(
        self,
        learned_from: Sequence[Universe],
        held_out: Sequence[Universe],
        plain: Sequence[Compared],
        opened: ExitStack,
    ) -> float | None:
        """Makes the iterations that are left; returns the median of their durations [s]."""
        chosen, learner = self.options.emulate, self.learner
        table = None
        if self.mesh.rank == 0:
            table = Table(self.folder.iterations, COLUMNS, learner.done + 1)
            opened.callback(table.close)
        self.progress.note("learning; compiling")
        laps: list[float] = []
        for universe in self._order(learned_from):
            begin = time.perf_counter()
            row = self._iteration(universe)
            laps.append(time.perf_counter() - begin)
            row |= {"iteration": learner.done, "universe": universe.name, "seconds": laps[-1]}
            last, rows = learner.done == chosen.iterations, None
            state = f"loss {row['loss']:.4g}" if "loss" in row else "failed"
            if last or learner.done % chosen.validate_every == 0:
                row["held out"], rows = self._validate(held_out, plain)
                state += f"  held out {row['held out']:.4g}"
            if table is not None:
                table.add(row)
            self.progress("iteration", learner.done, chosen.iterations, state)
            signal = None if last else self._stop.name()
            if signal is not None or last or learner.done % chosen.checkpoint_every == 0:
                self._save()
            if rows is not None and not last:
                self._draw(rows)
            if signal is not None:
                raise StopError(signal, f"after iteration {learner.done} of {chosen.iterations}")
        return float(np.median(laps)) if laps else None

    def _iteration(self, universe: Universe) -> dict[str, Any]:
        """Makes an iteration; returns its losses, or nothing where it failed.

        Raises:
            EmulationError: too many in a row have failed.
        """
        theta = self.learner.theta
        try:
            with tf.GradientTape() as tape:
                tape.watch(theta)
                turned = self.correction.turned(theta, self._symmetry(universe))
                losses = self._losses(self._compared(universe, turned))
                share = losses[0] / self.mesh.size  # each rank has the same loss
            gradient = tf.convert_to_tensor(tape.gradient(share, theta))
            if not (np.isfinite(losses[0]) and np.isfinite(gradient).all()):
                raise FloatingPointError("the loss or its gradient is not finite")
        except (FloatingPointError, HaloError) as error:  # on all ranks
            self.progress.warn(
                f"iteration {self.learner.done + 1}, {universe.name}: {error}; going back to the "
                "numbers before"
            )
            try:
                self.learner.fail()
            finally:
                self._save()
            return {}
        self.learner.step(gradient)
        return dict(zip(TERMS, map(float, losses), strict=False))

    def _symmetry(self, universe: Universe) -> int:
        """Returns the symmetry of the cube by which the universe of an iteration is turned."""
        x, y, z = universe.simulation.box.cell
        some = 48 if math.isclose(x, y) and math.isclose(y, z) else 8  # reflections alone
        generator = np.random.default_rng([self.options.emulate.seed, self.learner.done, some])
        return int(generator.integers(some))

    def _validate(
        self, held_out: Sequence[Universe], plain: Sequence[Compared]
    ) -> tuple[float, list[dict[str, Any]] | None]:
        """Writes the correction if it is the best so far.

        Returns:
            The loss of the universes held out, and the rows of scores.csv if they were written.
        """
        try:
            corrected = self._corrected(held_out, self.learner.theta)
        except (FloatingPointError, HaloError):
            return math.inf, None
        loss = self._mean_loss(corrected)
        if not self.learner.judged(loss):
            return loss, None
        scores = self._judge(held_out, plain, corrected)
        self._write(scores)
        return loss, scores["rows"]

    def _corrected(self, universes: Sequence[Universe], theta: tf.Tensor) -> list[Compared]:
        return [self._compared(universe, theta) for universe in universes]

    def _order(self, universes: Sequence[Universe]) -> Iterator[Universe]:
        """Yields the universe of each iteration that is left: all in turn, in a random order."""
        count = len(universes)
        while self.learner.done < self.options.emulate.iterations:
            turn, place = divmod(self.learner.done, count)
            order = np.random.default_rng([self.options.emulate.seed, turn]).permutation(count)
            yield universes[order[place]]

    # Judging and saving

    def _judge(
        self,
        held_out: Sequence[Universe],
        plain: Sequence[Compared],
        corrected: Sequence[Compared],
    ) -> dict[str, Any]:
        """Returns the scores of a correction.

        Args:
            held_out: the universes held out.
            plain, corrected: what `_compared` returned of each, without and with the correction.

        Returns:
            "loss" and "loss of plain runs", means of the universes held out; "rows" of scores.csv;
            "shown", their means at some wavenumbers.
        """
        rows = [
            {
                "universe": universe.name,
                SPACING: force_cell(universe.simulation.box.size, self.options.box.grid),
                "a": a,
                "k [h/Mpc]": k,
                **{
                    f"{prefix}{name} {run}": float(value[t, space, i])
                    for space, prefix in enumerate(SPACES[: len(self._axes)])
                    for run, compared in (("plain", before), ("corrected", after))
                    for name, value in (
                        ("P", compared.power),
                        ("1 - r", 1.0 - compared.correlation),
                    )
                },
            }
            for universe, before, after in zip(held_out, plain, corrected, strict=True)
            for t, a in enumerate(sorted(universe.truth))
            for i, k in enumerate(self._comparison_of(universe).k.tolist())
        ]
        return {
            "loss": self._mean_loss(corrected),
            "loss of plain runs": self._mean_loss(plain),
            "rows": rows,
            "shown": _means_at(rows, SHOWN),
        }

    def _write(self, scores: Mapping[str, Any]) -> None:
        """Writes the best correction, with its table, on rank 0."""
        if self.mesh.rank:
            return
        rows, folder = scores["rows"], self.folder
        kept = {name: scores[name] for name in ("loss", "loss of plain runs", "shown")}
        about = {"run file": self.options.resolved(), "iterations": self.learner.done}
        dataclasses.replace(
            self.correction,
            theta=self.learner.best,
            trained=self._range(),
            scores=kept,
            provenance={**about, **versions()},
        ).save(folder.correction)
        table = Table(folder.scores, ("number", *rows[0]), 0)
        for number, row in enumerate(rows):
            table.add({"number": number, **row})
        table.close()

    def _draw(self, rows: Sequence[dict[str, Any]]) -> None:
        """Draws the scores of the best correction, on rank 0."""
        if self.mesh.rank:
            return
        with decoration("correction.png", self.progress.warn):
            from flowpm_dist.emulate.figures import correction_figure
            from flowpm_dist.io.figures import save_figure

            save_figure(correction_figure(rows), self.folder.path / "correction.png")

    def _range(self) -> Range:
        """Returns what is learned from."""
        options, steps = self.options, self.options.evolution
        held = options.emulate.validation
        cells = [force_cell(size, options.force_cells) for size in options.sizes()[:-held]]
        values = [_numbers(c) for c in options.cosmologies()[:-held]]
        names = [name for name in values[0] if all(name in each for each in values)]
        of_lpt = options.emulate.structure == LPT_ONLY
        return Range(
            integrator=LPT_ONLY if of_lpt else name_of(steps.integrator),
            mesh_factor=steps.mesh_factor,
            deconvolve=steps.deconvolve,
            force_gradient=steps.force_gradient,
            steps=0 if of_lpt else steps.step_count,
            a=(steps.first, steps.last),
            cell=(min(cells), max(cells)),
            cosmology={n: (min(v[n] for v in values), max(v[n] for v in values)) for n in names},
            times=self._times,
        )

    def _end_if_stopped(self) -> None:
        if (signal := self._stop.name()) is not None:
            raise StopError(signal, "before the first iteration")

    def _save(self) -> None:
        """Writes the checkpoint, on rank 0."""
        if self.mesh.rank == 0:
            save_arrays(self.folder.checkpoint, self.learner.arrays())
            self.folder.write_mark(complete=False, iteration=self.learner.done)

    def _restore(self) -> None:
        """Goes on from the checkpoint, if iterations were made.

        Raises:
            CheckpointError: it is missing or cannot be read.
        """
        # Rank 0 decides: a file system may show the mark to other ranks later.
        found = tf.constant(self.folder.mark().get("iteration", 0))
        path, made = self.folder.checkpoint, int(self.mesh.world.broadcast(found))
        if not made:
            return
        try:
            self.learner.restore(read_arrays(path))
        except (UnreadableError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} of {made} iterations is missing or damaged ({error}): put it back, or "
                f"begin anew with --overwrite; {self.folder.correction} can be emulate.start_from"
            ) from error


def _numbers(cosmology: CosmologyOptions) -> dict[str, float]:
    return cosmology.model_dump(exclude_none=True, exclude={"transfer"})


def _means_at(rows: Sequence[dict[str, Any]], wavenumbers: Sequence[float]) -> list[dict[str, Any]]:
    """Returns the means of universes of a cell and time, in the bins nearest to wavenumbers."""
    numbers = [name for name in rows[0] if name.endswith((" plain", " corrected"))]
    found = []
    for cell, a in sorted({(row[SPACING], row["a"]) for row in rows}):
        same = [row for row in rows if (row[SPACING], row["a"]) == (cell, a)]
        ks = sorted({row["k [h/Mpc]"] for row in same})
        for k in sorted({nearest(ks, k) for k in wavenumbers if k <= ks[-1] * 1.1}):
            here = [row for row in same if row["k [h/Mpc]"] == k]
            means = {name: float(np.mean([row[name] for row in here])) for name in numbers}
            found.append({SPACING: cell, "a": a, "k [h/Mpc]": k, **means})
    return found
