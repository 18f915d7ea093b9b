"""The interface of a likelihood, and the annealing that makes it easier while a search begins."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import Filter, convolve
from meshimpl.mesh_function import MeshFunction


@dataclass(frozen=True)
class Annealing:
    """The annealing of a likelihood: greater noise, and more so on small scales.

    Residuals are divided by the inflation and smoothed with a Gaussian before they are squared.
    That is the likelihood of noise whose standard deviation in each mode is inflation x
    exp(k^2 R^2 / 2) times as large.

    Attributes:
        radius: R [Mpc/h].
        inflation: [1].
    """

    radius: float = 0.0
    inflation: float = 1.0


EXACT = Annealing()
"""The likelihood as it is."""


class Likelihood(abc.ABC):
    """The probability of one data set, given a model's density or those of several chains.

    A likelihood of your own implements `inverse_variance` and `residual`. Where it is not Gaussian,
    it also overrides `parts` for the exact likelihood, and leaves the annealed ones to this class.

    Attributes:
        parameters: names of nuisance parameters that `parts` takes by keyword, if they have priors.

    Args:
        box: the box of the model's densities.
        observed: block [x, y, z]: 1 where there are data, 0 elsewhere, or a weight between.
    """

    parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, box: Box, observed: tf.Tensor | None = None) -> None:
        self.box = box
        self.observed = tf.ones(box.block, box.dtype) if observed is None else observed
        self._smoothings: dict[float, MeshFunction] = {}

    @abc.abstractmethod
    def inverse_variance(self, annealing: Annealing = EXACT) -> tf.Tensor:
        """Returns about the inverse variance of the density in each cell of this rank [x, y, z].

        It is 0 where nothing is observed. The annealing's own factors are not in it.
        """

    @abc.abstractmethod
    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """Returns model less data in standard deviations of the data [..., x, y, z].

        It is 0 where nothing is observed.
        """

    def parts(
        self, density: tf.Tensor, annealing: Annealing = EXACT, **parameters: tf.Tensor
    ) -> tf.Tensor:
        """Returns this rank's part of minus the log likelihood, float64 [...].

        The sum over ranks is 0 for a perfect model.

        Args:
            density: block [..., x, y, z].
            annealing: the annealing of the noise.
            parameters: those of `self.parameters` that have priors, float64 [...] of all chains;
                `local_values` makes factors of blocks of them.
        """
        return self.half_squares(self.residual(density, annealing), annealing)

    def half_squares(self, residual: tf.Tensor, annealing: Annealing) -> tf.Tensor:
        """Returns half the sum of this rank's annealed squares, float64 [...].

        Args:
            residual: block [..., x, y, z].
            annealing: the annealing of the noise.
        """
        if annealing.radius:
            residual = self._smoothed(annealing.radius)(residual)
        return sum_over_cells(tf.square(residual)) * (0.5 / annealing.inflation**2)

    def _smoothed(self, radius: float) -> MeshFunction:
        if radius not in self._smoothings:
            kernel = Filter(functools.partial(_gaussian, radius=radius))
            self._smoothings[radius] = self.box.function(
                lambda _, x: convolve(x, self.box, kernel), field=self.box.shape
            )
        return self._smoothings[radius]

    def information(self, annealing: Annealing = EXACT) -> float:
        """Returns the mean of the inverse variance over all cells. On all ranks together."""
        local = sum_over_cells(self.inverse_variance(annealing))
        replicas = self.box.mesh.axis_size("replica")
        return float(self.box.mesh.world.allreduce(local)) / (replicas * self.box.cells)

    @functools.cached_property
    def typical_information(self) -> float:
        """The mean of the inverse variance over the cells that are observed."""
        return self.information() * self.box.cells / max(1, self.count)

    @functools.cached_property
    def count(self) -> int:
        """The number of cells that are observed."""
        local = sum_over_cells(tf.cast(self.observed > 0, tf.float64))
        replicas = self.box.mesh.axis_size("replica")
        return int(self.box.mesh.world.allreduce(local)) // replicas


def _gaussian(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, radius: float) -> tf.Tensor:
    return tf.exp(-0.5 * radius**2 * (kx**2 + ky**2 + kz**2))


def in_dtype_of(box: Box, value: Any) -> tf.Tensor:
    """Returns a number or a block in the box's dtype.

    `tf.cast` alone would take a Python number by way of float32.
    """
    return tf.cast(np.asarray(value), box.dtype)


def sum_over_cells(x: tf.Tensor) -> tf.Tensor:
    """Returns the sum over this rank's cells in float64: [..., x, y, z] -> [...]."""
    return tf.reduce_sum(tf.cast(x, tf.float64), axis=[-3, -2, -1])
