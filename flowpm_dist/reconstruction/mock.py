"""A mock universe, whose truth is known, and its observations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.initial.white_noise import noise_function
from flowpm_dist.observables.noise import counts_of, noisy_density
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.reconstruction.unknowns import Space, Use
from flowpm_dist.simulation.state import State


@dataclass(frozen=True)
class Mock:
    """A universe with the model's own cosmology and bias.

    Attributes:
        state: its particles and initial conditions.
        seen: what would be observed without noise: a density of mean 1, block [x, y, z], or maps.
    """

    state: State
    seen: tf.Tensor

    @classmethod
    def of(cls, model: UniverseModel, seed: int) -> Mock:
        """Returns the universe of a seed, with the white noise of `Simulation.run` for that seed.

        Args:
            model: the model from white noise to what is observed.
            seed: the seed of the white noise.
        """
        noise = noise_function(model.simulation.box)(np.asarray(seed, np.int64))
        return cls(*model.with_room(lambda: model.look(noise, {})))

    @property
    def white_noise(self) -> Field:
        """The white noise that the universe grew from."""
        return self.state.white_noise

    def noisy_density(self, sigma: np.ndarray, mask: np.ndarray, seed: int) -> np.ndarray:
        """Returns the density with Gaussian noise, the same on any number of ranks.

        Args:
            sigma: the standard deviation where all of a cell is observed, block [x, y, z].
            mask: the share of each cell that is observed; the variance is divided by it.
            seed: the seed of the noise.

        Returns:
            A float64 block; 1 where nothing is observed.
        """
        density = np.asarray(self.seen, np.float64)
        return noisy_density(density, sigma, mask, self._unit_normal(seed))

    def counts(self, mean_count: float, mask: np.ndarray, seed: int) -> np.ndarray:
        """Returns Poisson counts, see `counts_of`.

        Args:
            mean_count: the mean count of a cell of mean density.
            mask: the share of each cell that is observed.
            seed: the seed of the draw.

        Returns:
            A float64 block of whole numbers.
        """
        return counts_of(self.seen, mean_count, mask, self._unit_normal(seed))

    def _unit_normal(self, seed: int) -> np.ndarray:
        return np.asarray(Space(self.state.box).normal(seed, Use.NOISE).field, np.float64)
