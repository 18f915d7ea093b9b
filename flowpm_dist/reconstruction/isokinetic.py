"""The isokinetic motion of microcanonical samplers, in steps that can be reversed.

A velocity of length 1 turns with the gradient (Ver Steeg and Galstyan 2021, arXiv:2111.02434;
Robnik and others 2023, arXiv:2212.08549). The change of the energy includes the volume by which a
step stretches directions, so exp(-change) is what Metropolis and Hastings ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowpm_dist.reconstruction.posterior import Evaluation
from flowpm_dist.reconstruction.unknowns import Space, Unknowns


@dataclass(frozen=True)
class Moving:
    """Chains on their way.

    Attributes:
        place: coordinates of even curvature.
        here: the evaluation there.
        velocity: of length 1.
    """

    place: Unknowns
    here: Evaluation
    velocity: Unknowns


class IsokineticMotion:
    """Steps at constant speed, for chains with some number of free unknowns.

    Args:
        space: the space of the unknowns.
        unknowns: the number of those that move.
        evaluate: evaluates a place; None if the model fails there.
    """

    def __init__(
        self, space: Space, unknowns: int, evaluate: Callable[[Unknowns], Evaluation | None]
    ) -> None:
        self._space, self._unknowns, self._evaluate = space, unknowns, evaluate

    def step(self, moving: Moving, step: float) -> tuple[Moving, np.ndarray] | None:
        """Makes one step: half a turn by the gradient, a drift, the other half.

        Args:
            moving: where the chains are.
            step: the length, in widths of the posterior.

        Returns:
            Where they are then, and the change of the energy [...]; None if the model fails.
        """
        velocity, first = self._turned(moving.velocity, moving.here.gradient, step / 2)
        place = moving.place.plus(step * math.sqrt(self._unknowns), velocity)
        found = self._evaluate(place)
        if found is None:
            return None
        velocity, second = self._turned(velocity, found.gradient, step / 2)
        return Moving(place, found, velocity), first + second + found.loss - moving.here.loss

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

    def unit(self, x: Unknowns) -> Unknowns:
        """Returns the direction of x for each chain: its length is 1."""
        return self._space.times(x, 1 / self._space.norm(x))
