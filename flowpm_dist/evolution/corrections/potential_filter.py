"""A filter of the potential: splines in k, whose heights a small network gives.

The idea comes from Lanzieri, Lanusse and Starck 2022 (arXiv:2207.05509). Their network has the
scale factor as its input. This one has the numbers of `features`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from typing_extensions import override

from flowpm_dist.evolution.corrections.base import ForceCorrection
from flowpm_dist.evolution.corrections.features import FEATURES, features

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.power import LinearPower

HIDDEN = 16


@dataclass(frozen=True)
class CubicSplines:
    """Cubic B-splines at equal distances, the first of which begins at half of one.

    At smaller wavenumbers nothing is corrected, because the mesh's force is right for its lattice.

    Attributes:
        size: their number.
        distance: between them [Nyquist wavenumber of the mesh]; each is four of them wide.
    """

    size: int = 8
    distance: float = 0.2

    def __call__(self, k: tf.Tensor, coefficients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns 1 + the sum of coefficients times splines, see `particle_mesh.response`."""
        splines = [self._spline(k / self.distance - (j + 2.5)) for j in range(self.size)]
        return 1 + sum(c * spline for c, spline in zip(coefficients, splines, strict=True))

    def _spline(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the B-spline around 0; its largest value is 1."""
        import tensorflow as tf

        x = tf.abs(x)
        outer = tf.maximum(2.0 - x, 0.0) ** 3 / 4.0
        return outer - tf.maximum(1.0 - x, 0.0) ** 3


@dataclass(frozen=True, eq=False)
class PotentialFilter(ForceCorrection):
    """A filter of the potential that a network of two layers of sines gives for each kick.

    Attributes:
        theta: the weights and biases of its three layers, one after the other.
    """

    name: ClassVar[str] = "potential-filter"

    def __post_init__(self) -> None:
        size, shape = sum((inputs + 1) * outputs for inputs, outputs in _shapes()), self.theta.shape
        if tuple(shape) != (size,):
            raise ValueError(f"theta has shape {tuple(shape)}; the {self.name} has {size} numbers")

    @classmethod
    def begun(cls, seed: int = 0) -> Self:
        """Returns a filter that changes nothing yet: the weights of the last layer are 0."""
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
    @override
    def response(self) -> CubicSplines:
        return CubicSplines()

    @override
    def coefficients(
        self, theta: tf.Tensor, power: LinearPower, cell: float, a: np.ndarray
    ) -> tf.Tensor:
        import tensorflow as tf

        x = features(power, cell, a)
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
