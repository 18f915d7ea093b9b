"""Counts of tracers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.box import Box
from flowpm_dist.observables.noise import LEAST_DENSITY, positive_density
from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing, Likelihood, in_dtype_of

EXPONENTIAL = -25 * LEAST_DENSITY
"""Below this density [mean density] rates are exponential, to 1e-11."""


class Poisson(Likelihood):
    """Counts of tracers, drawn in each cell from a Poisson distribution of mean_count x density.

    Annealing takes them as Gaussian, with variance mean_count.

    Args:
        box: the box of the model's densities.
        counts: block [x, y, z].
        mean_count: the mean count of an observed cell of mean density, a number or a block
            [x, y, z].
        observed: see `Likelihood`; the share of a cell that is observed lowers its rate.
    """

    def __init__(
        self, box: Box, counts: tf.Tensor, mean_count: Any, observed: tf.Tensor | None = None
    ) -> None:
        super().__init__(box, observed)
        counts = in_unit("counts", counts)
        self._counts = tf.where(self.observed > 0, tf.cast(counts, box.dtype), 0)
        self._rate = self.observed * in_dtype_of(box, mean_count, "mean_count")

    @override
    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        return self._rate

    @override
    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        positive = tf.where(self._rate > 0, self._rate, tf.ones_like(self._rate))
        return (density * self._rate - self._counts) / tf.sqrt(positive)

    def parts(
        self, density: tf.Tensor, annealing: Annealing = EXACT, **parameters: tf.Tensor
    ) -> tf.Tensor:
        """Returns half the deviance, which is 0 where the rates equal the counts."""
        if annealing != EXACT:
            return super().parts(density, annealing)
        # Far below 0 a rate is lost in rounding, but not its logarithm, which is linear there.
        far = density < EXPONENTIAL
        rate = self._rate * positive_density(tf.where(far, EXPONENTIAL, density))
        below = tf.where(far, EXPONENTIAL - density, 0) / LEAST_DENSITY
        counts = self._counts
        some = counts > 0
        safe_rate = tf.where(rate > 0, rate, tf.ones_like(rate))
        ratio = tf.where(some, counts, tf.ones_like(counts)) / safe_rate
        surprise = tf.where(some, counts * (tf.math.log(ratio) + below), tf.zeros_like(rate))
        return self.sum(rate - counts + surprise)
