"""Fits the weights of a head to features and parameters, by maximum likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.posteriors.options import HeadOptions
from flowpm_dist.posteriors.transforms import Regression, Transform

Data = tuple[np.ndarray, np.ndarray]
"""z [n, p] and features [n, features], float64."""
_DECAYS, _TINY = (0.9, 0.999), 1e-8
"""Adam's decay rates and epsilon (arXiv:1412.6980)."""

ALPHAS = np.logspace(-5, 2, 15)
"""Penalties of the regressions, per sample; chosen by leave-one-out cross-validation."""

Weights = list[tf.Tensor]


def log_density(transform: Transform, weights: Sequence[tf.Tensor], z: tf.Tensor, x: tf.Tensor):
    """Returns ln q(z | x) of each member, [member, n]; see `Transform.noise`."""
    noise, log_det = transform.noise(weights, z, x)
    normal = -0.5 * tf.reduce_sum(noise**2, -1) - 0.5 * transform.parameters * np.log(2 * np.pi)
    return normal + log_det


def fitted(
    transform: Transform, train: Data, validation: Data, options: HeadOptions
) -> tuple[list[np.ndarray], float]:
    """Returns the weights of the members, and their validation loss. Repeatable to the bit.

    Adam with decoupled weight decay (arXiv:1711.05101). Kernels decay to their initial values, so
    that a large penalty leaves the linear regression that the fit starts from. Each member keeps
    the epoch with its lowest validation loss. All members of all penalties are trained at the same
    time, which no optimiser of Keras does: each member has a decay and an end of its own.

    Args:
        transform: the transform whose weights are fitted.
        train: the set to fit to.
        validation: the set on which the members' epochs and the penalty are chosen.
        options: options of the fit.

    Returns:
        Weights [member, ...], and the mean of -ln q(z | x), q the mean of the members' densities.
    """
    rng = np.random.default_rng(options.seed)
    total = options.members * len(options.penalties)
    start = transform.initial(rng, total, _regression(train, validation))
    first = [tf.constant(w) for w in start]
    moments = [tf.zeros_like(w) for w in first] * 2
    penalty = tf.constant(np.repeat(options.penalties, options.members))
    count = len(train[0])
    size = min(options.batch, count)
    steps = count // size
    epoch = _epoch(transform, train, validation, first, penalty, options.learning_rate)
    numbers = tf.TensorSpec([], tf.float64), tf.TensorSpec([steps, total, size], tf.int64)
    epoch = epoch.get_concrete_function(first, moments, *numbers)
    weights, best, step = first, [w.copy() for w in start], tf.constant(0.0, tf.float64)
    copies = (np.tile(a, (total, 1, 1)) for a in validation)
    logs = np.asarray(log_density(transform, first, *map(tf.constant, copies)))
    lowest, best_epoch = -logs.mean(axis=1), 0
    for number in range(1, options.epochs + 1):
        orders = np.stack([rng.permutation(count) for _ in range(total)])
        batches = orders[:, : steps * size].reshape(total, steps, size).transpose(1, 0, 2)
        each, weights, moments, step = epoch(weights, moments, step, tf.constant(batches))
        found = -each.numpy().mean(axis=1)
        better = found < lowest
        if better.any():
            lowest, best_epoch = np.where(better, found, lowest), number
            logs = np.where(better[:, np.newaxis], each, logs)
            for kept, now in zip(best, weights, strict=True):
                kept[better] = now.numpy()[better]
        elif number - best_epoch >= options.patience:
            break
    if not np.isfinite(lowest).all():
        raise FloatingPointError("a head cannot be fitted: its likelihood is not finite")
    groups = logs.reshape(len(options.penalties), options.members, -1)
    scores = [-log_mean(group).mean() for group in groups]
    chosen = int(np.argmin(scores))
    own = slice(chosen * options.members, (chosen + 1) * options.members)
    return [w[own] for w in best], float(scores[chosen])


def log_mean(log_densities: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the mean density over the members, [n] of [member, n]."""
    return np.logaddexp.reduce(log_densities, axis=0) - np.log(len(log_densities))


def _epoch(
    transform: Transform,
    train: Data,
    validation: Data,
    start: Weights,
    penalty: tf.Tensor,
    rate: float,
) -> Any:
    """Returns a TensorFlow function that makes the steps of an epoch.

    The function takes weights, Adam's moments, the number of steps made so far, and the numbers of
    the samples of each step [step, member, sample]. It returns ln q of the validation set, and the
    first three arguments after the epoch.
    """
    z, x = map(tf.constant, train)
    members = penalty.shape[0]
    held_out = [tf.tile(tf.constant(a)[tf.newaxis], [members, 1, 1]) for a in validation]

    def updated(weights: Weights, moments: Weights, step: tf.Tensor, samples: tf.Tensor):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            each = log_density(transform, weights, tf.gather(z, samples), tf.gather(x, samples))
            loss = -tf.reduce_sum(tf.reduce_mean(each, axis=1))
        gradients = tape.gradient(loss, weights)
        first, second, new = [], [], []
        halves = moments[: len(weights)], moments[len(weights) :]
        for w, g, m, v, begun in zip(weights, gradients, *halves, start, strict=True):
            m = _DECAYS[0] * m + (1 - _DECAYS[0]) * g
            v = _DECAYS[1] * v + (1 - _DECAYS[1]) * g**2
            unbiased = [a / (1 - d ** (step + 1)) for a, d in zip((m, v), _DECAYS, strict=True)]
            is_kernel = w.shape.rank > 2
            decay = penalty[:, tf.newaxis, tf.newaxis] * (w - begun) if is_kernel else 0.0
            new.append(w - rate * (unbiased[0] / (tf.sqrt(unbiased[1]) + _TINY) + decay))
            first.append(m)
            second.append(v)
        return new, [*first, *second], step + 1

    @tf.function(jit_compile=True, autograph=False)
    def epoch(weights: Weights, moments: Weights, step: tf.Tensor, batches: tf.Tensor):
        def body(number, weights, moments, step):
            return (number + 1, *updated(weights, moments, step, batches[number]))

        _, weights, moments, step = tf.while_loop(
            lambda number, *_: number < batches.shape[0], body, [0, weights, moments, step]
        )
        return log_density(transform, weights, *held_out), weights, moments, step

    return epoch


def _regression(train: Data, validation: Data) -> Regression:
    """Returns ridge regressions fitted to the training set; residuals are on the validation set."""
    from sklearn.linear_model import RidgeCV  # a second to load, on the rank that fits alone

    def regression(
        inputs: int, parameters: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        given, held_out = (
            np.concatenate([x, z], axis=1)[:, :inputs] for z, x in (train, validation)
        )
        wanted, truth = (z[:, list(parameters)] for z, _ in (train, validation))
        ridge = RidgeCV(ALPHAS * len(given), alpha_per_target=True).fit(given, wanted)
        slopes = ridge.coef_.reshape(len(parameters), inputs).T
        offsets = np.reshape(ridge.intercept_, len(parameters))
        return slopes, offsets, truth - held_out @ slopes - offsets

    return regression
