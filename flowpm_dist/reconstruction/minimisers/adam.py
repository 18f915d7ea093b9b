"""Adam (Kingma and Ba 2015, arXiv:1412.6980) over distributed unknowns."""

from __future__ import annotations

import math

import tensorflow as tf

from flowpm_dist.reconstruction.minimisers.base import (
    MOST_TRIES,
    Memory,
    Minimiser,
    NoProgressError,
    Report,
    finite_evaluation,
)
from flowpm_dist.reconstruction.posterior import Objective
from flowpm_dist.reconstruction.unknowns import Unknowns


class AdamMinimiser(Minimiser):
    """A minimiser with momentum, whose steps are of about the learning rate in every coordinate.

    After a step to a point where the loss is not finite, the step and the rate are halved.

    Args:
        rate: the learning rate: the length of a step in each coordinate [1].
        first, second: the decay rates of the first and second moments.
        epsilon: added to the square root of the second moment.
    """

    name = "adam"

    def __init__(
        self, rate: float = 0.1, first: float = 0.9, second: float = 0.99, epsilon: float = 1e-8
    ) -> None:
        self._asked_rate, self._first, self._second, self._epsilon = rate, first, second, epsilon

    def start(self, objective: Objective, point: Unknowns) -> None:
        """See `Minimiser`."""
        self._objective, self._point, self._steps = objective, point, 0
        self._rate = self._asked_rate
        zero = point.times(0.0)
        self._mean, self._square = zero, zero
        self._step = zero

    def iterate(self) -> Report:
        """See `Minimiser`."""
        tries, here = 1, finite_evaluation(self._objective, self._point)
        while here is None:
            if not self._steps or tries == MOST_TRIES:
                raise NoProgressError(f"the loss is not finite after {tries} tries")
            self._rate *= 0.5
            self._step = self._step.times(0.5)
            self._point = self._point - self._step
            tries, here = tries + 1, finite_evaluation(self._objective, self._point)
        g = here.gradient
        self._steps += 1
        self._mean = self._mean.times(self._first).plus(1 - self._first, g)
        square = Unknowns(tf.square(g.field), tf.square(g.parameters))
        self._square = self._square.times(self._second).plus(1 - self._second, square)
        grown = 1 - self._first**self._steps
        root = math.sqrt(1 - self._second**self._steps)
        self._step = Unknowns(
            *(
                -self._rate / grown * m / (tf.sqrt(v) / root + self._epsilon)
                for m, v in (
                    (self._mean.field, self._square.field),
                    (self._mean.parameters, self._square.parameters),
                )
            )
        )
        self._point = self._point + self._step
        return Report(self._point, here, tries, self._rate)

    def memory(self) -> Memory:
        """See `Minimiser`."""
        points = {
            "point": self._point,
            "mean": self._mean,
            "square": self._square,
            "step": self._step,
        }
        return Memory(points, {"steps": self._steps, "rate": self._rate})

    def resume(self, objective: Objective, memory: Memory) -> None:
        """See `Minimiser`."""
        self.start(objective, memory.points["point"])
        self._mean, self._square = memory.points["mean"], memory.points["square"]
        self._step = memory.points["step"]
        self._steps, self._rate = int(memory.numbers["steps"]), memory.numbers["rate"]
