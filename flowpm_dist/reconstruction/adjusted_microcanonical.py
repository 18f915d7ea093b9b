"""Metropolis-adjusted microcanonical Monte Carlo over distributed fields, with several chains.

MAMS: Robnik, Cohn-Gordon and Seljak 2025 (arXiv:2503.01707); `adjusted_mclmc` in BlackJAX.
"""

from __future__ import annotations

import numpy as np

from flowpm_dist.reconstruction.isokinetic import IsokineticMotion, Moving
from flowpm_dist.reconstruction.metropolis import MetropolisSampler, Proposal
from flowpm_dist.reconstruction.options import SAMPLER_DEFAULTS
from flowpm_dist.reconstruction.sampler import FIRST_STEP
from flowpm_dist.reconstruction.unknowns import Use


class AdjustedMicrocanonical(MetropolisSampler):
    """A sampler that moves at constant speed, as `Microcanonical` does, and accepts or rejects.

    A move begins in a random direction and follows the gradients for between half of `length` and
    one and a half times that, in steps that can be reversed. Where that could be more than `leaps`
    steps, it makes between a third of `leaps` and all of them. It is accepted as a whole, by the
    change of the energy on the way. The draws are exact. The step size that is accepted shrinks as
    the number of unknowns grows.

    Args:
        leaps: the greatest number of steps of a move.
        length: the mean length of a move, in widths of the posterior, at least 0.1, where `leaps`
            allow.
        target: the share of accepted moves that the step size is adapted to.
        seed: the seed of velocities and acceptance.
        step: the initial step size.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        *,
        leaps: int = SAMPLER_DEFAULTS.leaps,
        length: float = SAMPLER_DEFAULTS.length,
        target: float = SAMPLER_DEFAULTS.target,
        seed: int = SAMPLER_DEFAULTS.seed,
        step: float = FIRST_STEP,
    ) -> None:
        if not length >= 0.1:
            raise ValueError("a length from 0.1 on is needed")
        super().__init__(leaps=leaps, target=target, seed=seed, step=step)
        self._length = length

    def _plan(self, rng: np.random.Generator, step: float) -> tuple[int, float]:
        longest = min(1.5 * self._length / step, self._leaps)
        return max(1, round(rng.uniform(longest / 3, longest))), step

    def _proposal(self, leaps: int, step: float) -> Proposal | None:
        motion = IsokineticMotion(self._space, self._unknowns, self._evaluated)
        velocity = motion.unit(self._normal(Use.VELOCITY, self._count))
        moving, gained = Moving(self._place, self._here, velocity), np.zeros_like(self._here.loss)
        for _ in range(leaps):
            made = motion.step(moving, step)
            if made is None:
                return None
            moving, change = made
            gained = gained + change
        return moving.place, moving.here, gained
