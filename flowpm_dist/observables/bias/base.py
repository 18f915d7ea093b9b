"""The interface of a bias scheme."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.simulation.state import State


class Bias(abc.ABC):
    """The density of tracers, given the matter.

    Attributes:
        parameters: the names of the bias parameters; the first is the linear bias.
        needs_particles: whether the scheme weighs particles, which linear theory does not have.

    The values that methods take are float64 numbers, or one for each chain [chain].
    """

    parameters: ClassVar[tuple[str, ...]]
    needs_particles: ClassVar[bool] = False

    def weights(self, state: State, values: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
        """Returns the weights of the particles [..., x, y, z], or None where all are equal."""
        return None

    def contrast(self, contrast: tf.Tensor, values: Mapping[str, tf.Tensor], box: Box) -> tf.Tensor:
        """Returns the density contrast of tracers, from the contrast of the weighted particles.

        In redshift space the latter has the distortions by velocities in it. Tracers share those
        with matter, so linear bias belongs in `weights` there.
        """
        return contrast

    @abc.abstractmethod
    def linear_response(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns the tracers' density contrast over the matter's, in linear theory.

        Args:
            factor: the value of the first parameter.
        """
