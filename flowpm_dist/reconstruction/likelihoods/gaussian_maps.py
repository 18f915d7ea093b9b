"""Maps with Gaussian noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.reconstruction.likelihoods.base import EXACT, LARGEST_CHANGE, Annealing, quieter
from flowpm_dist.reconstruction.likelihoods.gaussian import Gaussian


class GaussianMaps(Gaussian):
    """Maps with independent Gaussian noise in each pixel, whole on every rank of a universe.

    Pixels stand where a density has cells: [source, x, y] in place of [x, y, z].

    Args:
        box: the box of one universe, or of several chains.
        data: maps [source, x, y]. Their values where nothing is observed must be finite.
        sigma: standard deviation of the noise, a number, or an array that broadcasts with the maps.
        observed: maps: 1 where there are data, 0 elsewhere.

    With a prior, the parameter "noise_amplitude" multiplies sigma.
    """

    def __init__(
        self, box: Box, data: tf.Tensor, sigma: Any, observed: tf.Tensor | None = None
    ) -> None:
        observed = tf.ones(data.shape, box.dtype) if observed is None else observed
        super().__init__(box, data, sigma, observed)
        # Each rank of a universe has all of its maps.
        self.share = box.mesh.axis_size("replica") / box.mesh.size

    def residual(self, density: tf.Tensor, annealing: Annealing = EXACT) -> tf.Tensor:
        """See `Likelihood`.

        Raises:
            ValueError: an annealing that smooths.
        """
        if annealing.radius:
            raise ValueError(f"maps are not smoothed: the radius is {annealing.radius:g}, not 0")
        return super().residual(density, annealing)

    def weights(self) -> tf.Tensor:
        """Returns 1 for each cell: a pixel sees many cells."""
        return tf.ones(self.box.block, self.box.dtype)

    def easier(self) -> list[Annealing]:
        """Returns annealings from noise as large as the maps' rms to the data's.

        Where that is at most `LARGEST_CHANGE` times the noise, only `EXACT`.
        """
        scaled = np.asarray(self._data * self._exact)[np.asarray(self.observed) > 0]
        inflation = float(np.sqrt(np.mean(scaled**2)))
        if inflation <= LARGEST_CHANGE:
            return [EXACT]
        return [Annealing(0.0, inflation), *quieter(inflation)]
