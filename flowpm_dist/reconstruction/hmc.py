"""Hamiltonian Monte Carlo over distributed fields, with several chains.

Neal 2011 (arXiv:1206.1901).
"""

from __future__ import annotations

import numpy as np

from flowpm_dist.reconstruction.sampler import MetropolisSampler, Proposal
from flowpm_dist.reconstruction.sampler_options import HMCOptions
from flowpm_dist.reconstruction.unknowns import Use


class HMC(MetropolisSampler):
    """A sampler whose moves are many leapfrog steps, accepted or rejected as a whole.

    Each move takes between half of `leaps` and all of them. The length of its steps varies by up to
    a tenth around the step size, so that moves do not fall into step with a period of the motion.
    The draws are exact. The step size that is accepted shrinks as the number of unknowns grows.

    See `Sampler` for the arguments.
    """

    options_type = HMCOptions

    def _plan(self, rng: np.random.Generator, step: float) -> tuple[int, float]:
        most = self.options.leaps
        return int(rng.integers((most + 1) // 2, most + 1)), step * rng.uniform(0.9, 1.1)

    def _proposal(self, leaps: int, step: float) -> Proposal | None:
        momentum = self._normal(Use.VELOCITY, self._count)
        place, here = self._place, self._here
        before = here.loss + 0.5 * self._space.dot(momentum, momentum)
        momentum = momentum.plus(-0.5 * step, here.gradient)
        for leap in range(leaps):
            place = place.plus(step, momentum)
            evaluation = self._evaluated(place)
            if evaluation is None:
                return None
            here = evaluation
            momentum = momentum.plus(-step if leap < leaps - 1 else -0.5 * step, here.gradient)
        after = here.loss + 0.5 * self._space.dot(momentum, momentum)
        return place, here, after - before
