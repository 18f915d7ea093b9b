"""Microcanonical Langevin Monte Carlo over distributed fields, with several chains.

Robnik, De Luca, Silverstein and Seljak 2023 (arXiv:2212.08549); Robnik and Seljak 2023
(arXiv:2303.18221); for initial conditions, Bayer, Seljak and Modi 2023 (arXiv:2307.09504).
"""

from __future__ import annotations

import math

import numpy as np

from flowpm_dist.reconstruction.isokinetic import IsokineticMotion, Moving
from flowpm_dist.reconstruction.minimisers import Memory
from flowpm_dist.reconstruction.options import SAMPLER_DEFAULTS
from flowpm_dist.reconstruction.posterior import EvenPosterior
from flowpm_dist.reconstruction.sampler import FIRST_STEP, Draw, Sampler
from flowpm_dist.reconstruction.unknowns import Unknowns, Use

LEARNT = ("logarithm", "mean", "count")
"""Names of the numbers that define the state of the step size in a checkpoint."""

LEAST = 1.0
"""The least value of the mean: it limits steps to 1 where the energy hardly changes."""

TRIES = 8
"""Number of failed moves in a row after which sampling ends with an error."""


class StepSize:
    """A step size that is adapted to a target change of the energy in a step.

    The change is proportional to the cube of the step. The step size is learnt from the absolute
    change, not from its square, averaged over about the latest quarter of the steps: the first
    steps are far from where the chains settle.

    Args:
        first: the initial step size.
        target: the variance of the change divided by the number of unknowns.
    """

    def __init__(self, first: float, target: float) -> None:
        self._expected = math.sqrt(2 / math.pi * target)  # of the size, if normal
        self.values = [math.log(first), 0.0, 0.0]

    @property
    def now(self) -> float:
        """The present step size."""
        return math.exp(self.values[0])

    def learn(self, step: float, size: float) -> None:
        """Adapts the step size to one more step.

        Args:
            step: the size of that step.
            size: its absolute change of energy divided by the square root of the number of
                unknowns.
        """
        _, mean, count = self.values
        share = 4 / (count + 4)
        mean += share * (size / self._expected / step**3 - mean)
        self.values = [-math.log(max(mean, LEAST)) / 3, mean, count + 1]

    def restart(self) -> None:
        """Starts learning anew, from the present step size."""
        self.values = [self.values[0], 0.0, 0.0]


class Microcanonical(Sampler):
    """A sampler that moves at constant speed; gradients and small random turns change its course.

    No step is rejected. The step size is adapted to the change of the energy in a step, which
    bounds the error of the draws. For a unit Gaussian, the sampled variance v solves
    sqrt(v) tanh(step sqrt(v) / 2) = step / 2; it is about 1 + step^2 / 12. The step size does not
    shrink as the number of unknowns grows.

    Args:
        leaps: the number of steps of a move.
        length: the distance over which the direction is forgotten, in widths of the posterior, at
            least 0.1.
        energy_error: the variance of a step's change of energy divided by the number of unknowns.
        seed: the seed of velocities and their turns.
        step: the initial step size.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        *,
        leaps: int = SAMPLER_DEFAULTS.leaps,
        length: float = SAMPLER_DEFAULTS.length,
        energy_error: float = SAMPLER_DEFAULTS.energy_error,
        seed: int = SAMPLER_DEFAULTS.seed,
        step: float = FIRST_STEP,
    ) -> None:
        if leaps < 1 or not length >= 0.1 or not min(energy_error, step) > 0:
            raise ValueError(
                "leaps from 1 on, a length from 0.1 on, energy error and step above 0 are needed"
            )
        super().__init__(seed)
        self._leaps, self._length = leaps, length
        self._size = StepSize(step, energy_error)
        self._failed = 0

    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        """See `Sampler.start`."""
        self._size.restart()
        super().start(objective, point)
        self._velocity = self._motion.unit(self._normal(Use.VELOCITY, self._count))

    def draw(self, *, learn: bool) -> Draw:
        """See `Sampler.draw`.

        If the posterior of any chain is not finite, all chains stay and reverse their velocities.

        Raises:
            FloatingPointError: if several such moves follow each other, each with steps half as
                long as before.
        """
        before, step = (self._place, self._here, -self._velocity), self._step_size
        spent = self._spent
        error = self._walk(learn=learn)
        self._count += 1
        moved = np.isfinite(error)
        if moved.all():
            self._failed = 0
        else:
            self._place, self._here, self._velocity = before
            self._failed += 1
        if self._failed == TRIES:
            raise FloatingPointError(
                f"{TRIES} moves in a row led to where the posterior is not finite; "
                f"the last with steps of {step:.2g}"
            )
        acceptance, spent = moved.astype(float), self._spent - spent
        return Draw(self._point(), self._here, moved, acceptance, error, step, spent)

    @property
    def _step_size(self) -> float:
        """The step size, halved for each move that has failed since the last that succeeded."""
        return self._size.now / 2**self._failed

    def _walk(self, *, learn: bool) -> np.ndarray:
        """Makes all steps of a move.

        Returns:
            The mean square of their change of energy divided by the number of unknowns [...];
            infinite for all chains if one step failed.
        """
        errors = []
        for leap in range(self._leaps):
            step = self._step_size
            change = self._step(leap, step)
            if not np.isfinite(change).all():
                return np.full_like(change, np.inf)
            errors.append(change**2 / self._unknowns)
            if learn:
                self._size.learn(step, float(np.mean(np.sqrt(errors[-1]))))
        return np.mean(errors, axis=0)

    def _step(self, leap: int, step: float) -> np.ndarray:
        """Makes one step of isokinetic motion, and a random turn.

        Returns:
            The change of the energy [...]. It is not finite if the model fails; then nothing moves.
        """
        moved = self._motion.step(Moving(self._place, self._here, self._velocity), step)
        if moved is None:
            return np.full_like(self._here.loss, np.nan)
        moving, change = moved
        turn = math.sqrt(math.expm1(2 * step / self._length) / self._unknowns)
        turned = moving.velocity.plus(turn, self._normal(Use.TURN, self._count, leap))
        self._velocity = self._motion.unit(turned)
        self._place, self._here = moving.place, moving.here
        return change

    @property
    def _motion(self) -> IsokineticMotion:
        return IsokineticMotion(self._space, self._unknowns, self._evaluated)

    def memory(self) -> Memory:
        """See `Sampler.memory`."""
        numbers = dict(zip(LEARNT, self._size.values, strict=True))
        counts = {"moves": self._count, "failed": self._failed}
        return Memory({"point": self._place, "velocity": self._velocity}, {**numbers, **counts})

    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """See `Sampler.resume`."""
        self._size.values = [memory.numbers[name] for name in LEARNT]
        self._count, self._failed = (int(memory.numbers[name]) for name in ("moves", "failed"))
        self._begin(objective, memory.points["point"])
        self._velocity = memory.points["velocity"]
