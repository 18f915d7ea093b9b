"""The base of all samplers of the posterior: chains in coordinates of even curvature, and draws.

In these coordinates the mass of a mode is the curvature that follows from the prior power and the
noise. No maintained library samples a field that no rank holds as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.reconstruction.minimisers import Memory
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior, attempt
from flowpm_dist.reconstruction.unknowns import Unknowns, Use

FIRST_STEP = 0.1
"""Initial step size; for a Gaussian of unit variance, a step of 2 is unstable."""


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


class Sampler(ABC):
    """A sampler of the posterior, with a chain for each point of a batch.

    Random numbers depend on the seed and the number of the move. So they are the same on any mesh.

    Args:
        seed: the seed of all random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._count, self._spent = seed, 0, 0

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

    @abstractmethod
    def memory(self) -> Memory:
        """Returns all that the next draw depends on."""

    @abstractmethod
    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """Resumes from what `memory` returned."""

    def _begin(self, objective: EvenPosterior, place: Unknowns) -> None:
        self._objective, self._space, self._place = objective, objective.space, place
        self._here = objective.evaluate(place)
        if not np.isfinite(self._here.loss).all():
            raise FloatingPointError("the posterior is not finite where a chain begins")
        free = 0 if objective.held else len(self._space.names)
        self._unknowns = self._space.box.cells + free

    def _normal(self, use: Use, *number: int) -> Unknowns:
        """Returns a unit normal direction, which is 0 for parameters that are held."""
        drawn = self._space.normal(self._seed, use, *number)
        if self._objective.held:
            return Unknowns(drawn.field, tf.zeros_like(drawn.parameters))
        return drawn

    def _evaluated(self, place: Unknowns) -> Evaluation | None:
        """Returns the evaluation at a place, or None on every rank if the model fails."""
        self._spent += 1
        return attempt(self._objective, place)

    def _point(self) -> Unknowns:
        return self._objective.scaling.from_even(self._place)
