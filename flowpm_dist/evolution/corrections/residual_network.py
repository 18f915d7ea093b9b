"""A residual network of convolutions that moves the particles of a state.

A network takes the displacement field of a cheap run on the particles' lattice and gives what is
missing. The idea comes from NECOLA (Kaushal and others 2022, arXiv:2111.02441) and from Jamieson
and others (2024, arXiv:2408.07699). Style parameters scale and shift each layer (Perez and others
2018, arXiv:1709.07871). Here they are the three numbers of `features`. What is missing is
multiplied by the square of the first, so that it vanishes at early times.

The kernels of the first convolution sum to 0: only differences of displacements enter, not a flow
of all particles together. The velocity that is added is the time derivative of the displacement
that is added, and one more convolution of the derivative of the last hidden layer, for motions
inside of halos. Value and derivative go through the layers together, as a batch of two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from typing_extensions import override

from flowpm_dist.evolution.corrections.base import StateCorrection, force_cell
from flowpm_dist.evolution.corrections.features import FEATURES, features_and_rates

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.power import LinearPower
    from flowpm_dist.grid.box import Box

CHANNELS, HIDDEN = 8, 3
"""Channels of each layer, and convolutions between the first and the last one."""
HIDDEN_SCALE, SCALES = 0.5, {"first": 1.0, "last": 0.0, "style": 0.3, "velocity": 0.0}
"""Scales of the first weights, over those that keep the variance."""


@dataclass(frozen=True, eq=False)
class ResidualNetwork(StateCorrection):
    """Five convolutions of 3^3 cells and 8 channels, periodic, with smooth activations.

    Attributes:
        theta: kernels of the convolutions in order, then what makes of the style the scales and
            shifts of each layer, then the kernel of the velocities. Zeros for the last convolution
            and for the velocities change nothing.
    """

    name: ClassVar[str] = "residual-network"

    def __post_init__(self) -> None:
        size, shape = sum(map(math.prod, _shapes().values())), self.theta.shape
        if tuple(shape) != (size,):
            raise ValueError(f"theta has shape {tuple(shape)}; a {self.name} has {size} numbers")

    @classmethod
    def begun(cls, seed: int = 0) -> Self:
        """Returns a network that changes nothing yet: its last kernel is 0, also for velocities."""
        rng = np.random.default_rng(seed)
        parts = []
        for name, shape in _shapes().items():
            scale = SCALES.get(name, HIDDEN_SCALE)
            inputs = FEATURES if name == "style" else math.prod(shape[:-1])
            part = rng.normal(size=shape) * scale / np.sqrt(inputs)
            if name == "style":
                part[:, -1] = 0.0  # what does not depend on the style
            parts.append(part)
        return cls(np.concatenate([part.ravel() for part in parts]))

    @override
    def style(self, power: LinearPower, cell: float, a: float) -> tf.Tensor:
        return features_and_rates(power, cell, np.asarray(a, np.float64))

    @override
    def moved(
        self, theta: tf.Tensor, style: tf.Tensor, fields: Sequence[tf.Tensor], box: Box
    ) -> list[tf.Tensor]:
        import tensorflow as tf

        from flowpm_dist.evolution.corrections.network_layers import network_function

        parts, begin = {}, 0
        for name, shape in _shapes().items():
            end = begin + math.prod(shape)
            parts[name], begin = tf.reshape(theta[begin:end], shape), end
        parts["first"] -= tf.reduce_mean(parts["first"], axis=[0, 1, 2])
        value, rate = tf.unstack(style, axis=-2)
        weights = tf.reshape(parts.pop("style"), [HIDDEN + 1, FEATURES + 1, 2 * CHANNELS])
        of_style = weights[:, :FEATURES]
        scales = tf.einsum("...f,lfc->...lc", value, of_style) + weights[:, FEATURES]
        rates = tf.einsum("...f,lfc->...lc", rate, of_style)
        early = value[..., 0] ** 2, 2.0 * value[..., 0] * rate[..., 0]
        flat = [*value.shape[:-1], 2 * (HIDDEN + 1) * 2 * CHANNELS]
        modulation = tf.concat(
            [tf.reshape(tf.stack([scales, rates], axis=-2), flat), tf.stack(early, axis=-1)],
            axis=-1,
        )
        spacing, velocities = force_cell(box.size, box.grid), len(fields) > 1
        of_velocity = parts.pop("velocity")
        if velocities:
            parts["last"] = tf.concat([parts["last"], of_velocity], axis=-1)
        function = network_function(box, CHANNELS, HIDDEN, spacing, velocities)
        inputs = [tf.cast(x, box.dtype) for x in (modulation, *parts.values())]
        return list(function(*fields, *inputs))

    @override
    def turned(self, theta: tf.Tensor, element: int) -> tf.Tensor:
        import tensorflow as tf

        places, signs = _symmetry(element)
        return tf.gather(theta, places) * tf.cast(signs, theta.dtype)


def _shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights, in their order in theta."""
    kernel = (3, 3, 3)
    hidden = {f"hidden_{n}": (*kernel, CHANNELS, CHANNELS) for n in range(HIDDEN)}
    return {
        "first": (*kernel, 3, CHANNELS),
        **hidden,
        "last": (*kernel, CHANNELS, 3),
        # of each modulated layer: weights of the features, and a constant; of scales and shifts
        "style": (HIDDEN + 1, FEATURES + 1, 2 * CHANNELS),
        "velocity": (*kernel, CHANNELS, 3),
    }


@functools.lru_cache(maxsize=48)
def _symmetry(element: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index in theta of each number of a turned theta, and its sign."""
    axes = list(itertools.permutations(range(3)))[element // 8]
    flips = tuple(axis for axis in range(3) if element >> axis & 1)
    flipped = np.array([-1 if axis in flips else 1 for axis in range(3)])
    places, signs = [], []
    for numbers, sign, vector in _numbered():
        if vector is not None:
            numbers = np.take(numbers, axes, axis=vector)
            shape = [3 if axis == vector else 1 for axis in range(numbers.ndim)]
            sign = sign * flipped.reshape(shape)
        if numbers.ndim == 5:
            numbers = np.flip(np.transpose(numbers, (*axes, 3, 4)), flips)
        places.append(numbers.ravel())
        signs.append(np.broadcast_to(sign, numbers.shape).ravel())
    return np.concatenate(places), np.concatenate(signs)


def _numbered() -> Iterator[tuple[np.ndarray, np.ndarray, int | None]]:
    """Yields the indices of each part in theta, signs of 1, and the component axis."""
    begin = 0
    for name, shape in _shapes().items():
        end = begin + math.prod(shape)
        vector = {"first": 3, "last": 4, "velocity": 4}.get(name)
        yield np.arange(begin, end).reshape(shape), np.ones(shape), vector
        begin = end
