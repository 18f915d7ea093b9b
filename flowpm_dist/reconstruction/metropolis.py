"""The base of samplers that accept or reject a move as a whole, and so are exact.

Step size by dual averaging, Hoffman and Gelman 2014 (arXiv:1111.4246).
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from flowpm_dist.reconstruction.minimisers import Memory
from flowpm_dist.reconstruction.options import SAMPLER_DEFAULTS
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior
from flowpm_dist.reconstruction.sampler import FIRST_STEP, Draw, Sampler
from flowpm_dist.reconstruction.unknowns import Unknowns, Use, random_numbers

LEARNT = ("latest", "average", "error", "count")
"""Names of the numbers that define the state of the step size in a checkpoint."""

Proposal = tuple[Unknowns, Evaluation, np.ndarray]
"""A place for each chain, the evaluation there, and the energy gained on the way [...]."""


class DualAveraging:
    """A step size that dual averaging adapts towards a target share of accepted moves.

    Args:
        first: the initial step size.
        target: the share of moves to be accepted.
    """

    gamma, delay, decay = 0.05, 10.0, 0.75

    def __init__(self, first: float, target: float) -> None:
        self._target, self.centre = target, math.log(2 * first)
        self.values = [math.log(first), 0.0, 0.0, 0.0]  # latest, average, error, count

    def learn(self, acceptance: float) -> None:
        """Adapts the step size to the acceptance of one more move."""
        latest, average, error, count = self.values
        count += 1
        share = 1 / (count + self.delay)
        error = (1 - share) * error + share * (self._target - acceptance)
        latest = self.centre - math.sqrt(count) / self.gamma * error
        weight = count**-self.decay
        self.values = [latest, weight * latest + (1 - weight) * average, error, count]

    @property
    def now(self) -> float:
        """The step size to use while it is being learnt."""
        return math.exp(self.values[0])

    @property
    def settled(self) -> float:
        """The step size that was learnt, or the initial one if there were no moves yet."""
        return math.exp(self.values[1] if self.values[3] else self.values[0])


class MetropolisSampler(Sampler):
    """A sampler whose moves are many steps, accepted or rejected as a whole (Metropolis-Hastings).

    A subclass must implement `_plan` and `_proposal`.

    Args:
        leaps: the greatest number of steps of a move.
        target: the share of accepted moves that the step size is adapted to.
        seed: the seed of all random numbers.
        step: the initial step size.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        *,
        leaps: int = SAMPLER_DEFAULTS.leaps,
        target: float = SAMPLER_DEFAULTS.target,
        seed: int = SAMPLER_DEFAULTS.seed,
        step: float = FIRST_STEP,
    ) -> None:
        if leaps < 1 or not 0 < target < 1 or not step > 0:
            raise ValueError("leaps from 1 on, a target between 0 and 1, a step above 0 are needed")
        super().__init__(seed)
        self._leaps, self._target = leaps, target
        self._size = DualAveraging(step, target)

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

        None if the model fails on the way. The energy gained is that of the joint density of place
        and velocity, volume included.
        """

    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        """See `Sampler.start`."""
        self._size = DualAveraging(self._size.settled, self._target)
        super().start(objective, point)

    def draw(self, *, learn: bool) -> Draw:
        """See `Sampler.draw`."""
        rng = random_numbers(self._seed, Use.CHANCE, self._count)
        leaps, step = self._plan(rng, self._size.now if learn else self._size.settled)
        chance = rng.uniform(size=np.shape(self._here.loss))
        spent = self._spent
        moved = self._proposal(leaps, step)
        self._count += 1
        gain = np.full_like(self._here.loss, np.inf)
        if moved is not None:
            place, found, energy = moved
            gain = np.where(np.isfinite(energy), energy, gain)
        acceptance = np.exp(np.minimum(0.0, -gain))
        accepted = chance < acceptance
        if moved is not None and accepted.any():
            self._move_to(accepted, place, found)
        if learn:
            self._size.learn(float(np.mean(acceptance)))
        error = gain**2 / self._unknowns
        spent = self._spent - spent
        return Draw(self._point(), self._here, accepted, acceptance, error, step, spent)

    def _move_to(self, which: np.ndarray, place: Unknowns, found: Evaluation) -> None:
        """Moves the chains that are chosen, and leaves the others where they are."""
        here, chosen = self._here, self._space.chosen
        self._place = chosen(which, place, self._place)
        self._here = Evaluation(
            np.where(which, found.data, here.data),
            np.where(which, found.prior, here.prior),
            chosen(which, found.gradient, here.gradient),
            np.where(which, found.volume, here.volume),
        )

    def memory(self) -> Memory:
        """See `Sampler.memory`."""
        numbers = dict(zip(LEARNT, self._size.values, strict=True))
        numbers["centre"] = self._size.centre
        return Memory({"point": self._place}, {**numbers, "moves": self._count})

    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """See `Sampler.resume`."""
        self._size.values = [memory.numbers[name] for name in LEARNT]
        self._size.centre = memory.numbers["centre"]
        self._count = int(memory.numbers["moves"])
        self._begin(objective, memory.points["point"])
