"""Posteriors of parameters with uniform priors, given features of data.

A head is a kind of conditional density q(t | x), see `HEADS`; a fitted head is a `Posterior`. Heads
work on z = Phi^-1((t - low) / (high - low)), with the normal distribution Phi: the prior is a unit
normal in z, no density in z has any probability outside the prior, and a parameter that the data
say nothing about has the unit normal as its posterior.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.special import ndtr, ndtri

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.options import object_named
from flowpm_dist.posteriors.fitting import fitted, log_density, log_mean
from flowpm_dist.posteriors.options import HEADS, HeadOptions
from flowpm_dist.posteriors.transforms import Transform

MAX_DEVIATION = 5.0
"""Features are clipped to so many standard deviations, so that an outlier does no harm."""
ROWS = 20_000
"""Number of samples that are drawn at once."""
EDGE = 1e-7
"""Smallest distance of a parameter from the edge of its prior, in its width: z = +-5.2."""


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
            values = np.asarray(getattr(self, name), np.float64)
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
        x = _scaled(features, self.shift, self.scale)
        copies = (tf.constant(np.tile(array, (self.members, 1, 1))) for array in (z, x))
        each = log_density(self._transform, self._constants, *copies)
        normal = -0.5 * np.sum(z**2 + np.log(2 * np.pi), axis=1)
        return log_mean(each.numpy()) - normal

    def sample(self, features: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
        """Returns samples of the posterior of each data set, float64 [n, count, p].

        Args:
            features: [n, features].
            count: number of samples of each data set, which the members share.
            seed: seed of the samples.
        """
        x, each = _scaled(features, self.shift, self.scale), -(-count // self.members)
        together = max(1, ROWS // (each * self.members))
        rng, found = np.random.default_rng(seed), []
        for first in range(0, len(x), together):
            rows = np.repeat(x[first : first + together], each, axis=0)
            noise = rng.standard_normal((self.members, len(rows), len(self.priors.names)))
            given = tf.tile(tf.constant(rows)[tf.newaxis], [self.members, 1, 1])
            z = self._transform.inverse(self._constants, tf.constant(noise), given).numpy()
            z = z.reshape(self.members, -1, each, z.shape[-1]).transpose(1, 2, 0, 3)
            found.append(z.reshape(len(z), -1, z.shape[-1])[:, :count])
        return bounded(self.priors, np.concatenate(found))

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
    values, low, high = np.asarray(parameters, np.float64), priors.low, priors.high
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


def _scaled(features: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    scaled = (np.asarray(features, np.float64) - shift) / scale
    return np.clip(scaled, -MAX_DEVIATION, MAX_DEVIATION)


def head_of(name: str) -> Callable[[int, int, int], Transform]:
    """Returns the head with a name of `HEADS`, or "package.module:object".

    Raises:
        ValueError: there is no such head.
    """
    found: Callable[[int, int, int], Transform] = object_named(name, HEADS, "head")
    return found


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
    shift, spread = train.features.mean(axis=0), train.features.std(axis=0)
    scale = np.where(spread > 1e-9 * np.abs(shift), spread, 1.0)
    data = [
        (unbounded(priors, given.truth), _scaled(given.features, shift, scale))
        for given in (train, validation)
    ]
    transform = build(len(shift), len(priors.names), options.hidden)
    weights, loss = fitted(transform, data[0], data[1], options)
    normal = -0.5 * np.sum(data[1][0] ** 2 + np.log(2 * np.pi), axis=1)
    return Posterior(
        head, priors, options.hidden, shift, scale, tuple(weights), loss + float(normal.mean())
    )
