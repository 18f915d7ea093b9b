"""What all samplers of the posterior share: chains in coordinates of even curvature, and draws.

In these coordinates the mass of a mode is the curvature that the prior power and the noise give it.
No library that is kept samples a field which no rank holds whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.evolution.halo import HaloError
from flowpm_dist.reconstruction.optimisers import Memory
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior
from flowpm_dist.reconstruction.unknowns import Unknowns

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
        energy_error: square of the change of the energy, by the number of unknowns [...]: over the
            move, or in the mean over its steps where each of them is kept.
        step: size of the steps, in units of the posterior's width in linear theory.
        evaluations: of the gradient.
    """

    point: Unknowns
    evaluation: Evaluation
    accepted: np.ndarray
    acceptance: np.ndarray
    energy_error: np.ndarray
    step: float
    evaluations: int


class Sampler(ABC):
    """Draws of the posterior, a chain for each point of a batch.

    What is random follows from the seed and the number of the move: the same on any mesh.

    Args:
        seed: of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._count, self._spent = seed, 0, 0

    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        """Begin at a point of the unknowns, for each chain its own; with the step size as it is.

        Args:
            objective: the posterior, in coordinates of even curvature.
            point: of the unknowns themselves.

        Raises:
            HaloError, FloatingPointError: there the posterior is not finite.
        """
        self._begin(objective, objective.scaling.to_even(point))

    @abstractmethod
    def draw(self, *, learn: bool) -> Draw:
        """One move of every chain. On all ranks together.

        Args:
            learn: adapt the step size; draws made meanwhile are not of the posterior yet.
        """

    @abstractmethod
    def memory(self) -> Memory:
        """All that the next draw depends on."""

    @abstractmethod
    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """Go on from what `memory` gave."""

    def _begin(self, objective: EvenPosterior, place: Unknowns) -> None:
        self._objective, self._space, self._place = objective, objective.space, place
        self._here = objective.evaluate(place)
        if not np.isfinite(self._here.loss).all():
            raise FloatingPointError("the posterior is not finite where a chain begins")
        free = 0 if objective.held else len(self._space.names)
        self._unknowns = self._space.box.cells + free

    def _normal(self, *key: int) -> Unknowns:
        """A unit normal direction; parameters that are held have none."""
        drawn = self._space.normal(self._seed, *key)
        if self._objective.held:
            return Unknowns(drawn.field, tf.zeros_like(drawn.parameters))
        return drawn

    def _evaluated(self, place: Unknowns) -> Evaluation | None:
        """None, on every rank, where the model fails."""
        self._spent += 1
        try:
            return self._objective.evaluate(place)
        except (HaloError, FloatingPointError):
            return None

    def _point(self) -> Unknowns:
        return self._objective.scaling.from_even(self._place)
