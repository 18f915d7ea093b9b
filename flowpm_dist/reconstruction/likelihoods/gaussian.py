"""A density with Gaussian noise."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.box import Box
from flowpm_dist.observables.universe_model import local_values
from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing, Likelihood, in_dtype_of


class Gaussian(Likelihood):
    """A density with independent Gaussian noise in each cell.

    Args:
        box: the box of the model's densities.
        data: block [x, y, z] of a density, mean 1, or one for each chain [..., x, y, z] where
            `error` is 0. Its values where nothing is observed must be finite and do not matter
            otherwise.
        sigma: standard deviation of the noise, a number or a block [x, y, z].
        observed: see `Likelihood`.
        error: the model's error, as a share of a cell's density. Its square times the data's is
            added to the variance, but not while residuals are smoothed: weights that follow the
            density would upset the balance of mass between neighbours.

    With a prior, the parameter "noise_amplitude" multiplies sigma.

    Raises:
        ValueError: data of several chains with an error of the model.
    """

    parameters = ("noise_amplitude",)

    def __init__(
        self,
        box: Box,
        data: tf.Tensor,
        sigma: Any,
        observed: tf.Tensor | None = None,
        error: float = 0.0,
    ) -> None:
        super().__init__(box, observed)
        data, error = in_unit("data", data), in_unit("error", error)
        self._data = tf.cast(data, box.dtype)
        variance = tf.square(in_dtype_of(box, sigma, "sigma"))
        of_model = tf.zeros_like(variance)
        if error:
            if self._data.shape.rank != 3:
                raise ValueError("an error of the model needs the same data for all chains")
            of_model = tf.square(in_dtype_of(box, error) * tf.maximum(self._data, 0))
        self._smooth, self._exact = (
            tf.sqrt(self.observed / x) for x in (variance, variance + of_model)
        )
        self._share = variance / (variance + of_model)  # of the noise in the variance

    def _scale(self, annealing: Annealing) -> tf.Tensor:
        return self._smooth if annealing.radius else self._exact

    @override
    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        return tf.square(self._scale(annealing))

    @override
    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        return (density - self._data) * self._scale(annealing)

    def parts(
        self, density: tf.Tensor, annealing: Annealing = EXACT, **parameters: tf.Tensor
    ) -> tf.Tensor:
        """Returns the parts; with a noise amplitude, with the logarithm of its determinant."""
        if "noise_amplitude" not in parameters:
            return super().parts(density, annealing)
        larger = tf.square(local_values(parameters["noise_amplitude"], self.box)) - 1
        ratio = 1 + larger * (1 if annealing.radius else self._share)  # of variances
        residual = self.residual(density, annealing) / tf.sqrt(ratio)
        logs = tf.where(self.observed > 0, tf.math.log(ratio), tf.zeros_like(density))
        return self.half_squares(residual, annealing) + 0.5 * self.sum(logs)
