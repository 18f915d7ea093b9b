"""How probable the data are, given the density that a model expects."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import Filter, convolve
from meshimpl.mesh_function import MeshFunction


@dataclass(frozen=True)
class Annealing:
    """How a likelihood is made easier: by noise that is greater, and more so on small scales.

    Residuals are divided by the inflation and smoothed with a Gaussian before they are squared.
    That is the likelihood of noise whose standard deviation is inflation x exp(k^2 R^2 / 2) times
    what it is, in each mode.

    Attributes:
        radius: R [Mpc/h].
        inflation: [1].
    """

    radius: float = 0.0
    inflation: float = 1.0


EXACT = Annealing()


class Likelihood(abc.ABC):
    """Of one data set, for a model's density or for those of several chains.

    Args:
        box: of the model's densities.
        observed: block [x, y, z]: 1 where there are data, 0 elsewhere, or a weight between.
    """

    def __init__(self, box: Box, observed: tf.Tensor | None = None) -> None:
        self.box = box
        self.observed = tf.ones(box.block, box.dtype) if observed is None else observed
        self._smoothings: dict[float, MeshFunction] = {}

    @abc.abstractmethod
    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        """Of the density in each cell of this rank, about; 0 where nothing is observed.

        The annealing's own factors are not in it.
        """

    @abc.abstractmethod
    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """Model less data in standard deviations of the data, 0 where nothing is observed."""

    def parts(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """This rank's part of minus the log likelihood, float64 [...], 0 for a perfect model.

        Args:
            density: block [..., x, y, z].
            annealing: of the noise.
        """
        residual = self.residual(density, annealing)
        if annealing.radius:
            residual = self._smoothed(annealing.radius)(residual)
        return _total(tf.square(residual)) * (0.5 / annealing.inflation**2)

    def _smoothed(self, radius: float) -> MeshFunction:
        if radius not in self._smoothings:
            kernel = Filter(functools.partial(_gaussian, radius=radius))
            self._smoothings[radius] = self.box.function(
                lambda _, x: convolve(x, self.box, kernel), field=self.box.shape
            )
        return self._smoothings[radius]

    def information(self, annealing: Annealing = EXACT) -> float:
        """Mean of the inverse variance over all cells of the box. On all ranks together."""
        local = _total(self.inverse_variance(annealing))
        replicas = self.box.mesh.axis_size("replica")
        return float(self.box.mesh.world.allreduce(local)) / (replicas * self.box.cells)

    @functools.cached_property
    def typical_information(self) -> float:
        """Mean of the inverse variance over the cells that are observed."""
        return self.information() * self.box.cells / max(1, self.count)

    @functools.cached_property
    def count(self) -> int:
        """Number of cells that are observed."""
        local = _total(tf.cast(self.observed > 0, tf.float64))
        replicas = self.box.mesh.axis_size("replica")
        return int(self.box.mesh.world.allreduce(local)) // replicas


class Gaussian(Likelihood):
    """Independent Gaussian noise in each cell.

    Args:
        box: of the model's densities.
        data: block [x, y, z] of a density, mean 1; what it holds where nothing is observed does not
            matter, if it is finite.
        sigma: standard deviation of the noise, a number or a block [x, y, z].
        observed: see `Likelihood`.
        error: of the model, as a share of a cell's density; its square times that of the data is
            added to the variance, but not while residuals are smoothed: weights that follow the
            density would upset the balance of mass between neighbours.
    """

    def __init__(
        self,
        box: Box,
        data: tf.Tensor,
        sigma: Any,
        observed: tf.Tensor | None = None,
        error: float = 0.0,
    ) -> None:
        super().__init__(box, observed)
        self._data = tf.cast(data, box.dtype)
        variance = tf.square(_number(sigma, box))
        of_model = tf.square(_number(error, box) * tf.maximum(self._data, 0))
        self._smooth, self._exact = (
            tf.sqrt(self.observed / x) for x in (variance, variance + of_model)
        )

    def _scale(self, annealing: Annealing) -> tf.Tensor:
        return self._smooth if annealing.radius else self._exact

    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`."""
        return tf.square(self._scale(annealing))

    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`."""
        return (density - self._data) * self._scale(annealing)


LEAST_DENSITY = 0.02
"""A density below about this [mean density] counts as this: rates of counts are positive."""


class Poisson(Likelihood):
    """Counts of tracers, drawn in each cell from mean_count x density.

    Annealing takes them as Gaussian, of variance mean_count.

    Args:
        box: of the model's densities.
        counts: block [x, y, z].
        mean_count: of a cell of mean density that is observed; a number, or a block [x, y, z].
        observed: see `Likelihood`; the share of a cell that is observed lowers its rate.
    """

    def __init__(
        self, box: Box, counts: tf.Tensor, mean_count: Any, observed: tf.Tensor | None = None
    ) -> None:
        super().__init__(box, observed)
        self._counts = tf.where(self.observed > 0, tf.cast(counts, box.dtype), 0)
        self._rate = self.observed * _number(mean_count, box)

    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`."""
        return self._rate

    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`."""
        positive = tf.where(self._rate > 0, self._rate, tf.ones_like(self._rate))
        return (density * self._rate - self._counts) / tf.sqrt(positive)

    def parts(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """Half the deviance: the log likelihood less that of rates equal to the counts."""
        if annealing != EXACT:
            return super().parts(density, annealing)
        rate = self._rate * positive_density(density)
        counts = self._counts
        some = counts > 0
        safe_rate = tf.where(rate > 0, rate, tf.ones_like(rate))
        ratio = tf.where(some, counts, tf.ones_like(counts)) / safe_rate
        surprise = tf.where(some, counts * tf.math.log(ratio), tf.zeros_like(rate))
        return _total(rate - counts + surprise)


def positive_density(density: tf.Tensor) -> tf.Tensor:
    """The density, bent smoothly so that it stays above 0: softplus of scale `LEAST_DENSITY`."""
    return LEAST_DENSITY * tf.math.softplus(density / LEAST_DENSITY)


def _gaussian(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, radius: float) -> tf.Tensor:
    return tf.exp(-0.5 * radius**2 * (kx**2 + ky**2 + kz**2))


def _number(value: Any, box: Box) -> tf.Tensor:
    """In the box's dtype: `tf.cast` alone would take a Python number by way of float32."""
    return tf.cast(np.asarray(value), box.dtype)


def _total(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.float64), axis=[-3, -2, -1])
