"""Invertible maps between parameters z on the whole line and normal noise, given features.

A map makes a conditional density: ln q(z | x) = ln N(noise) + ln |d noise / d z|. All arrays have a
first axis of members, networks that are trained side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.posteriors.spline import (
    inverse_spline,
    parameters_of_spline,
    spline,
    spline_parameters,
)

STRONGEST = 6.0
"""Limit of the logarithm of a scale."""
LEAST_VARIANCE = 1e-4
"""Of residuals that heads begin with; the prior's variance is 1."""

Regression = Callable[[int, Sequence[int]], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""(number of inputs, parameters) -> slopes [input, parameter], offsets [parameter] and residuals
[n, parameter] of a linear regression of those parameters on the first of features and parameters.
"""


class Transform(ABC):
    """A map between z and noise.

    Args:
        features: number of features x.
        parameters: number of parameters z.
        hidden: width of the hidden layers.
    """

    def __init__(self, features: int, parameters: int, hidden: int) -> None:
        self.features, self.parameters, self.hidden = features, parameters, hidden

    @abstractmethod
    def initial(
        self, rng: np.random.Generator, members: int, regression: Regression
    ) -> list[np.ndarray]:
        """Returns the weights to begin with, [member, ...] each.

        Args:
            rng: of the hidden layers.
            members: number of networks.
            regression: with whose linear predictions and residuals they begin.
        """

    @abstractmethod
    def noise(
        self, weights: Sequence[tf.Tensor], z: tf.Tensor, x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the noise [member, n, p] and ln |d noise / d z| [member, n].

        Args:
            weights: as `initial` gives them.
            z: [member, n, p].
            x: [member, n, features].
        """

    @abstractmethod
    def line(self, weights: Sequence[tf.Tensor], noise: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns z [member, n, p] of the noise; inverts `noise`."""


class Gaussian(Transform):
    """A Gaussian whose mean and covariance are functions of the features.

    noise = A (z - mean) with A lower triangular: the Cholesky factor of the inverse covariance.

    Args:
        features, parameters, hidden: see `Transform`.
        full: whether parameters are correlated; otherwise A is diagonal.
    """

    def __init__(self, features: int, parameters: int, hidden: int, *, full: bool = True) -> None:
        super().__init__(features, parameters, hidden)
        below = np.tril_indices(parameters, -1) if full else (np.empty(0, int), np.empty(0, int))
        self._below = np.stack(below, axis=1)
        outputs = 2 * parameters + len(self._below)
        self._masks = _masks([0] * features, [1] * outputs, hidden, 1)

    def initial(
        self, rng: np.random.Generator, members: int, regression: Regression
    ) -> list[np.ndarray]:
        """See `Transform.initial`."""
        weights, p = _initial(self._masks, rng, members), self.parameters
        slopes, offsets, residuals = regression(self.features, range(p))
        covariance = residuals.T @ residuals / len(residuals) + LEAST_VARIANCE * np.eye(p)
        if not len(self._below):
            covariance = np.diag(np.diag(covariance))
        factor = np.linalg.inv(np.linalg.cholesky(covariance))
        *_, bias, straight = weights
        straight[..., :p], bias[..., :p] = slopes, offsets
        bias[..., p : 2 * p] = _unkept(np.log(np.diag(factor)))
        bias[..., 2 * p :] = factor[tuple(self._below.T)]
        return weights

    def _mean_and_factor(
        self, weights: Sequence[tf.Tensor], x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the mean [.., p], ln of the diagonal of A [.., p], and A [.., p, p]."""
        p = self.parameters
        found = _perceptron(weights, x, self._masks)
        mean, log_diagonal, rest = found[..., :p], _kept(found[..., p : 2 * p]), found[..., 2 * p :]
        places = np.zeros([len(self._below), p, p])
        places[np.arange(len(self._below)), self._below[:, 0], self._below[:, 1]] = 1.0
        factor = tf.linalg.diag(tf.exp(log_diagonal))
        if len(self._below):
            factor += tf.tensordot(rest, tf.constant(places, rest.dtype), 1)
        return mean, log_diagonal, factor

    def noise(
        self, weights: Sequence[tf.Tensor], z: tf.Tensor, x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Transform.noise`."""
        mean, log_diagonal, factor = self._mean_and_factor(weights, x)
        noise = tf.reduce_sum(factor * (z - mean)[..., tf.newaxis, :], axis=-1)
        return noise, tf.reduce_sum(log_diagonal, axis=-1)

    def line(self, weights: Sequence[tf.Tensor], noise: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """See `Transform.line`."""
        mean, _, factor = self._mean_and_factor(weights, x)
        solved = tf.linalg.triangular_solve(factor, noise[..., tf.newaxis], lower=True)
        return mean + solved[..., 0]


def independent_gaussian(features: int, parameters: int, hidden: int) -> Gaussian:
    """Returns a `Gaussian` for each parameter by itself."""
    return Gaussian(features, parameters, hidden, full=False)


class SplineFlow(Transform):
    """A masked autoregressive flow of rational-quadratic splines.

    Each layer shifts, scales and bends each parameter by a monotonic spline, whose settings are
    functions of the features and of the parameters before it; the next layer has the opposite order
    (Papamakarios and others, arXiv:1705.07057; Durkan and others, arXiv:1906.04032).

    Args:
        features, parameters, hidden: see `Transform`.
        layers: number of them.
        bins: of a spline.
    """

    def __init__(
        self, features: int, parameters: int, hidden: int, *, layers: int = 2, bins: int = 8
    ) -> None:
        super().__init__(features, parameters, hidden)
        self._bins, self._each = bins, 2 + spline_parameters(bins)
        forward = list(range(1, parameters + 1))
        self._orders = [forward if n % 2 == 0 else forward[::-1] for n in range(layers)]
        self._masks = [
            _masks([0] * features + order, np.repeat(order, self._each), hidden, parameters)
            for order in self._orders
        ]

    def initial(
        self, rng: np.random.Generator, members: int, regression: Regression
    ) -> list[np.ndarray]:
        """See `Transform.initial`. The first layer is linear, those after it the identity."""
        layers = [_initial(masks, rng, members) for masks in self._masks]
        *_, bias, straight = layers[0]
        for place in range(self.parameters):
            known, first = self.features + place, place * self._each
            slopes, offsets, residuals = regression(known, [place])
            straight[:, :known, first], bias[:, first] = slopes[:, 0], offsets[0]
            variance = np.mean(residuals**2) + LEAST_VARIANCE
            bias[:, first + 1] = _unkept(-0.5 * np.log(variance))
        return [weight for layer in layers for weight in layer]

    def _settings(
        self, layer: int, weights: Sequence[tf.Tensor], z: tf.Tensor, x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...]]:
        """Returns shift and ln(scale) [.., p], and the settings of splines, of a layer."""
        masks = self._masks[layer]
        own = weights[layer * len(masks) : (layer + 1) * len(masks)]
        found = _perceptron(own, tf.concat([x, z], axis=-1), masks)
        shape = tf.concat([tf.shape(z), [self._each]], axis=0)
        found = tf.reshape(found, shape)
        return found[..., 0], _kept(found[..., 1]), parameters_of_spline(found[..., 2:], self._bins)

    def noise(
        self, weights: Sequence[tf.Tensor], z: tf.Tensor, x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Transform.noise`."""
        total = tf.zeros_like(z[..., 0])
        for layer in range(len(self._orders)):
            shift, log_scale, knots = self._settings(layer, weights, z, x)
            z, log_slope = spline((z - shift) * tf.exp(log_scale), knots)
            total += tf.reduce_sum(log_scale + log_slope, axis=-1)
        return z, total

    def line(self, weights: Sequence[tf.Tensor], noise: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """See `Transform.line`; parameters follow from those before them, one after the other."""
        for layer in reversed(range(len(self._orders))):
            z = tf.zeros_like(noise)
            for place in range(1, self.parameters + 1):
                shift, log_scale, knots = self._settings(layer, weights, z, x)
                found = inverse_spline(noise, knots) * tf.exp(-log_scale) + shift
                here = tf.constant([order == place for order in self._orders[layer]])
                z = tf.where(here, found, z)
            noise = z
        return noise


def _unkept(logarithm: np.ndarray) -> np.ndarray:
    return STRONGEST * np.arctanh(np.clip(logarithm / STRONGEST, -0.99, 0.99))


def _kept(logarithm: tf.Tensor) -> tf.Tensor:
    return STRONGEST * tf.tanh(logarithm / STRONGEST)


def _masks(
    inputs: Sequence[int], outputs: Sequence[int] | np.ndarray, hidden: int, parameters: int
) -> list[np.ndarray]:
    """Returns which weights of a perceptron of two hidden layers there are (arXiv:1502.03509).

    Args:
        inputs: degree of each input: 0 of features, the place in the order of parameters.
        outputs: place in the order of the parameter that an output is about; it depends on inputs
            of lower degree.
        hidden: width of the hidden layers.
        parameters: number of them.

    Returns:
        Masks of the first kernel and bias, the second, the last, and of the kernel that leads from
        the inputs straight to the outputs.
    """
    given, wanted = np.asarray(inputs), np.asarray(outputs)
    middle = np.arange(hidden) % parameters
    first = given[:, np.newaxis] <= middle
    second = middle[:, np.newaxis] <= middle
    last = middle[:, np.newaxis] < wanted
    straight = given[:, np.newaxis] < wanted
    masks = [first, np.ones(hidden), second, np.ones(hidden), last, np.ones(len(wanted)), straight]
    return [mask.astype(np.float64) for mask in masks]


def _initial(
    masks: Sequence[np.ndarray], rng: np.random.Generator, members: int
) -> list[np.ndarray]:
    """Returns weights of a perceptron: the outputs are 0, hidden units keep the variance."""
    weights = []
    for number, mask in enumerate(masks):
        weight = np.zeros((members, *mask.shape))
        if number in (0, 2):
            weight = rng.standard_normal(weight.shape) / np.sqrt(np.maximum(mask.sum(axis=0), 1))
        weights.append(weight)
    return weights


def _perceptron(
    weights: Sequence[tf.Tensor], inputs: tf.Tensor, masks: Sequence[np.ndarray]
) -> tf.Tensor:
    """Returns the outputs [member, n, outputs] of inputs [member, n, inputs]."""
    kernels = [w * tf.constant(mask, w.dtype) for w, mask in zip(weights, masks, strict=True)]
    first, first_bias, second, second_bias, last, last_bias, straight = kernels
    hidden = tf.nn.silu(inputs @ first + first_bias[:, tf.newaxis])
    hidden = tf.nn.silu(hidden @ second + second_bias[:, tf.newaxis])
    return hidden @ last + inputs @ straight + last_bias[:, tf.newaxis]
