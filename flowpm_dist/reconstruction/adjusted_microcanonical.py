"""Metropolis-adjusted microcanonical Monte Carlo over distributed fields, with several chains.

MAMS: Robnik, Cohn-Gordon and Seljak 2025 (arXiv:2503.01707); `adjusted_mclmc` in BlackJAX.
"""

from __future__ import annotations

import numpy as np

from flowpm_dist.reconstruction.microcanonical import Isokinetic
from flowpm_dist.reconstruction.sampler import MetropolisSampler, Proposal
from flowpm_dist.reconstruction.sampler_options import AdjustedMicrocanonicalOptions
from flowpm_dist.reconstruction.unknowns import Use


class AdjustedMicrocanonical(Isokinetic, MetropolisSampler):
    """A sampler that moves at constant speed, as `Microcanonical` does, and accepts or rejects.

    A move begins in a random direction and follows the gradients for between half of `length` and
    one and a half times that, in steps that can be reversed. Where that could be more than `leaps`
    steps, it makes between a third of `leaps` and all of them. It is accepted as a whole, by the
    change of the energy. The draws are exact. The step size that is accepted shrinks as
    the number of unknowns grows.

    See `Sampler` for the arguments.
    """

    options_type = AdjustedMicrocanonicalOptions

    def _plan(self, rng: np.random.Generator, step: float) -> tuple[int, float]:
        max_steps = min(1.5 * self.options.length / step, self.options.leaps)
        return max(1, round(rng.uniform(max_steps / 3, max_steps))), step

    def _proposal(self, leaps: int, step: float) -> Proposal | None:
        velocity = self._unit(self._normal(Use.VELOCITY, self._count))
        moving, gained = (self._place, self._here, velocity), np.zeros_like(self._here.loss)
        for _ in range(leaps):
            made = self._isokinetic_step(moving, step)
            if made is None:
                return None
            moving, change = made
            gained = gained + change
        place, here, _ = moving
        return place, here, gained
