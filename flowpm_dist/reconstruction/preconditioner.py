"""A preconditioner for masked or uneven data, for a search in even coordinates.

Even coordinates take the noise as the same everywhere. Where a part of the box is masked or noisier
than the rest, minus the log posterior of a linear universe curves there as

    H = 1 + C (w - 1) C,

where w is the inverse variance of each cell divided by its mean, and C = F^-1 sqrt(1 - 1 / root^2)
F: its kernel is near 1 for modes that the data determine and near 0 for modes that the prior
determines. Large scales of a masked region curve less by 1 / root^2, often a hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from flowpm_dist.reconstruction.likelihoods.base import Likelihood

DAMPING = 0.1
"""Curvature that is added in every direction. Structure that is not linear adds some, too; with
less damping the steps of searches through Lagrangian perturbation theory became too short.
"""

REMAINDER = 0.5
"""Greatest relative error of the approximate inverse in any direction."""

MOST = 16
"""Greatest number of terms of the approximate inverse."""

EVEN = 1e-3
"""Weights that differ by less than this count as the same everywhere."""


class Preconditioner:
    """An approximate inverse of H + `DAMPING`, symmetric and positive, for blocks of one universe.

    It is a polynomial of H, the Chebyshev iteration (Golub and Varga 1961, Numer. Math. 3, 147). So
    it is the same operator at every call, and needs no sums over ranks. Where the weights are the
    same everywhere, it returns its argument.

    Args:
        likelihood: the likelihood of the data.
        kernel: 1 / root^2 for this rank's modes [kz, ky, kx].
        times: the function F^-1 kernel F field of a field and a kernel.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        kernel: tf.Tensor,
        times: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> None:
        weights = likelihood.weights()
        self._excess, self._times = weights - 1, times
        self._kernel = tf.sqrt(tf.maximum(1 - kernel, 0))
        world = likelihood.box.mesh.world
        # The kernel of C is between 0 and 1.
        self._low = float(world.allreduce(tf.reduce_min(weights), "min")) + DAMPING
        self._high = float(world.allreduce(tf.reduce_max(weights), "max")) + DAMPING
        bound = 0.5 * math.sqrt(self._high / self._low) * math.log(2 / REMAINDER)
        self._terms = min(MOST, math.ceil(bound))

    def _curved(self, x: tf.Tensor) -> tf.Tensor:
        """Returns (H + damping) x."""
        weighted = self._excess * self._times(x, self._kernel)
        return (1 + DAMPING) * x + self._times(weighted, self._kernel)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the inverse of the curvature times a field, block [x, y, z]."""
        if self._high - self._low < EVEN:
            return x
        middle, half = (self._high + self._low) / 2, (self._high - self._low) / 2
        ratio = half / middle
        left, change = x, x * np.asarray(1 / middle, x.dtype.as_numpy_dtype)
        solution = change
        for _ in range(self._terms - 1):
            left = left - self._curved(change)
            following = 1 / (2 * middle / half - ratio)
            of_change, of_left = (
                np.asarray(factor, x.dtype.as_numpy_dtype)
                for factor in (following * ratio, 2 * following / half)
            )
            change, ratio = of_change * change + of_left * left, following
            solution = solution + change
        return solution
