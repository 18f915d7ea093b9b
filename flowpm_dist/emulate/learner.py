"""The numbers of a correction while they are learned, and what a checkpoint holds of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from flowpm_dist.emulate.truth import EmulationError
from meshimpl.process_mesh import ProcessMesh

MOST_FAILURES = 5
"""Failed iterations in a row, after which the work ends."""


class Learner:
    """Adam's steps, which go back where they led to a run that fails; the same on every rank.

    Args:
        theta: the first numbers, float64 [n].
        rate: the first learning rate, which falls to 0 by half a cosine.
        iterations: the number of steps.
        mesh: the ranks.

    Attributes:
        done: the number of iterations that are done.
        best: the numbers with the lowest loss of the universes that are held out; the first ones
            before any validation.
        best_loss: that loss.
    """

    def __init__(self, theta: np.ndarray, rate: float, iterations: int, mesh: ProcessMesh) -> None:
        self._theta = tf.Variable(theta, dtype=tf.float64)
        decay = keras.optimizers.schedules.CosineDecay(rate, iterations)
        self._adam = keras.optimizers.Adam(decay, beta_2=0.99)
        self._adam.build([self._theta])
        self._mesh = mesh
        self._good = self._values()
        self._failures = 0
        self.done = 0
        self.best, self.best_loss = np.array(theta, np.float64), math.inf

    @property
    def theta(self) -> tf.Tensor:
        """The present numbers."""
        return tf.convert_to_tensor(self._theta)

    def step(self, gradient: tf.Tensor) -> None:
        """Makes a step of Adam from numbers whose loss and gradient are finite."""
        self._good = self._values()
        # to the bit the same on every rank
        self._adam.apply([self._mesh.world.broadcast(gradient)], [self._theta])
        self._failures = 0
        self.done += 1

    def fail(self) -> None:
        """Goes back to the last numbers whose loss and gradient were finite.

        Raises:
            EmulationError: that has happened too often in a row.
        """
        for variable, value in zip(self._variables, self._good, strict=True):
            variable.assign(value)
        self._failures += 1
        self.done += 1
        if self._failures == MOST_FAILURES:
            raise EmulationError(
                f"{MOST_FAILURES} iterations in a row failed: use a lower emulate.rate"
            )

    def judged(self, loss: float) -> bool:
        """Keeps the present numbers if their loss is the lowest so far; returns whether it is."""
        if not loss < self.best_loss:
            return False
        self.best, self.best_loss = self.theta.numpy(), loss
        return True

    @property
    def _variables(self) -> list[tf.Variable]:
        return [self._theta, *(variable.value for variable in self._adam.variables)]

    def _values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self._variables]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns what a checkpoint holds."""
        values = {f"value_{n}": value for n, value in enumerate(self._values())}
        best = {"best": self.best, "best_loss": np.array(self.best_loss)}
        return {"done": np.array(self.done), **best, **values}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continues from a checkpoint.

        Raises:
            KeyError, ValueError: it is of another training.
        """
        for n, variable in enumerate(self._variables):
            variable.assign(arrays[f"value_{n}"])
        self._good = self._values()
        self.done = int(arrays["done"])
        self.best, self.best_loss = arrays["best"], float(arrays["best_loss"])
