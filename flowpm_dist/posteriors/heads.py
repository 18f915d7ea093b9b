"""Posteriors of parameters with uniform priors, given features of data.

A head is a kind of conditional density q(t | x), see `HEADS`; a fitted one is a `Posterior`.
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

from flowpm_dist.cosmology.uniform_priors import UniformPriors
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.options import checked_name, python_object
from flowpm_dist.posteriors.fitting import fitted, log_density, log_mean
from flowpm_dist.posteriors.mapping import PriorMap
from flowpm_dist.posteriors.options import HEADS, HeadOptions
from flowpm_dist.posteriors.transforms import Transform

FARTHEST = 5.0
"""Features are kept within so many standard deviations: an outlier must not lead far off."""
ROWS = 20_000
"""Samples that are drawn at once."""


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
    """A head that was fitted: the mean of its members' densities.

    Attributes:
        head: its name, one of `HEADS` or "package.module:object".
        priors: of the p parameters.
        hidden: width of its hidden layers.
        shift, scale: of the features, [features].
        weights: of its transform, [member, ...] each.
        loss: the mean of -ln(q / prior) over the validation set.
        about: what is kept with it, as JSON takes it.
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
        """Number of networks whose densities are averaged."""
        return len(self.weights[0])

    @functools.cached_property
    def _transform(self) -> Transform:
        return head_of(self.head)(len(self.shift), len(self.priors.names), self.hidden)

    @functools.cached_property
    def _constants(self) -> list[tf.Tensor]:
        return [tf.constant(weight) for weight in self.weights]

    def gain(self, parameters: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Returns ln(q(t | x) / prior(t)), float64 [n]: 0 where the data have told nothing.

        Its mean over data sets is a lower bound of the information that features have on the
        parameters, in natural units (Barber and Agakov 2003).

        Args:
            parameters: t, [n, p] [physical units].
            features: x, [n, features].

        Raises:
            ValueError: parameters outside their priors.
        """
        z = PriorMap(self.priors).to_line(parameters)
        each = log_density(
            self._transform, self._constants, *self._copies(z, self._scaled(features))
        )
        normal = -0.5 * np.sum(z**2 + np.log(2 * np.pi), axis=1)
        return log_mean(each.numpy()) - normal

    def log_probability(self, parameters: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Returns ln q(t | x) in the parameters' own units, float64 [n]; see `gain`."""
        volume = np.log(self.priors.high - self.priors.low).sum()
        return self.gain(parameters, features) - volume

    def sample(self, features: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
        """Returns samples of the posterior of each data set, float64 [n, count, p].

        Args:
            features: [n, features].
            count: of samples, shared by the members in turn.
            seed: of the samples.
        """
        x, each = self._scaled(features), -(-count // self.members)
        together = max(1, ROWS // (each * self.members))
        rng, found = np.random.default_rng(seed), []
        for first in range(0, len(x), together):
            rows = np.repeat(x[first : first + together], each, axis=0)
            noise = rng.standard_normal((self.members, len(rows), len(self.priors.names)))
            given = tf.tile(tf.constant(rows)[tf.newaxis], [self.members, 1, 1])
            z = self._transform.line(self._constants, tf.constant(noise), given).numpy()
            z = z.reshape(self.members, -1, each, z.shape[-1]).transpose(1, 2, 0, 3)
            found.append(z.reshape(len(z), -1, z.shape[-1])[:, :count])
        return PriorMap(self.priors).from_line(np.concatenate(found))

    def _scaled(self, features: np.ndarray) -> np.ndarray:
        return _scaled(features, self.shift, self.scale)

    def _copies(self, *arrays: np.ndarray) -> list[tf.Tensor]:
        return [tf.constant(np.tile(array, (self.members, 1, 1))) for array in arrays]

    def save(self, path: Path) -> None:
        """Writes it to a .npz file, of numbers and text alone. Raises WriteError."""
        text = {name: getattr(self, name) for name in _TEXT}
        text |= {"priors": {name: list(ends) for name, ends in self.priors.ranges.items()}}
        arrays: dict[str, Any] = {f"weight_{i}": weight for i, weight in enumerate(self.weights)}
        arrays |= {"shift": self.shift, "scale": self.scale, "text": np.array(json.dumps(text))}
        save_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> Posterior:
        """Reads what `save` wrote. Raises ValueError or KeyError for a file that is not such."""
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


def _scaled(features: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    scaled = (np.asarray(features, np.float64) - shift) / scale
    return np.clip(scaled, -FARTHEST, FARTHEST)


def head_of(name: str) -> Callable[[int, int, int], Transform]:
    """Returns the head of a name of `HEADS`, or of "package.module:object".

    Raises:
        ValueError: there is none.
    """
    found: Callable[[int, int, int], Transform] = python_object(
        HEADS.get(checked_name(name, HEADS, "head"), name)
    )
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
        priors: uniform ones, from which the parameters of both sets were drawn.
        train: to fit to.
        validation: to choose settings on.
        options: of the fit.

    Raises:
        ValueError: an unknown head, parameters outside their priors, or shapes that disagree.
        FloatingPointError: the likelihood is not finite.
    """
    options, build = options or HeadOptions(), head_of(head)
    shift, spread = train.features.mean(axis=0), train.features.std(axis=0)
    scale = np.where(spread > 1e-9 * np.abs(shift), spread, 1.0)
    line = PriorMap(priors)
    data = [
        (line.to_line(given.truth), _scaled(given.features, shift, scale))
        for given in (train, validation)
    ]
    transform = build(len(shift), len(priors.names), options.hidden)
    weights, loss = fitted(transform, data[0], data[1], options)
    normal = -0.5 * np.sum(data[1][0] ** 2 + np.log(2 * np.pi), axis=1)
    return Posterior(
        head, priors, options.hidden, shift, scale, tuple(weights), loss + float(normal.mean())
    )
