"""The interface of a likelihood, and the annealing that makes it easier while a search begins."""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import gaussian_smoothing
from flowpm_dist.options import in_unit, keep_in_units


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

    def __post_init__(self) -> None:
        keep_in_units(self, radius="Mpc/h", inflation="")


EXACT = Annealing()
"""The likelihood without annealing."""


EASY_SIGMA, EASIEST_SIGMA = 1.0, 3.0
"""Noise [mean density] to which smaller noise is inflated at first.

The first applies where scales of less than two cells are fitted. The second applies where
smoothing leaves them out, as their lack is an error of the model, too.
"""

FIRST_RADIUS = 16.0
"""First smoothing radius [Mpc/h]: large-scale flows are found before the structures they move."""

LARGEST_CHANGE = 4.0
"""Largest ratio of the inflation from one stage to the next."""


class Likelihood(abc.ABC):
    """The probability of one data set, given a model's density or the densities of several chains.

    A custom likelihood implements `inverse_variance` and `residual`. Where it is not Gaussian,
    it also overrides `parts` for the exact likelihood, and leaves the annealed ones to this class.

    Attributes:
        parameters: names of nuisance parameters that `parts` takes by keyword, if they have priors.
        share: the share of this rank's `parts` in the whole: 1 for a block of its own.

    Args:
        box: the box of the model's densities.
        observed: block [x, y, z]: 1 where there are data, 0 elsewhere, or a weight between.
    """

    parameters: ClassVar[tuple[str, ...]] = ()
    share: float = 1.0

    def __init__(self, box: Box, observed: tf.Tensor | None = None) -> None:
        self.box = box
        observed = in_unit("observed", observed)
        self.observed = tf.ones(box.block, box.dtype) if observed is None else observed

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
            parameters: the values of `self.parameters` with a prior, float64 [...] of all chains;
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
            residual = gaussian_smoothing(self.box, annealing.radius)(residual)
        return self.sum(tf.square(residual)) * (0.5 / annealing.inflation**2)

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """Returns this rank's share of the sum over the cells, float64: [..., x, y, z] -> [...]."""
        return self.share * sum_over_cells(values)

    def information(self, annealing: Annealing = EXACT) -> float:
        """Returns the mean of the inverse variance over all cells. On all ranks together."""
        local = self.sum(self.inverse_variance(annealing))
        replicas = self.box.mesh.axis_size("replica")
        return float(self.box.mesh.world.allreduce(local)) / (replicas * self.box.cells)

    def weights(self) -> tf.Tensor:
        """Returns the inverse variance in this rank's cells over its mean in the box [x, y, z].

        The model's error is left out, because it follows the density of the data. On all ranks
        together.
        """
        smoothed = Annealing(radius=max(self.box.cell))
        mean = max(self.information(smoothed), float(np.finfo(np.float32).tiny))
        return self.inverse_variance(smoothed) / in_dtype_of(self.box, mean)

    @functools.cached_property
    def count(self) -> int:
        """The number of cells that are observed."""
        local = self.sum(tf.cast(self.observed > 0, tf.float64))
        replicas = self.box.mesh.axis_size("replica")
        return round(float(self.box.mesh.world.allreduce(local))) // replicas

    def easier(self) -> list[Annealing]:
        """Returns annealings from large scales to small ones, then from greater noise to its own.

        The smoothing begins at `FIRST_RADIUS`, or at four cells if that is more. It is halved down
        to about two cells with noise of at least `EASIEST_SIGMA`. Then come two cells and one cell
        with noise of at least `EASY_SIGMA`. Without smoothing, that noise is lowered by factors of
        at most `LARGEST_CHANGE`. The last annealing is `EXACT`.
        """
        cell = max(self.box.cell)
        # The mean over the cells that are observed.
        sigma = 1 / math.sqrt(self.information() * self.box.cells / max(1, self.count))
        easiest, easy = (max(1.0, x / sigma) for x in (EASIEST_SIGMA, EASY_SIGMA))
        first = max(FIRST_RADIUS, 4 * cell)
        halvings = range(math.floor(math.log2(first / cell) + 1e-9))
        smoothed = [Annealing(first / 2**n, easiest) for n in halvings]
        smoothed += [Annealing(radius, easy) for radius in (2 * cell, cell)]
        return [*smoothed, *quieter(easy)]


def quieter(inflation: float) -> list[Annealing]:
    """Returns annealings without smoothing that follow an inflation, down to `EXACT`."""
    steps = max(1, math.ceil(math.log(inflation) / math.log(LARGEST_CHANGE) - 1e-9))
    lowered = [Annealing(0.0, inflation ** (1 - n / steps)) for n in range(1, steps)]
    return [*lowered, EXACT]


def in_dtype_of(box: Box, value: Any, name: str = "value") -> tf.Tensor:
    """Returns a number or a block in the box's dtype.

    `tf.cast` alone would take a Python number by way of float32.

    Args:
        box: the box.
        value: the number or block; one with a unit is refused.
        name: its name, for messages.
    """
    return tf.cast(np.asarray(in_unit(name, value)), box.dtype)


def sum_over_cells(x: tf.Tensor) -> tf.Tensor:
    """Returns the sum over this rank's cells in float64: [..., x, y, z] -> [...]."""
    return tf.reduce_sum(tf.cast(x, tf.float64), axis=[-3, -2, -1])
