"""Learns a correction: steps of Adam on cheap runs, judged on universes that are held out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flowpm_dist.corrections.loss import Compared, Loss, Pair
from flowpm_dist.corrections.options import LearningOptions
from flowpm_dist.corrections.scores import Row, means_at, range_of, score_rows, verdict
from flowpm_dist.evolution.corrections import LPT_ONLY, Correction, StateCorrection
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import constructed
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError
from flowpm_dist.simulation.state import State
from meshimpl.process_mesh import ProcessMesh

MOST_FAILURES = 5
"""Failed iterations in a row, after which the learning ends."""
SAME_NOISE = 0.9
"""Least correlation of two universes of one white noise in the first bin."""


class LearningError(UserError):
    """Universes that cannot be learned from, or a loss that is not finite."""


class Steps:
    """Adam's steps, taken back if a run fails after them; the same on every rank.

    Args:
        theta: the first numbers, float64 [n].
        rate: the first learning rate, which falls to 0 by half a cosine.
        iterations: the number of steps.
        mesh: the ranks.

    Attributes:
        done: the number of iterations that are done.
        failures: the number of iterations in a row that failed.
        best: the numbers with the lowest loss of the universes that are held out; the first ones
            before any validation.
        best_loss: that loss.
    """

    def __init__(self, theta: np.ndarray, rate: float, iterations: int, mesh: ProcessMesh) -> None:
        self._theta = tf.Variable(theta, dtype=tf.float64)
        decay = keras.optimizers.schedules.CosineDecay(rate, iterations)
        self._adam = keras.optimizers.Adam(decay, beta_2=0.99)
        self._adam.build([self._theta])
        self._mesh = mesh
        self._good = self._values()
        self.done, self.failures = 0, 0
        self.best, self.best_loss = np.array(theta, np.float64), math.inf

    @property
    def theta(self) -> tf.Tensor:
        """The present numbers."""
        return tf.convert_to_tensor(self._theta)

    def step(self, gradient: tf.Tensor) -> None:
        """Makes a step of Adam from numbers whose loss and gradient are finite."""
        self._good = self._values()
        # to the bit the same on every rank
        self._adam.apply([self._mesh.world.broadcast(gradient)], [self._theta])
        self.failures = 0
        self.done += 1

    def go_back(self) -> None:
        """Goes back to the last numbers whose loss and gradient were finite."""
        for variable, value in zip(self._variables, self._good, strict=True):
            variable.assign(value)
        self.failures += 1
        self.done += 1

    def judged(self, loss: float) -> bool:
        """Stores the present numbers if their loss is the lowest so far; returns whether it is."""
        if not loss < self.best_loss:
            return False
        self.best, self.best_loss = self.theta.numpy(), loss
        return True

    @property
    def _variables(self) -> list[tf.Variable]:
        return [self._theta, *(variable.value for variable in self._adam.variables)]

    def _values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self._variables]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a checkpoint."""
        values = {f"value_{n}": value for n, value in enumerate(self._values())}
        values |= {f"good_{n}": value for n, value in enumerate(self._good)}
        best = {"best": self.best, "best_loss": np.array(self.best_loss)}
        counts = {"done": np.array(self.done), "failures": np.array(self.failures)}
        return {**counts, **best, **values}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continues from the arrays of a checkpoint.

        Raises:
            KeyError, ValueError: it is of another learning.
        """
        for n, variable in enumerate(self._variables):
            variable.assign(arrays[f"value_{n}"])
        self._good = [arrays[f"good_{n}"] for n in range(len(self._variables))]
        self.done, self.failures = int(arrays["done"]), int(arrays["failures"])
        self.best, self.best_loss = arrays["best"], float(arrays["best_loss"])


@dataclass(frozen=True)
class Iteration:
    """An iteration of a learner.

    Attributes:
        number: its number, from 1.
        universe: the name of the universe.
        losses: the loss and its terms by name, see `loss.TERMS`; empty if the iteration failed.
        failure: why it failed; None if it did not. The numbers before are taken again.
        seconds: its duration, without a validation [s].
        held_out: the mean loss of the universes held out; None without a validation.
        is_best: whether that loss is the lowest so far. `Learner.correction` is then of this
            iteration.
    """

    number: int
    universe: str
    losses: Mapping[str, float]
    failure: str | None
    seconds: float
    held_out: float | None = None
    is_best: bool = False


class Learner:
    """Learns a correction of cheap runs from true states.

    Args:
        correction: the correction to begin with, such as `PotentialFilter.begun()`.
        pairs: the universes to learn from.
        held_out: the universes that are held out, at least one.
        **options: the options of `LearningOptions`, by name.

    Attributes:
        options: the options, with the defaults of the correction's kind.
        correction: the correction with the lowest loss of the universes held out so far, with its
            range and its scores. These are "loss", "loss of plain runs", "verdict" in a sentence,
            and "shown", means at some wavenumbers.
        rows: the scores of that correction for each universe held out, time and wavenumber.
        steps: the numbers of the correction; `steps.arrays()` and `steps.restore()` are for
            checkpoints.

    Raises:
        TypeError, ValueError: an unknown option, a value out of its range, or universes that do not
            belong together.
    """

    def __init__(
        self,
        correction: Correction,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
        **options: Any,
    ) -> None:
        kind = type(correction)
        self.options = constructed(LearningOptions, options).completed(kind)
        self._pairs, self._held_out = list(pairs), list(held_out)
        if not pairs or not held_out:
            raise ValueError("pairs and held_out must have at least one universe each")
        _check_universes([*pairs, *held_out], kind, self.options.structure)
        simulation = pairs[0].simulation
        # Its range is what is learned from here.
        correction = dataclasses.replace(correction, trained=None, scores={}, provenance={})
        if isinstance(correction, StateCorrection):
            force = simulation.options.force_correction
            correction = dataclasses.replace(correction, force=force)
        self.correction, self._begun, self._mesh = correction, correction, simulation.box.mesh
        self._loss = Loss(self.options, correction, [*pairs, *held_out])
        theta, rate = np.asarray(correction.theta, np.float64), self.options.rate
        assert rate is not None
        self.steps = Steps(theta, rate, self.options.iterations, self._mesh)
        self.rows: list[Row] = []

    def run(
        self,
        after: Callable[[Iteration], object] | None = None,
        after_plain: Callable[[], object] | None = None,
    ) -> Correction:
        """Makes the iterations that are left. Must be called on all ranks together.

        Args:
            after: called on every rank after each iteration.
            after_plain: called on every rank after each run without the correction; these runs come
                before the iterations.

        Returns:
            `correction`, the best one.

        Raises:
            LearningError: a cheap run and its truth have different white noise (looked at for the
                universes held out, and for those that start from states), or several iterations in
                a row failed.
            HaloError: a particle left the halo in a run without the correction.
        """
        # Of seeds the universes held out are enough; states are of files, each of its own.
        from_states = [pair for pair in self._pairs if isinstance(pair.start, State)]
        plain = [self._plain(pair, after_plain) for pair in (*self._held_out, *from_states)]
        self._plain_held_out = plain[: len(self._held_out)]
        for pair in self._order():
            iteration = self._iterate(pair)
            number = iteration.number
            if number == self.options.iterations or number % self.options.validate_every == 0:
                iteration = self._validate(iteration)
            if after is not None:
                after(iteration)
            if self.steps.failures == MOST_FAILURES:
                raise LearningError(f"{MOST_FAILURES} iterations in a row failed: use a lower rate")
        self._judge([self._compare(pair, self.steps.best) for pair in self._held_out])
        return self.correction

    def _plain(self, pair: Pair, after: Callable[[], object] | None) -> Compared:
        """Returns the comparison of the run without the correction.

        Raises:
            LearningError: the run and the truth are not of one white noise.
        """
        compared = self._loss.compare(pair, None)
        r = float(compared.correlation[0, 0, 0])
        if not r > SAME_NOISE:
            raise LearningError(
                f"{pair.name}: the cheap run and the truth have r = {r:.2f} at "
                f"k = {compared.k[0]:.2g} h/Mpc: they are not of one white noise"
            )
        if after is not None:
            after()
        return compared

    def _compare(self, pair: Pair, theta: Any) -> Compared:
        return self._loss.compare(pair, self._begun.with_theta(tf.convert_to_tensor(theta)))

    def _order(self) -> Iterator[Pair]:
        """Yields the universe of each iteration that is left: all in turn, in a random order."""
        count = len(self._pairs)
        while self.steps.done < self.options.iterations:
            turn, place = divmod(self.steps.done, count)
            order = np.random.default_rng([self.options.seed, turn]).permutation(count)
            yield self._pairs[order[place]]

    def _iterate(self, pair: Pair) -> Iteration:
        """Makes an iteration, or takes the last step back if the iteration fails."""
        theta, begin = self.steps.theta, time.perf_counter()
        failure, values = None, {}
        try:
            with tf.GradientTape() as tape:
                tape.watch(theta)
                losses = self._loss.terms(self._compare(pair, theta))
                share = losses["loss"] / self._mesh.size  # each rank has the same loss
            gradient = tf.convert_to_tensor(tape.gradient(share, theta))
            if not (np.isfinite(losses["loss"]) and np.isfinite(gradient).all()):
                raise FloatingPointError("the loss or its gradient is not finite")
        except (FloatingPointError, HaloError) as error:  # on all ranks
            failure = str(error)
            self.steps.go_back()
        else:
            self.steps.step(gradient)
            values = {name: float(value) for name, value in losses.items()}
        seconds = time.perf_counter() - begin
        return Iteration(self.steps.done, pair.name, values, failure, seconds)

    def _validate(self, iteration: Iteration) -> Iteration:
        """Returns an iteration with the loss of the universes held out; keeps the best numbers."""
        try:
            corrected = [self._compare(pair, self.steps.theta) for pair in self._held_out]
        except (FloatingPointError, HaloError):
            return dataclasses.replace(iteration, held_out=math.inf)
        loss = self._loss.mean(corrected)
        is_best = self.steps.judged(loss)
        if is_best:
            self._judge(corrected)
        return dataclasses.replace(iteration, held_out=loss, is_best=is_best)

    def _judge(self, corrected: Sequence[Compared]) -> None:
        """Makes the correction of the best numbers, with its scores.

        Args:
            corrected: the universes held out, with these numbers.
        """
        compared = zip(self._held_out, self._plain_held_out, corrected, strict=True)
        self.rows = [row for pair, *both in compared for row in score_rows(pair, *both)]
        scores = {
            "loss": self._loss.mean(corrected),
            "loss of plain runs": self._loss.mean(self._plain_held_out),
            "verdict": verdict(self.rows),
            "shown": means_at(self.rows),
        }
        self.correction = dataclasses.replace(
            self._begun,
            theta=self.steps.best,
            trained=range_of(self._pairs, self.options.structure),
            scores=scores,
            provenance={
                "iterations": self.steps.done,
                "learned from": list(dict.fromkeys(pair.name for pair in self._pairs)),
                "held out": [pair.name for pair in self._held_out],
            },
        )


def _check_universes(pairs: Sequence[Pair], kind: type[Correction], structure: str) -> None:
    """Checks that the cheap runs of universes can have one correction.

    Raises:
        ValueError: they cannot.
    """
    of_states = issubclass(kind, StateCorrection)
    if structure == LPT_ONLY and not of_states:
        raise ValueError(f'structure = "{LPT_ONLY}" makes no steps, which {kind.name} corrects')
    for pair in pairs:
        options = pair.simulation.options
        if (options.state_correction if of_states else options.correction) is not None:
            raise ValueError(f"{pair.name}: the cheap run has a correction already")
        if structure == LPT_ONLY and not isinstance(pair.start, int | np.integer):
            raise ValueError(f"{pair.name}: {LPT_ONLY} starts from a seed, not from a state")
    ranges = [range_of([pair], structure) for pair in pairs]
    free: dict[str, Any] = {"cell": (0.0, 0.0), "cosmology": {}, "times": None, "steps": 0}
    runs = [dataclasses.replace(each, **free) for each in ranges]
    steps_in = {each.cell: each.steps for each in ranges}
    same_steps = all(each.steps == steps_in[each.cell] for each in ranges)
    if not same_steps or any(run != runs[0] for run in runs):
        raise ValueError("all cheap runs must have the same integrator, steps and force")
