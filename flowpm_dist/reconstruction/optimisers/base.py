"""What an optimiser over distributed unknowns provides."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flowpm_dist.evolution.halo import HaloError
from flowpm_dist.reconstruction.posterior import Evaluation
from flowpm_dist.reconstruction.unknowns import Space, Unknowns

MOST_TRIES = 8
"""Steps that are tried, each shorter, before an optimiser gives up."""


class Objective(Protocol):
    """What is minimised: see `EvenPosterior`."""

    space: Space

    def evaluate(self, u: Unknowns) -> Evaluation:
        """At a point of a single chain."""


class NoProgressError(FloatingPointError):
    """The loss is not finite wherever a step leads; the last good point is kept."""


class StalledError(Exception):
    """No step lowers the loss any more, as far as its precision tells.

    Args:
        message: what was tried.
        evaluations: of the gradient, that it took.
    """

    def __init__(self, message: str, evaluations: int) -> None:
        super().__init__(message)
        self.evaluations = evaluations


@dataclass(frozen=True)
class Report:
    """What is known after an iteration.

    Attributes:
        point: where the optimiser is.
        evaluation: there; for Adam, where it was before its step.
        evaluations: of the gradient, that the iteration took.
        step: length of the step over that of the direction, or the learning rate.
    """

    point: Unknowns
    evaluation: Evaluation
    evaluations: int
    step: float


@dataclass(frozen=True)
class Memory:
    """What an optimiser needs to go on exactly.

    Attributes:
        points: by name, in the coordinates of the objective.
        numbers: by name.
    """

    points: Mapping[str, Unknowns]
    numbers: Mapping[str, float]


class Optimiser(abc.ABC):
    """Goes from a point to a better one, iteration by iteration."""

    name: str

    @abc.abstractmethod
    def start(self, objective: Objective, point: Unknowns) -> None:
        """Begin at a point, with nothing remembered."""

    @abc.abstractmethod
    def iterate(self) -> Report:
        """One iteration. On all ranks together.

        Raises:
            NoProgressError: wherever a step leads, the loss is not finite.
            StalledError: no step lowers the loss.
        """

    @abc.abstractmethod
    def memory(self) -> Memory:
        """All that the next iteration depends on."""

    @abc.abstractmethod
    def resume(self, objective: Objective, memory: Memory) -> None:
        """Go on from what `memory` gave."""


def attempt(objective: Objective, point: Unknowns) -> Evaluation | None:
    """The evaluation, or None where the loss or its gradient is not finite."""
    try:
        found = objective.evaluate(point)
    except (HaloError, FloatingPointError):
        return None  # raised alike on every rank
    square = objective.space.dot(found.gradient, found.gradient)
    finite = math.isfinite(float(found.loss)) and bool(np.isfinite(square))
    return found if finite else None
