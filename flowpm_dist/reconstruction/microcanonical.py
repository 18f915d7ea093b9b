"""Microcanonical Langevin Monte Carlo over distributed fields, with several chains.

Robnik, De Luca, Silverstein and Seljak 2023 (arXiv:2212.08549); Robnik and Seljak 2023
(arXiv:2303.18221); for initial conditions, Bayer, Seljak and Modi 2023 (arXiv:2307.09504). The
motion: Ver Steeg and Galstyan 2021 (arXiv:2111.02434).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from typing_extensions import override

from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior
from flowpm_dist.reconstruction.sampler import FIRST_STEP, Draw, Sampler, StepSize
from flowpm_dist.reconstruction.sampler_options import MicrocanonicalOptions
from flowpm_dist.reconstruction.unknowns import Memory, Unknowns, Use

LEAST = 1.0
"""The least value of the mean: it limits steps to 1 where the energy hardly changes."""

TRIES = 8
"""Number of failed moves in a row after which sampling ends with an error."""


Moving = tuple[Unknowns, Evaluation, Unknowns]
"""Where chains are: coordinates of even curvature, the evaluation there, and the velocity, of
length 1.
"""


class Isokinetic(Sampler):
    """A sampler that makes steps at constant speed."""

    def _isokinetic_step(self, moving: Moving, step: float) -> tuple[Moving, np.ndarray] | None:
        """Makes one step: half a turn by the gradient, a drift, the other half.

        Args:
            moving: the places of the chains.
            step: the length, in widths of the posterior.

        Returns:
            Where they are then, and the change of the energy [...]; None if the model fails.
        """
        place, here, velocity = moving
        velocity, first = self._turned(velocity, here.gradient, step / 2)
        place = place.plus(step * math.sqrt(self._unknowns), velocity)
        evaluation = self._evaluated(place)
        if evaluation is None:
            return None
        velocity, second = self._turned(velocity, evaluation.gradient, step / 2)
        return (place, evaluation, velocity), first + second + evaluation.loss - here.loss

    def _turned(
        self, velocity: Unknowns, gradient: Unknowns, step: float
    ) -> tuple[Unknowns, np.ndarray]:
        """Returns the velocity after a time under a constant gradient, and the energy gained."""
        size = self._space.norm(gradient)
        down = -self._space.dot(velocity, gradient) / size
        angle = step * math.sqrt(self._unknowns) * size / (self._unknowns - 1)
        decay = np.exp(-angle)
        stretch = (1 + down + (1 - down) * decay**2) / 2
        by_gradient = (1 - decay) * (1 + decay + down * (1 - decay)) / 2
        turned = self._space.times(velocity, decay / stretch) - self._space.times(
            gradient, by_gradient / stretch / size
        )
        return turned, (self._unknowns - 1) * (angle + np.log(stretch))

    def _unit(self, x: Unknowns) -> Unknowns:
        """Returns the direction of x for each chain: its length is 1."""
        return self._space.times(x, 1 / self._space.norm(x))


class StepSizeByEnergy(StepSize):
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
        self.values = {"logarithm": math.log(first), "mean": 0.0, "count": 0.0}

    @property
    def now(self) -> float:
        """The present step size."""
        return math.exp(self.values["logarithm"])

    def learn(self, step: float, size: float) -> None:
        """Adapts the step size to one more step.

        Args:
            step: the size of that step.
            size: its absolute change of energy divided by the square root of the number of
                unknowns.
        """
        mean, count = self.values["mean"], self.values["count"]
        share = 4 / (count + 4)
        mean += share * (size / self._expected / step**3 - mean)
        logarithm = -math.log(max(mean, LEAST)) / 3
        self.values = {"logarithm": logarithm, "mean": mean, "count": count + 1}


class Microcanonical(Isokinetic):
    """A sampler that moves at constant speed; gradients and small random turns change its course.

    No step is rejected. The step size is adapted to the change of the energy in a step, which
    bounds the error of the draws. For a unit Gaussian, the sampled variance v solves
    sqrt(v) tanh(step sqrt(v) / 2) = step / 2; it is about 1 + step^2 / 12. The step size does not
    shrink as the number of unknowns grows.

    See `Sampler` for the arguments.
    """

    options_type = MicrocanonicalOptions
    _size: StepSizeByEnergy

    def __init__(self, *, step: float = FIRST_STEP, **options: Any) -> None:
        super().__init__(step=step, **options)
        self._size = StepSizeByEnergy(in_unit("step", step), self.options.energy_error)
        self._failed = 0

    @override
    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        self._size.values |= {"mean": 0.0, "count": 0.0}  # learns anew from the present step size
        super().start(objective, point)
        self._velocity = self._unit(self._normal(Use.VELOCITY, self._count))

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
        """Makes all steps of a move, each of isokinetic motion and a random turn.

        Returns:
            The mean square of their change of energy divided by the number of unknowns [...];
            infinite for all chains if one step failed.
        """
        errors = []
        for leap in range(self.options.leaps):
            step = self._step_size
            moved = self._isokinetic_step((self._place, self._here, self._velocity), step)
            if moved is None or not np.isfinite(moved[1]).all():
                return np.full_like(self._here.loss, np.inf)
            (self._place, self._here, velocity), change = moved
            turn = math.sqrt(math.expm1(2 * step / self.options.length) / self._unknowns)
            turned = velocity.plus(turn, self._normal(Use.TURN, self._count, leap))
            self._velocity = self._unit(turned)
            errors.append(change**2 / self._unknowns)
            if learn:
                self._size.learn(step, float(np.mean(np.sqrt(errors[-1]))))
        return np.mean(errors, axis=0)

    @override
    def memory(self) -> Memory:
        base = super().memory()
        points = {**base.points, "velocity": self._velocity}
        return Memory(points, {**base.numbers, "failed": self._failed})

    @override
    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        super().resume(objective, memory)
        self._failed = int(memory.numbers["failed"])
        self._velocity = memory.points["velocity"]
