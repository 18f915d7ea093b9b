"""A filter of the potential: splines in k, whose heights a small network gives.

The idea is that of Lanzieri, Lanusse and Starck 2022 (arXiv:2207.05509), whose network sees the
scale factor. This one sees how nonlinear the universe is at the scale of a cell, so that the same
numbers may serve other cosmologies, times and cells:

- s / (1 + s), where s is the rms linear overdensity, smoothed by a Gaussian of the side of a cell;
- the slope of its square by the logarithm of that radius, as 1 + slope / 3;
- Omega_m(a).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from flowpm_dist.evolution.corrections.base import Correction

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.power import LinearPower

FEATURES, HIDDEN = 3, 16


@dataclass(frozen=True)
class CubicSplines:
    """Cubic B-splines at equal distances, each of which begins at k = 0 or later.

    Attributes:
        size: their number.
        distance: between them [Nyquist wavenumber of the mesh]; each is four of them wide.
    """

    size: int = 8
    distance: float = 0.2

    def __call__(self, k: tf.Tensor) -> Sequence[tf.Tensor]:
        """See `Basis`."""
        return [self._spline(k / self.distance - (j + 2)) for j in range(self.size)]

    def _spline(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the B-spline around 0; its largest value is 1."""
        import tensorflow as tf

        x = tf.abs(x)
        outer = tf.maximum(2.0 - x, 0.0) ** 3 / 4.0
        return outer - tf.maximum(1.0 - x, 0.0) ** 3


@dataclass(frozen=True, eq=False)
class PotentialFilter(Correction):
    """A filter of the potential that a network of two layers of sines gives for each kick.

    Attributes:
        theta: the weights and biases of its three layers, one after the other.
    """

    name: ClassVar[str] = "potential-filter"

    def __post_init__(self) -> None:
        size, given = sum((inputs + 1) * outputs for inputs, outputs in _shapes()), self.theta.shape
        if tuple(given) != (size,):
            raise ValueError(f"theta has shape {tuple(given)}; a {self.name} has {size} numbers")

    @classmethod
    def begun(cls, seed: int = 0) -> Self:
        """See `Correction.begun`: the weights of the last layer are 0."""
        rng = np.random.default_rng(seed)
        (first, second, third) = _shapes()
        parts = [
            rng.normal(size=first) * np.array([[3.0]] * FEATURES),
            rng.uniform(-np.pi, np.pi, first[1]),
            rng.normal(size=second) / np.sqrt(HIDDEN),
            rng.uniform(-np.pi, np.pi, second[1]),
            np.zeros(third),
            np.zeros(third[1]),
        ]
        return cls(np.concatenate([part.ravel() for part in parts]))

    @property
    def basis(self) -> CubicSplines:
        """See `Correction.basis`."""
        return CubicSplines()

    def coefficients(
        self, theta: tf.Tensor, power: LinearPower, cell: float, a: np.ndarray
    ) -> tf.Tensor:
        """See `Correction.coefficients`."""
        import tensorflow as tf

        rms, slope = _at_scale(power, cell)
        s = rms * power.growth.d1(a)
        # the background's Omega_m(a) is 0 / 0 at a = 0
        matter = power.growth.background.omega_m(np.maximum(a, 1e-6))
        x = tf.stack([s / (1.0 + s), tf.ones_like(s) * (1.0 + slope / 3.0), matter], axis=-1)
        begin = 0
        for number, (inputs, outputs) in enumerate(_shapes()):
            end = begin + inputs * outputs
            weights = tf.reshape(theta[begin:end], [inputs, outputs])
            x = x @ weights + theta[end : end + outputs]
            begin = end + outputs
            if number < 2:
                x = tf.sin(x)
        return x


def _shapes() -> list[tuple[int, int]]:
    """Returns inputs and outputs of each layer."""
    return [(FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CubicSplines().size)]


def _at_scale(power: LinearPower, cell: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rms and slope of the linear overdensity at the scale of a cell, without growth."""
    import tensorflow as tf

    k, weights = _quadrature(cell)
    per_mode = power.without_growth(k) * weights
    variance = tf.reduce_sum(per_mode)
    slope = tf.reduce_sum(per_mode * (-2.0 * (k * cell) ** 2)) / variance
    return tf.sqrt(variance), slope


@functools.lru_cache(maxsize=64)
def _quadrature(radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns k [h/Mpc] and weights [(h/Mpc)^3] of the variance under a Gaussian of a radius."""
    ln_k = np.linspace(np.log(1e-3 / radius), np.log(6.0 / radius), 256)
    k = np.exp(ln_k)
    return k, (ln_k[1] - ln_k[0]) * k**3 / (2.0 * np.pi**2) * np.exp(-((k * radius) ** 2))
