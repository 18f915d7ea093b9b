"""Draws from the posterior: Hamiltonian Monte Carlo over distributed fields, of several chains.

In coordinates of even curvature, so that the mass of a mode is the curvature that the prior power
and the noise give it. No library that is kept samples a field which no rank holds whole.
Neal 2011 (arXiv:1206.1901); step size by dual averaging, Hoffman and Gelman 2014 (arXiv:1111.4246).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.nbody import HaloError
from flowpm_dist.reconstruction.optimisers import Memory
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior
from flowpm_dist.reconstruction.unknowns import Unknowns

MOMENTUM, CHANCE = 1, 2  # keys of what is drawn

LEARNT = ("latest", "average", "error", "count")
"""What is remembered of the step size."""

FIRST_STEP = 0.1
"""Size of a step before any is known; of a Gaussian of unit variance 2 is unstable."""


@dataclass(frozen=True)
class Draw:
    """One draw of each chain.

    Attributes:
        point: of the unknowns themselves.
        evaluation: there, with the gradient by the coordinates.
        accepted: bool [...] of each chain, whether it moved.
        acceptance: probability that it would [...].
        step: size of the leapfrog steps.
        evaluations: of the gradient.
    """

    point: Unknowns
    evaluation: Evaluation
    accepted: np.ndarray
    acceptance: np.ndarray
    step: float
    evaluations: int


class StepSize:
    """The logarithm of a step size, led by dual averaging to where a share of moves is accepted.

    Args:
        first: step size to begin with.
        target: share.
    """

    gamma, delay, decay = 0.05, 10.0, 0.75

    def __init__(self, first: float, target: float) -> None:
        self._target, self.centre = target, math.log(2 * first)
        self.values = [math.log(first), 0.0, 0.0, 0.0]  # latest, average, error, count

    def learn(self, acceptance: float) -> None:
        """From one more move."""
        latest, average, error, count = self.values
        count += 1
        share = 1 / (count + self.delay)
        error = (1 - share) * error + share * (self._target - acceptance)
        latest = self.centre - math.sqrt(count) / self.gamma * error
        weight = count**-self.decay
        self.values = [latest, weight * latest + (1 - weight) * average, error, count]

    @property
    def now(self) -> float:
        """To explore with, while it is learnt."""
        return math.exp(self.values[0])

    @property
    def settled(self) -> float:
        """What was learnt; the first where nothing was."""
        return math.exp(self.values[1] if self.values[3] else self.values[0])


class HMC:
    """Draws of the posterior, a chain for each point of a batch.

    Each move takes between half of `leaps` and all of them, and steps of up to a tenth more or less
    than the step size, so that no period of the motion is met. What is random follows from the seed
    and the number of the move: the same on any mesh.

    Args:
        leaps: leapfrog steps of a move, at most.
        target: share of accepted moves that the step size is led to.
        seed: of momenta and chances.
        step: size to begin with.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        *,
        leaps: int = 12,
        target: float = 0.8,
        seed: int = 0,
        step: float = FIRST_STEP,
    ) -> None:
        if leaps < 1 or not 0 < target < 1 or not step > 0:
            raise ValueError("leaps from 1 on, a target between 0 and 1, a step above 0 are needed")
        self._leaps, self._seed, self._target = leaps, seed, target
        self._size = StepSize(step, target)
        self._count = 0

    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        """Begin at a point of the unknowns, for each chain its own; with the step size as it is.

        Args:
            objective: the posterior, in coordinates of even curvature.
            point: of the unknowns themselves.

        Raises:
            HaloError, FloatingPointError: there the posterior is not finite.
        """
        self._size = StepSize(self._size.settled, self._target)
        self._begin(objective, objective.scaling.to_even(point))

    def _begin(self, objective: EvenPosterior, place: Unknowns) -> None:
        self._objective, self._space, self._place = objective, objective.space, place
        self._here = objective.evaluate(place)
        if not np.isfinite(self._here.loss).all():
            raise FloatingPointError("the posterior is not finite where a chain begins")

    def draw(self, *, learn: bool) -> Draw:
        """One move of every chain. On all ranks together.

        Args:
            learn: adapt the step size; draws made meanwhile are not of the posterior yet.
        """
        rng = np.random.default_rng([self._seed, CHANCE, self._count])
        leaps = int(rng.integers((self._leaps + 1) // 2, self._leaps + 1))
        step = (self._size.now if learn else self._size.settled) * rng.uniform(0.9, 1.1)
        chance = rng.uniform(size=np.shape(self._here.loss))
        momentum = self._space.normal(self._seed, MOMENTUM, self._count)
        if self._objective.held:
            momentum = Unknowns(momentum.field, tf.zeros_like(momentum.parameters))
        self._count += 1
        before = self._here.loss + 0.5 * self._space.dot(momentum, momentum)
        moved = self._leapfrog(momentum, step, leaps)
        if moved is None:
            acceptance = np.zeros_like(before)
        else:
            place, found, momentum = moved
            after = found.loss + 0.5 * self._space.dot(momentum, momentum)
            gain = np.where(np.isfinite(after), before - after, -np.inf)
            acceptance = np.exp(np.minimum(0.0, gain))
        accepted = chance < acceptance
        if moved is not None and accepted.any():
            here, chosen = self._here, self._space.chosen
            self._place = chosen(accepted, place, self._place)
            self._here = Evaluation(
                np.where(accepted, found.data, here.data),
                np.where(accepted, found.prior, here.prior),
                chosen(accepted, found.gradient, here.gradient),
                np.where(accepted, found.volume, here.volume),
            )
        if learn:
            self._size.learn(float(np.mean(acceptance)))
        point = self._objective.scaling.from_even(self._place)
        return Draw(point, self._here, accepted, acceptance, step, leaps)

    def _leapfrog(
        self, momentum: Unknowns, step: float, leaps: int
    ) -> tuple[Unknowns, Evaluation, Unknowns] | None:
        place, found = self._place, self._here
        momentum = momentum.plus(-0.5 * step, found.gradient)
        for leap in range(leaps):
            place = place.plus(step, momentum)
            try:
                found = self._objective.evaluate(place)
            except (HaloError, FloatingPointError):
                return None  # raised alike on every rank
            momentum = momentum.plus(-step if leap < leaps - 1 else -0.5 * step, found.gradient)
        return place, found, momentum

    def memory(self) -> Memory:
        """All that the next draw depends on."""
        numbers = dict(zip(LEARNT, self._size.values, strict=True))
        numbers["centre"] = self._size.centre
        return Memory({"point": self._place}, {**numbers, "moves": self._count})

    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """Go on from what `memory` gave."""
        self._size.values = [memory.numbers[name] for name in LEARNT]
        self._size.centre = memory.numbers["centre"]
        self._count = int(memory.numbers["moves"])
        self._begin(objective, memory.points["point"])
