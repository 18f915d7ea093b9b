"""The bases of samplers of the posterior, whose chains move in coordinates of even curvature.

In these coordinates the mass of a mode is the curvature that follows from the prior power and the
noise. No maintained library samples a field that no rank holds as a whole.

Step size by dual averaging: Hoffman and Gelman 2014 (arXiv:1111.4246).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.options import constructed, in_unit
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior, attempt
from flowpm_dist.reconstruction.sampler_options import MoveOptions
from flowpm_dist.reconstruction.unknowns import Memory, Unknowns, Use, random_numbers

FIRST_STEP = 0.1
"""Initial step size; for a Gaussian of unit variance, a step of 2 is unstable."""

Proposal = tuple[Unknowns, Evaluation, np.ndarray]
"""A place for each chain, the evaluation there, and the energy that the move gained [...]."""


@dataclass(frozen=True)
class Draw:
    """One draw of each chain.

    Attributes:
        point: the unknowns themselves.
        evaluation: the evaluation there, with the gradient with respect to the coordinates.
        accepted: whether each chain moved, bool [...].
        acceptance: the probability that it would move [...].
        energy_error: the square of the change of the energy divided by the number of unknowns
            [...]: over the move, or averaged over its steps if no step is rejected.
        step: the size of the steps, in units of the posterior's width in linear theory.
        evaluations: the number of gradient evaluations.
    """

    point: Unknowns
    evaluation: Evaluation
    accepted: np.ndarray
    acceptance: np.ndarray
    energy_error: np.ndarray
    step: float
    evaluations: int


class StepSize:
    """A step size that is learnt.

    Attributes:
        values: the numbers that define its state, by name.
    """

    values: dict[str, float]


class Sampler(ABC):
    """A sampler of the posterior, with a chain for each point of a batch.

    Random numbers depend on the seed and the number of the move. So they are the same on any mesh.

    Attributes:
        options_type: the model of the sampler's options.
        options: the options.

    Args:
        step: the initial step size.
        options: the options in `options_type`, by name.

    Raises:
        TypeError, ValueError: an unknown option, or a value out of its range.
    """

    options_type: ClassVar[type[MoveOptions]]
    _size: StepSize

    def __init__(self, *, step: float = FIRST_STEP, **options: Any) -> None:
        self.options: Any = constructed(self.options_type, options)
        step = in_unit("step", step)
        if not step > 0:
            raise ValueError(f"step = {step}: must be above 0")
        self._count, self._spent = 0, 0

    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        """Begins at a point of the unknowns for each chain, with the present step size.

        Args:
            objective: the posterior, in coordinates of even curvature.
            point: the unknowns themselves.

        Raises:
            HaloError, FloatingPointError: if the posterior is not finite there.
        """
        self._begin(objective, objective.scaling.to_even(point))

    @abstractmethod
    def draw(self, *, learn: bool) -> Draw:
        """Makes one move of every chain. Must be called on all ranks together.

        Args:
            learn: whether to adapt the step size; such draws are not yet draws of the posterior.
        """

    def memory(self) -> Memory:
        """Returns all that the next draw depends on."""
        return Memory({"point": self._place}, {**self._size.values, "moves": self._count})

    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """Resumes from what `memory` returned."""
        self._size.values = {name: memory.numbers[name] for name in self._size.values}
        self._count = int(memory.numbers["moves"])
        self._begin(objective, memory.points["point"])

    def _begin(self, objective: EvenPosterior, place: Unknowns) -> None:
        self._objective, self._space, self._place = objective, objective.space, place
        self._here = objective.evaluate(place)
        if not np.isfinite(self._here.loss).all():
            raise FloatingPointError("the posterior is not finite where a chain begins")
        free = 0 if objective.held else len(self._space.names)
        self._unknowns = self._space.box.cells + free

    def _normal(self, use: Use, *number: int) -> Unknowns:
        """Returns a unit normal direction, which is 0 for parameters that are held."""
        drawn = self._space.normal(self.options.seed, use, *number)
        if self._objective.held:
            return Unknowns(drawn.field, tf.zeros_like(drawn.parameters))
        return drawn

    def _evaluated(self, place: Unknowns) -> Evaluation | None:
        """Returns the evaluation at a place, or None on every rank if the model fails."""
        self._spent += 1
        return attempt(self._objective, place)

    def _point(self) -> Unknowns:
        return self._objective.scaling.from_even(self._place)


class DualAveraging(StepSize):
    """A step size that dual averaging adapts towards a target share of accepted moves.

    Args:
        first: the initial step size.
        target: the share of moves to be accepted.
    """

    gamma, delay, decay = 0.05, 10.0, 0.75

    def __init__(self, first: float, target: float) -> None:
        self._target = target
        learnt = {"latest": math.log(first), "average": 0.0, "error": 0.0, "count": 0.0}
        self.values = {**learnt, "centre": math.log(2 * first)}

    def learn(self, acceptance: float) -> None:
        """Adapts the step size to the acceptance of one more move."""
        _, average, error, count, centre = self.values.values()
        count += 1
        share = 1 / (count + self.delay)
        error = (1 - share) * error + share * (self._target - acceptance)
        latest = centre - math.sqrt(count) / self.gamma * error
        weight = count**-self.decay
        average = weight * latest + (1 - weight) * average
        self.values |= {"latest": latest, "average": average, "error": error, "count": count}

    @property
    def now(self) -> float:
        """The step size to use while it is being learnt."""
        return math.exp(self.values["latest"])

    @property
    def settled(self) -> float:
        """The step size that was learnt, or the initial one if there were no moves yet."""
        return math.exp(self.values["average" if self.values["count"] else "latest"])


class MetropolisSampler(Sampler):
    """A sampler whose moves are many steps, accepted or rejected as a whole (Metropolis-Hastings).

    A subclass must implement `_plan` and `_proposal`. See `Sampler` for its arguments.
    """

    _size: DualAveraging

    def __init__(self, *, step: float = FIRST_STEP, **options: Any) -> None:
        super().__init__(step=step, **options)
        self._size = DualAveraging(in_unit("step", step), self.options.target)

    @abstractmethod
    def _plan(self, rng: np.random.Generator, step: float) -> tuple[int, float]:
        """Returns the number of steps of a move and their size, which depend on no chain's place.

        Args:
            rng: random numbers of this move.
            step: the step size that was learnt.
        """

    @abstractmethod
    def _proposal(self, leaps: int, step: float) -> Proposal | None:
        """Returns where steps from here lead, by a motion that can be reversed.

        None if the model fails at a step. The gained energy is minus the log of the joint density
        of place and velocity, volume included.
        """

    @override
    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        self._size = DualAveraging(self._size.settled, self.options.target)
        super().start(objective, point)

    @override
    def draw(self, *, learn: bool) -> Draw:
        rng = random_numbers(self.options.seed, Use.CHANCE, self._count)
        leaps, step = self._plan(rng, self._size.now if learn else self._size.settled)
        chance = rng.uniform(size=np.shape(self._here.loss))
        spent = self._spent
        moved = self._proposal(leaps, step)
        self._count += 1
        gain = np.full_like(self._here.loss, np.inf)
        if moved is not None:
            place, proposed, energy = moved
            gain = np.where(np.isfinite(energy), energy, gain)
        acceptance = np.exp(np.minimum(0.0, -gain))
        accepted = chance < acceptance
        if moved is not None and accepted.any():
            here, chosen = self._here, self._space.chosen
            self._place = chosen(accepted, place, self._place)
            self._here = Evaluation(
                np.where(accepted, proposed.data, here.data),
                np.where(accepted, proposed.prior, here.prior),
                chosen(accepted, proposed.gradient, here.gradient),
                np.where(accepted, proposed.volume, here.volume),
            )
        if learn:
            self._size.learn(float(np.mean(acceptance)))
        error = gain**2 / self._unknowns
        spent = self._spent - spent
        return Draw(self._point(), self._here, accepted, acceptance, error, step, spent)
