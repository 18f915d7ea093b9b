"""The interface of a minimiser over distributed unknowns."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowpm_dist.reconstruction.posterior import Evaluation, Objective, attempt
from flowpm_dist.reconstruction.unknowns import Unknowns

MOST_TRIES = 8
"""Number of steps that a minimiser tries, each shorter than the last, before it gives up."""


class NoProgressError(FloatingPointError):
    """An error: the loss is not finite wherever a step leads. The last good point is kept."""


class StalledError(Exception):
    """An error: no step lowers the loss any more within its precision.

    Args:
        message: what was tried.
        evaluations: the number of gradient evaluations that were made.
    """

    def __init__(self, message: str, evaluations: int) -> None:
        super().__init__(message)
        self.evaluations = evaluations


@dataclass(frozen=True)
class Report:
    """The result of an iteration.

    Attributes:
        point: the point that the minimiser has reached.
        evaluation: the evaluation there; for Adam, at the point before its step.
        evaluations: the number of gradient evaluations of the iteration.
        step: the length of the step over that of the direction; for Adam, the learning rate.
    """

    point: Unknowns
    evaluation: Evaluation
    evaluations: int
    step: float


@dataclass(frozen=True)
class Memory:
    """The state that a minimiser or a sampler needs to resume exactly.

    Attributes:
        points: points by name, in the coordinates of the objective.
        numbers: numbers by name.
    """

    points: Mapping[str, Unknowns]
    numbers: Mapping[str, float]


class Minimiser(abc.ABC):
    """A way from a point to a better one, iteration by iteration."""

    name: str

    @abc.abstractmethod
    def start(self, objective: Objective, point: Unknowns) -> None:
        """Begins at a point, without any memory of earlier iterations."""

    @abc.abstractmethod
    def iterate(self) -> Report:
        """Makes one iteration. Must be called on all ranks together.

        Raises:
            NoProgressError: if the loss is not finite wherever a step leads.
            StalledError: if no step lowers the loss.
        """

    @abc.abstractmethod
    def memory(self) -> Memory:
        """Returns all that the next iteration depends on."""

    @abc.abstractmethod
    def resume(self, objective: Objective, memory: Memory) -> None:
        """Resumes from what `memory` returned."""


def finite_evaluation(objective: Objective, point: Unknowns) -> Evaluation | None:
    """Returns the evaluation at a point, or None if the loss or its gradient is not finite."""
    found = attempt(objective, point)
    if found is None:
        return None
    square = objective.space.dot(found.gradient, found.gradient)
    finite = math.isfinite(float(found.loss)) and bool(np.isfinite(square))
    return found if finite else None
