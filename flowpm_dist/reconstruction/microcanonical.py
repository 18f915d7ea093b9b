"""Microcanonical Langevin Monte Carlo over distributed fields, of several chains.

Robnik, De Luca, Silverstein and Seljak 2023 (arXiv:2212.08549); Robnik and Seljak 2023
(arXiv:2303.18221); of initial conditions Bayer, Seljak and Modi 2023 (arXiv:2307.09504).
"""

from __future__ import annotations

import math

import numpy as np

from flowpm_dist.reconstruction.optimisers import Memory
from flowpm_dist.reconstruction.posterior import EvenPosterior
from flowpm_dist.reconstruction.sampler import FIRST_STEP, Draw, Sampler
from flowpm_dist.reconstruction.unknowns import Unknowns

VELOCITY, TURN = 1, 2  # keys of what is drawn

LEARNT = ("logarithm", "mean", "count")
"""What is remembered of the step size."""

LEAST = 1.0
"""Of the mean: steps are at most 1, also where the energy hardly changes."""

TRIES = 8
"""Moves in a row that may fail."""


class StepSize:
    """The step in which the energy changes as much as is asked for.

    The change goes with the cube of the step. Learnt from is its size, not its square, in the mean
    over about the latest quarter of the steps: the first are far from where the chains settle.

    Args:
        first: step size to begin with.
        target: variance of the change, by the number of unknowns.
    """

    def __init__(self, first: float, target: float) -> None:
        self._expected = math.sqrt(2 / math.pi * target)  # of the size, if normal
        self.values = [math.log(first), 0.0, 0.0]

    @property
    def now(self) -> float:
        """To move with."""
        return math.exp(self.values[0])

    def learn(self, step: float, size: float) -> None:
        """From one more step, and the size of its change by the root of the number of unknowns."""
        _, mean, count = self.values
        share = 4 / (count + 4)
        mean += share * (size / self._expected / step**3 - mean)
        self.values = [-math.log(max(mean, LEAST)) / 3, mean, count + 1]

    def restart(self) -> None:
        """Learn anew, from the present step."""
        self.values = [self.values[0], 0.0, 0.0]


class Microcanonical(Sampler):
    """Moves whose speed never changes: gradients turn the velocity, and chance does, a little.

    No step is refused. What bounds the error of the draws is how the energy changes in a step,
    which the step size is led by. Of a unit Gaussian variances come out as the v that solves
    sqrt(v) tanh(step sqrt(v) / 2) = step / 2, about 1 + step^2 / 12. The step does not shrink as
    the number of unknowns grows.

    Args:
        leaps: steps of a move.
        length: of the way on which the direction is forgotten, in widths of the posterior, from
            0.1 on.
        energy_error: variance of a step's change of energy, by the number of unknowns.
        seed: of velocities and their turns.
        step: size to begin with.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        *,
        leaps: int = 32,
        length: float = 2.0,
        energy_error: float = 1e-4,
        seed: int = 0,
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
        self._velocity = self._unit(self._normal(VELOCITY, self._count))

    def draw(self, *, learn: bool) -> Draw:
        """See `Sampler.draw`. Where a chain meets no finite posterior all stay, and turn round.

        Raises:
            FloatingPointError: after several such moves, each with steps half as long.
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
        """Half as long after each move that has failed since the last that has not."""
        return self._size.now / 2**self._failed

    def _walk(self, *, learn: bool) -> np.ndarray:
        """All steps of a move.

        Returns:
            Their mean squared change of energy, by the number of unknowns [...]; infinite for all
            where one step failed.
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
        """Half a turn by the gradient, a step, the other half; then a turn by chance.

        Returns:
            The change of the energy [...]; not finite where the model fails, and nothing is moved.
        """
        here = self._here
        velocity, first = self._turned(self._velocity, here.gradient, step / 2)
        place = self._place.plus(step * math.sqrt(self._unknowns), velocity)
        found = self._evaluated(place)
        if found is None:
            return np.full_like(here.loss, np.nan)
        velocity, second = self._turned(velocity, found.gradient, step / 2)
        turn = math.sqrt(math.expm1(2 * step / self._length) / self._unknowns)
        self._velocity = self._unit(velocity.plus(turn, self._normal(TURN, self._count, leap)))
        self._place, self._here = place, found
        return first + second + found.loss - here.loss

    def _turned(
        self, velocity: Unknowns, gradient: Unknowns, step: float
    ) -> tuple[Unknowns, np.ndarray]:
        """The velocity after a time of one gradient, and the energy that it gains."""
        size = self._space.norm(gradient)
        down = -self._space.dot(velocity, gradient) / size
        angle = step * math.sqrt(self._unknowns) * size / (self._unknowns - 1)
        decay = np.exp(-angle)
        stretch = (1 + down + (1 - down) * decay**2) / 2
        by_gradient = (1 - decay) * (1 + decay + down * (1 - decay)) / 2
        turned = self._times(velocity, decay / stretch) - self._times(
            gradient, by_gradient / stretch / size
        )
        return turned, (self._unknowns - 1) * (angle + np.log(stretch))

    def _unit(self, x: Unknowns) -> Unknowns:
        return self._times(x, 1 / self._space.norm(x))

    def _times(self, x: Unknowns, factor: np.ndarray) -> Unknowns:
        """By a number for each chain [...]."""
        return Unknowns(
            x.field * self._space.of_these_chains(factor), x.parameters * factor[..., None]
        )

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
