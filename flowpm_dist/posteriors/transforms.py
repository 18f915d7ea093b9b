"""Invertible maps between unbounded parameters z and normal noise, given features x.

A map makes a conditional density: ln q(z | x) = ln N(noise) + ln |d noise / d z|. All arrays have a
first axis of members, which are networks that are trained at the same time. The splines
are monotonic and rational-quadratic (Gregory and Delbourgo 1982; arXiv:1906.04032).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.random import Generator
from typing_extensions import override

MAX_LOG_SCALE = 6.0
"""Limit of the logarithm of a scale."""
MIN_VARIANCE = 1e-4
"""Added to the variance of the residuals that a head starts from; the prior's variance is 1."""

REACH = 5.0
"""A spline changes values from -REACH to REACH and leaves all others unchanged."""
MIN_SHARE, MIN_SLOPE = 1e-3, 1e-3
"""Smallest width and height of a bin, divided by 2 REACH, and smallest slope at a knot."""

Weights = Sequence[tf.Tensor]
Pair = tuple[tf.Tensor, tf.Tensor]
Arrays = list[np.ndarray]

Knots = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Places of the knots, values there, and slopes there: [..., bin + 1] each."""

Regression = Callable[[int, Sequence[int]], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""(number of inputs, parameters) -> slopes [input, parameter], offsets [parameter] and residuals
[n, parameter] of a linear regression of these parameters on the first inputs. The inputs are the
features followed by the parameters.
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
    def initial(self, rng: Generator, members: int, regression: Regression) -> Arrays:
        """Returns the initial weights, [member, ...] each.

        Args:
            rng: draws the weights of the hidden layers.
            members: number of networks.
            regression: gives the linear predictions and the residuals that the networks start from.
        """

    @abstractmethod
    def noise(self, weights: Weights, z: tf.Tensor, x: tf.Tensor) -> Pair:
        """Returns the noise [member, n, p] and ln |d noise / d z| [member, n].

        Args:
            weights: as `initial` returns them.
            z: [member, n, p].
            x: [member, n, features].
        """

    @abstractmethod
    def inverse(self, weights: Weights, noise: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns z [member, n, p] from the noise: the inverse of `noise`."""


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

    @override
    def initial(self, rng: Generator, members: int, regression: Regression) -> Arrays:
        weights, p = _initial(self._masks, rng, members), self.parameters
        slopes, offsets, residuals = regression(self.features, range(p))
        covariance = residuals.T @ residuals / len(residuals) + MIN_VARIANCE * np.eye(p)
        if not len(self._below):
            covariance = np.diag(np.diag(covariance))
        factor = np.linalg.inv(np.linalg.cholesky(covariance))
        *_, bias, straight = weights
        straight[..., :p], bias[..., :p] = slopes, offsets
        bias[..., p : 2 * p] = _unlimited(np.log(np.diag(factor)))
        bias[..., 2 * p :] = factor[tuple(self._below.T)]
        return weights

    def _mean_and_factor(
        self, weights: Weights, x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the mean [.., p], ln of the diagonal of A [.., p], and A [.., p, p]."""
        p = self.parameters
        numbers = _perceptron(weights, x, self._masks)
        mean, log_diagonal, rest = tf.split(numbers, [p, p, len(self._below)], axis=-1)
        log_diagonal = _limited(log_diagonal)
        places = np.zeros([len(self._below), p, p])
        places[np.arange(len(self._below)), self._below[:, 0], self._below[:, 1]] = 1.0
        factor = tf.linalg.diag(tf.exp(log_diagonal))
        if len(self._below):
            factor += tf.tensordot(rest, tf.constant(places, rest.dtype), 1)
        return mean, log_diagonal, factor

    @override
    def noise(self, weights: Weights, z: tf.Tensor, x: tf.Tensor) -> Pair:
        mean, log_diagonal, factor = self._mean_and_factor(weights, x)
        noise = tf.reduce_sum(factor * (z - mean)[..., tf.newaxis, :], axis=-1)
        return noise, tf.reduce_sum(log_diagonal, axis=-1)

    @override
    def inverse(self, weights: Weights, noise: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        mean, _, factor = self._mean_and_factor(weights, x)
        solved = tf.linalg.triangular_solve(factor, noise[..., tf.newaxis], lower=True)
        return mean + solved[..., 0]


def independent_gaussian(features: int, parameters: int, hidden: int) -> Gaussian:
    """Returns a `Gaussian` without correlations between parameters."""
    return Gaussian(features, parameters, hidden, full=False)


class SplineFlow(Transform):
    """A masked autoregressive flow of rational-quadratic splines.

    Each layer shifts, scales and bends each parameter by a monotonic spline. The settings of the
    spline are functions of the features and of the parameters before it. The next layer has the
    opposite order (Papamakarios and others, arXiv:1705.07057; Durkan and others, arXiv:1906.04032).

    Args:
        features, parameters, hidden: see `Transform`.
        layers: number of layers.
        bins: number of bins of a spline.
    """

    def __init__(self, features: int, parameters: int, hidden: int, *, bins: int = 8) -> None:
        super().__init__(features, parameters, hidden)
        self._bins, self._each = bins, 2 + 3 * bins - 1
        forward = list(range(1, parameters + 1))
        self._orders = [forward, forward[::-1]]
        self._masks = [
            _masks([0] * features + order, np.repeat(order, self._each), hidden, parameters)
            for order in self._orders
        ]

    def initial(self, rng: Generator, members: int, regression: Regression) -> Arrays:
        """Returns initial weights: the first layer is linear, the others are the identity."""
        layers = [_initial(masks, rng, members) for masks in self._masks]
        *_, bias, straight = layers[0]
        for place in range(self.parameters):
            known, first = self.features + place, place * self._each
            slopes, offsets, residuals = regression(known, [place])
            straight[:, :known, first], bias[:, first] = slopes[:, 0], offsets[0]
            variance = np.mean(residuals**2) + MIN_VARIANCE
            bias[:, first + 1] = _unlimited(-0.5 * np.log(variance))
        return [weight for layer in layers for weight in layer]

    def _settings(
        self, layer: int, weights: Weights, z: tf.Tensor, x: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Knots]:
        """Returns a layer's shift [.., p], ln(scale) [.., p] and knots of its splines."""
        masks = self._masks[layer]
        of_layer = weights[layer * len(masks) : (layer + 1) * len(masks)]
        settings = _perceptron(of_layer, tf.concat([x, z], axis=-1), masks)
        settings = tf.reshape(settings, tf.concat([tf.shape(z), [self._each]], axis=0))
        knots = parameters_of_spline(settings[..., 2:], self._bins)
        return settings[..., 0], _limited(settings[..., 1]), knots

    @override
    def noise(self, weights: Weights, z: tf.Tensor, x: tf.Tensor) -> Pair:
        total = tf.zeros_like(z[..., 0])
        for layer in range(len(self._orders)):
            shift, log_scale, knots = self._settings(layer, weights, z, x)
            z, log_slope = spline((z - shift) * tf.exp(log_scale), knots)
            total += tf.reduce_sum(log_scale + log_slope, axis=-1)
        return z, total

    def inverse(self, weights: Weights, noise: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns the parameters of noise; each follows from the parameters before it."""
        for layer in reversed(range(len(self._orders))):
            z = tf.zeros_like(noise)
            for place in range(1, self.parameters + 1):
                shift, log_scale, knots = self._settings(layer, weights, z, x)
                values = inverse_spline(noise, knots) * tf.exp(-log_scale) + shift
                here = tf.constant([order == place for order in self._orders[layer]])
                z = tf.where(here, values, z)
            noise = z
        return noise


def _unlimited(logarithm: np.ndarray) -> np.ndarray:
    return MAX_LOG_SCALE * np.arctanh(np.clip(logarithm / MAX_LOG_SCALE, -0.99, 0.99))


def _limited(logarithm: tf.Tensor) -> tf.Tensor:
    return MAX_LOG_SCALE * tf.tanh(logarithm / MAX_LOG_SCALE)


def _masks(
    inputs: Sequence[int], outputs: Sequence[int] | np.ndarray, hidden: int, parameters: int
) -> list[np.ndarray]:
    """Returns which weights of a perceptron with two hidden layers are not 0 (arXiv:1502.03509).

    Args:
        inputs: degree of each input: 0 for a feature, its place in the order for a parameter.
        outputs: degree of each output, the place of its parameter in the order; an output depends
            on inputs of lower degree.
        hidden: width of the hidden layers.
        parameters: number of parameters.

    Returns:
        Masks of the kernels and biases of the three layers, and of the kernel that leads from the
        inputs directly to the outputs.
    """
    degrees, wanted = np.asarray(inputs), np.asarray(outputs)
    middle = np.arange(hidden) % parameters
    first = degrees[:, np.newaxis] <= middle
    second = middle[:, np.newaxis] <= middle
    last = middle[:, np.newaxis] < wanted
    straight = degrees[:, np.newaxis] < wanted
    masks = [first, np.ones(hidden), second, np.ones(hidden), last, np.ones(len(wanted)), straight]
    return [mask.astype(np.float64) for mask in masks]


def _initial(masks: Arrays, rng: Generator, members: int) -> Arrays:
    """Returns initial weights: outputs are 0, hidden units have the variance of their inputs."""
    weights = []
    for number, mask in enumerate(masks):
        weight = np.zeros((members, *mask.shape))
        if number in (0, 2):
            weight = rng.standard_normal(weight.shape) / np.sqrt(np.maximum(mask.sum(axis=0), 1))
        weights.append(weight)
    return weights


def _perceptron(weights: Weights, inputs: tf.Tensor, masks: Arrays) -> tf.Tensor:
    """Returns the outputs [member, n, outputs] of inputs [member, n, inputs]."""
    kernels = [w * tf.constant(mask, w.dtype) for w, mask in zip(weights, masks, strict=True)]
    first, first_bias, second, second_bias, last, last_bias, straight = kernels
    hidden = tf.nn.silu(inputs @ first + first_bias[:, tf.newaxis])
    hidden = tf.nn.silu(hidden @ second + second_bias[:, tf.newaxis])
    return hidden @ last + inputs @ straight + last_bias[:, tf.newaxis]


def parameters_of_spline(raw: tf.Tensor, bins: int) -> Knots:
    """Returns the knots for any numbers [..., 3 bins - 1]; zeros give the identity."""
    widths, heights, slopes = tf.split(raw, [bins, bins, bins - 1], axis=-1)
    one = tf.constant(np.log(np.expm1(1 - MIN_SLOPE)), raw.dtype)  # a slope of 1 at 0
    inner = MIN_SLOPE + tf.nn.softplus(slopes + one)
    end = tf.ones_like(raw[..., :1])
    return _ends(widths, bins), _ends(heights, bins), tf.concat([end, inner, end], axis=-1)


def _ends(raw: tf.Tensor, bins: int) -> tf.Tensor:
    shares = MIN_SHARE + (1 - MIN_SHARE * bins) * tf.nn.softmax(raw)
    inner = 2 * REACH * tf.cumsum(shares, axis=-1)[..., :-1] - REACH
    end = REACH * tf.ones_like(raw[..., :1])
    return tf.concat([-end, inner, end], axis=-1)


def _bin_of(values: tf.Tensor, ends: tf.Tensor, knots: Knots) -> list[tf.Tensor]:
    """Returns left, width, lower end, height and both slopes of the bin that holds each value."""
    number = tf.reduce_sum(tf.cast(values[..., tf.newaxis] >= ends[..., 1:-1], tf.int32), axis=-1)
    here = tf.one_hot(number, ends.shape[-1] - 1, dtype=values.dtype)

    def at(numbers: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(here * numbers, axis=-1)

    x, y, slopes = knots
    left, lower = at(x[..., :-1]), at(y[..., :-1])
    width, height = at(x[..., 1:]) - left, at(y[..., 1:]) - lower
    return [left, width, lower, height, at(slopes[..., :-1]), at(slopes[..., 1:])]


def spline(values: tf.Tensor, knots: Knots) -> Pair:
    """Returns the spline of values [...], and the logarithm of its slope [...]."""
    inside = tf.abs(values) < REACH
    inner = tf.clip_by_value(values, -REACH, REACH)
    left, width, lower, height, begin, end = _bin_of(inner, knots[0], knots)
    mean = height / width
    share = (inner - left) / width
    both = share * (1 - share)
    below = mean + (begin + end - 2 * mean) * both
    mapped = lower + height * (mean * share**2 + begin * both) / below
    above = end * share**2 + 2 * mean * both + begin * (1 - share) ** 2
    log_slope = 2 * tf.math.log(mean) + tf.math.log(above) - 2 * tf.math.log(below)
    return tf.where(inside, mapped, values), tf.where(inside, log_slope, tf.zeros_like(values))


def inverse_spline(values: tf.Tensor, knots: Knots) -> tf.Tensor:
    """Returns the arguments at which the spline has the values [...]."""
    inside = tf.abs(values) < REACH
    inner = tf.clip_by_value(values, -REACH, REACH)
    left, width, lower, height, begin, end = _bin_of(inner, knots[1], knots)
    mean = height / width
    offset = inner - lower
    bend = offset * (begin + end - 2 * mean)
    a, b, c = height * (mean - begin) + bend, height * begin - bend, -mean * offset
    root = tf.sqrt(tf.maximum(b**2 - 4 * a * c, 0.0))
    share = 2 * c / (-b - root)
    return tf.where(inside, left + share * width, values)
