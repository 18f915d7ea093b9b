"""What a kick-drift-kick scheme must provide."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from flowpm_dist.cosmology import GrowthFunctions


@dataclass(frozen=True)
class Step:
    """One step from scale factor `start` to `stop`.

    velocity += opening * force(start); displacement += drift * velocity;
    velocity += closing * force(stop), with force = -grad phi, laplacian phi = 1.5 Omega_m delta.

    Attributes:
        start, stop: scale factors [1].
        opening, closing: kick factors [1/H0], float64 scalars.
        drift: drift factor [1/H0], float64 scalar.
    """

    start: float
    stop: float
    opening: tf.Tensor
    drift: tf.Tensor
    closing: tf.Tensor


class Integrator(abc.ABC):
    """A scheme: from the growth of a cosmology and the edges of the steps to their factors."""

    @abc.abstractmethod
    def steps(self, growth: GrowthFunctions, edges: Sequence[float]) -> list[Step]:
        """The steps between scale factors `edges`, which increase.

        The factors are differentiable by the parameters of the cosmology behind `growth`.
        """
