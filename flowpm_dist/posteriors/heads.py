"""Posteriors of parameters with uniform priors, given features of data.

A head is a kind of conditional density q(t | x), see `HEADS`; a fitted head is a `Posterior`. Heads
work on z = Phi^-1((t - low) / (high - low)), with the normal distribution Phi. So the prior is a
unit normal in z, and no density in z has any probability outside the prior. A parameter that the
data say nothing about has the unit normal as its posterior.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.special import ndtr, ndtri

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.io.opening import not_finite
from flowpm_dist.options import in_unit, object_named
from flowpm_dist.posteriors.novelty import shift_and_scale
from flowpm_dist.posteriors.options import HEADS, HeadOptions
from flowpm_dist.posteriors.transforms import Regression, Transform

MAX_DEVIATION = 5.0
"""Features are clipped to so many standard deviations, so that an outlier does no harm."""
ROWS = 20_000
"""Number of samples that are drawn at once."""
EDGE = 1e-7
"""Smallest distance of a parameter from the edge of its prior, in its width: z = +-5.2."""

Data = tuple[np.ndarray, np.ndarray]
"""z [n, p] and features [n, features], float64."""
_DECAYS, _TINY = (0.9, 0.999), 1e-8
"""Adam's decay rates and epsilon (arXiv:1412.6980)."""

ALPHAS = np.logspace(-5, 2, 15)
"""Penalties of the regressions, per sample; chosen by leave-one-out cross-validation."""

Weights = list[tf.Tensor]


@dataclass(frozen=True)
class Summaries:
    """Features of n data sets, and their true parameters.

    Attributes:
        features: [n, features], kept as float64.
        truth: [n, p] [physical units], kept as float64.

    Raises:
        ValueError: if shapes disagree, there are no samples, or a value is not finite.
    """

    features: np.ndarray
    truth: np.ndarray

    def __post_init__(self) -> None:
        for name in ("features", "truth"):
            values = np.asarray(in_unit(name, getattr(self, name)), np.float64)
            object.__setattr__(self, name, values)
            if values.ndim != 2 or not len(values) or len(values) != len(self.truth):
                raise ValueError(f"{name} has shape {values.shape}; must be [n, numbers], n alike")
            if not np.isfinite(values).all():
                raise ValueError(f"{name} has values that are not finite")


@dataclass(frozen=True)
class Posterior:
    """A fitted head: the mean of its members' densities.

    Attributes:
        head: its name, one of `HEADS` or "package.module:object".
        priors: priors of the p parameters.
        hidden: width of the hidden layers.
        shift, scale: means and standard deviations of the features, [features].
        weights: weights of the transform, [member, ...] each.
        loss: the mean of -ln(q / prior) over the validation set.
        about: facts that are stored with the posterior; JSON can hold them.
    """

    head: str
    priors: UniformPriors
    hidden: int
    shift: np.ndarray
    scale: np.ndarray
    weights: tuple[np.ndarray, ...]
    loss: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def members(self) -> int:
        """The number of networks whose densities are averaged."""
        return len(self.weights[0])

    @functools.cached_property
    def _transform(self) -> Transform:
        return head_of(self.head)(len(self.shift), len(self.priors.names), self.hidden)

    @functools.cached_property
    def _constants(self) -> list[tf.Tensor]:
        return [tf.constant(weight) for weight in self.weights]

    def gain(self, parameters: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Returns ln(q(t | x) / prior(t)), float64 [n]: 0 where the data hold no information.

        Its mean over data sets is a lower bound of the information that the features hold about the
        parameters, in nats (Barber and Agakov 2003).

        Args:
            parameters: t, [n, p] [physical units].
            features: x, [n, features].

        Raises:
            ValueError: parameters outside their priors.
        """
        z = unbounded(self.priors, parameters)
        x = scaled(features, self.shift, self.scale)
        copies = (tf.constant(np.tile(array, (self.members, 1, 1))) for array in (z, x))
        each = log_density(self._transform, self._constants, *copies)
        return log_mean(each.numpy()) - _log_prior(z)

    def sample(self, features: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
        """Returns samples of the posterior of each data set, float64 [n, count, p].

        Args:
            features: [n, features].
            count: number of samples of each data set, which the members share.
            seed: seed of the samples.
        """
        count, seed = in_unit("count", count), in_unit("seed", seed)
        x, each = scaled(features, self.shift, self.scale), -(-count // self.members)
        together = max(1, ROWS // (each * self.members))
        rng, samples = np.random.default_rng(seed), []
        for first in range(0, len(x), together):
            rows = np.repeat(x[first : first + together], each, axis=0)
            noise = rng.standard_normal((self.members, len(rows), len(self.priors.names)))
            conditions = tf.tile(tf.constant(rows)[tf.newaxis], [self.members, 1, 1])
            z = self._transform.inverse(self._constants, tf.constant(noise), conditions).numpy()
            z = z.reshape(self.members, -1, each, z.shape[-1]).transpose(1, 2, 0, 3)
            samples.append(z.reshape(len(z), -1, z.shape[-1])[:, :count])
        return bounded(self.priors, np.concatenate(samples))

    def plot(
        self,
        features: np.ndarray,
        count: int = 4000,
        seed: int = 0,
        *,
        truth: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draws a corner plot of the posterior of one data set, and returns its axes [p, p].

        Args:
            features: the features of the data set, [features] or [1, features].
            count, seed: see `sample`.
            truth: the true parameters [p] [physical units], which lines mark.

        Raises:
            ValueError: truth is not a finite number for each parameter.
        """
        from flowpm_dist.posteriors.figures import corner_figure

        truth = in_unit("truth", truth)
        (samples,) = self.sample(np.atleast_2d(features), count, seed)
        axes = corner_figure(samples, self.priors, truth=truth, shown=True).axes
        return np.array(axes, object).reshape(len(self.priors.names), -1)

    def save(self, path: Path) -> None:
        """Writes the posterior to a .npz file of numbers and text. Raises WriteError."""
        text = {name: getattr(self, name) for name in _TEXT}
        text |= {"priors": {name: list(ends) for name, ends in self.priors.ranges.items()}}
        arrays: dict[str, Any] = {f"weight_{i}": weight for i, weight in enumerate(self.weights)}
        arrays |= {"shift": self.shift, "scale": self.scale, "text": np.array(json.dumps(text))}
        save_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> Posterior:
        """Reads what `save` wrote. Raises ValueError or KeyError for any other file."""
        held = read_arrays(path)
        if "text" not in held:
            raise ValueError(f"{path} holds no posterior")
        text = json.loads(str(held["text"]))
        count = sum(name.startswith("weight_") for name in held)
        weights = tuple(held[f"weight_{number}"] for number in range(count))
        shift, scale = held["shift"], held["scale"]
        ranges = {name: (low, high) for name, (low, high) in text.pop("priors").items()}
        return cls(priors=UniformPriors(ranges), shift=shift, scale=scale, weights=weights, **text)


_TEXT = ("head", "hidden", "loss", "about")


def unbounded(priors: UniformPriors, parameters: np.ndarray) -> np.ndarray:
    """Returns z, float64 [..., p], of parameters [..., p] [physical units].

    Raises:
        ValueError: a value is outside its prior by more than the rounding of float32.
    """
    values = np.asarray(in_unit("parameters", parameters), np.float64)
    low, high = priors.low, priors.high
    rounding = 1e-6 * np.maximum(np.abs(low), np.abs(high))
    outside = (values < low - rounding) | (values > high + rounding)
    if outside.any():
        place = int(np.argwhere(outside)[0][-1])
        name, worst = priors.names[place], values[outside][0]
        raise ValueError(
            f"{name} = {worst:g} is outside its prior, {low[place]:g} to {high[place]:g}"
        )
    return ndtri(np.clip((values - low) / (high - low), EDGE, 1 - EDGE))


def bounded(priors: UniformPriors, z: np.ndarray) -> np.ndarray:
    """Returns the parameters of z, float64 [..., p] [physical units]."""
    return priors.low + (priors.high - priors.low) * ndtr(z)


def _log_prior(z: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the prior of z, [n] of [n, p]."""
    return -0.5 * np.sum(z**2 + np.log(2 * np.pi), axis=1)


def scaled(features: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns features [n, features] in standard deviations, at most `MAX_DEVIATION` of them.

    Raises:
        ValueError: they have another shape, or values that are not finite.
    """
    values = np.asarray(in_unit("features", features), np.float64)
    if values.ndim != 2 or values.shape[1] != len(shift):
        raise ValueError(f"features have shape {values.shape}: must be [data sets, {len(shift)}]")
    if (place := not_finite(values)) is not None:
        row, column = place
        raise ValueError(f"feature {column} of data set {row} is {values[row, column]}")
    deviations = (values - shift) / scale
    return np.clip(deviations, -MAX_DEVIATION, MAX_DEVIATION)


def head_of(name: str) -> Callable[[int, int, int], Transform]:
    """Returns the head with a name of `HEADS`, or "package.module:object".

    Raises:
        ValueError: there is no such head.
    """
    head: Callable[[int, int, int], Transform] = object_named(name, HEADS, "head")
    return head


def fit_posterior(
    head: str,
    priors: UniformPriors,
    train: Summaries,
    validation: Summaries,
    options: HeadOptions | None = None,
) -> Posterior:
    """Returns a head fitted to a training set. Repeatable to the bit.

    Args:
        head: a name of `HEADS`, or "package.module:object" of a function
            (features, parameters, hidden) -> `Transform`.
        priors: uniform priors, from which the parameters of both sets were drawn.
        train: the set that the head is fitted to.
        validation: the set that epochs and the penalty are chosen on.
        options: options of the fit.

    Raises:
        ValueError: an unknown head, parameters outside their priors, or shapes that disagree.
        FloatingPointError: the likelihood is not finite.
    """
    options, build = options or HeadOptions(), head_of(head)
    shift, scale = shift_and_scale(train.features)
    data = [
        (unbounded(priors, split.truth), scaled(split.features, shift, scale))
        for split in (train, validation)
    ]
    transform = build(len(shift), len(priors.names), options.hidden)
    weights, loss = fitted(transform, data[0], data[1], options)
    loss += float(_log_prior(data[1][0]).mean())
    return Posterior(head, priors, options.hidden, shift, scale, tuple(weights), loss)


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
    held_out = [tf.constant(np.tile(a, (total, 1, 1))) for a in validation]
    epoch = _epoch(transform, train, held_out, first, penalty, options.learning_rate)
    numbers = tf.TensorSpec([], tf.float64), tf.TensorSpec([steps, total, size], tf.int64)
    epoch = epoch.get_concrete_function(first, moments, *numbers)
    weights, best, step = first, [w.copy() for w in start], tf.constant(0.0, tf.float64)
    logs = np.asarray(log_density(transform, first, *held_out))
    lowest, best_epoch = -logs.mean(axis=1), 0
    for number in range(1, options.epochs + 1):
        orders = np.stack([rng.permutation(count) for _ in range(total)])
        batches = orders[:, : steps * size].reshape(total, steps, size).transpose(1, 0, 2)
        each, weights, moments, step = epoch(weights, moments, step, tf.constant(batches))
        losses = -each.numpy().mean(axis=1)
        better = losses < lowest
        if better.any():
            lowest, best_epoch = np.where(better, losses, lowest), number
            logs = np.where(better[:, np.newaxis], each, logs)
            for lowest_weights, now in zip(best, weights, strict=True):
                lowest_weights[better] = now.numpy()[better]
        elif number - best_epoch >= options.patience:
            break
    if not np.isfinite(lowest).all():
        raise FloatingPointError("a head cannot be fitted: its likelihood is not finite")
    groups = logs.reshape(len(options.penalties), options.members, -1)
    scores = [-log_mean(group).mean() for group in groups]
    chosen = int(np.argmin(scores))
    members = slice(chosen * options.members, (chosen + 1) * options.members)
    return [w[members] for w in best], float(scores[chosen])


def log_mean(log_densities: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the mean density over the members, [n] of [member, n]."""
    return np.logaddexp.reduce(log_densities, axis=0) - np.log(len(log_densities))


def _epoch(
    transform: Transform,
    train: Data,
    held_out: Weights,
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
        inputs_of_train, held_out = (
            np.concatenate([x, z], axis=1)[:, :inputs] for z, x in (train, validation)
        )
        wanted, truth = (z[:, list(parameters)] for z, _ in (train, validation))
        ridge = RidgeCV(ALPHAS * len(inputs_of_train), alpha_per_target=True).fit(
            inputs_of_train, wanted
        )
        slopes = ridge.coef_.reshape(len(parameters), inputs).T
        offsets = np.reshape(ridge.intercept_, len(parameters))
        return slopes, offsets, truth - held_out @ slopes - offsets

    return regression
