"""A density with Gaussian noise."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing, Likelihood, in_dtype_of


class Gaussian(Likelihood):
    """A density with independent Gaussian noise in each cell.

    Args:
        box: of the model's densities.
        data: block [x, y, z] of a density, mean 1. Its values where nothing is observed must be
            finite and do not matter otherwise.
        sigma: standard deviation of the noise, a number or a block [x, y, z].
        observed: see `Likelihood`.
        error: of the model, as a share of a cell's density. Its square times that of the data is
            added to the variance, but not while residuals are smoothed: weights that follow the
            density would upset the balance of mass between neighbours.
    """

    def __init__(
        self,
        box: Box,
        data: tf.Tensor,
        sigma: Any,
        observed: tf.Tensor | None = None,
        error: float = 0.0,
    ) -> None:
        super().__init__(box, observed)
        self._data = tf.cast(data, box.dtype)
        variance = tf.square(in_dtype_of(box, sigma))
        of_model = tf.square(in_dtype_of(box, error) * tf.maximum(self._data, 0))
        self._smooth, self._exact = (
            tf.sqrt(self.observed / x) for x in (variance, variance + of_model)
        )

    def _scale(self, annealing: Annealing) -> tf.Tensor:
        return self._smooth if annealing.radius else self._exact

    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`."""
        return tf.square(self._scale(annealing))

    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`."""
        return (density - self._data) * self._scale(annealing)
