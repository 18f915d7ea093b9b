"""A mock universe, whose truth is known, and what is observed of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from scipy.stats import norm, poisson

from flowpm_dist.grid.field import Field
from flowpm_dist.initial.white_noise import noise_function
from flowpm_dist.observables.forward_model import ForwardModel
from flowpm_dist.reconstruction.likelihoods import positive_density
from flowpm_dist.reconstruction.unknowns import Space
from flowpm_dist.simulation.state import State

NOISE = 1
"""Key of the draws of noise, so that they are not those of a search with the same seed."""


@dataclass(frozen=True)
class Mock:
    """A universe of the model's own cosmology and bias.

    Attributes:
        state: its particles and initial conditions.
        density: what would be observed of it without noise, block [x, y, z], mean 1.
    """

    state: State
    density: tf.Tensor

    @classmethod
    def of(cls, model: ForwardModel, seed: int) -> Mock:
        """The universe of a seed: of the same white noise as `Simulation.run` of that seed.

        Args:
            model: from white noise to what is observed.
            seed: of the white noise.
        """
        noise = noise_function(model.simulation.box)(np.asarray(seed, np.int64))
        state = model.with_room(lambda: model.run(noise, {}))
        return cls(state, model.observe(state, {}))

    @property
    def white_noise(self) -> Field:
        """That the universe grew from."""
        return self.state.white_noise

    def noisy_density(self, sigma: np.ndarray, mask: np.ndarray, seed: int) -> np.ndarray:
        """The density with Gaussian noise, the same on any number of ranks.

        Args:
            sigma: standard deviation where all of a cell is observed, block [x, y, z].
            mask: share of each cell that is observed; the variance grows as it falls.
            seed: of the noise.

        Returns:
            float64 block; 1 where nothing is observed.
        """
        seen = mask > 0
        spread = np.where(seen, sigma / np.sqrt(np.where(seen, mask, 1.0)), 0.0)
        density = np.asarray(self.density, np.float64)
        return np.where(seen, density + spread * self._unit_normal(seed), 1.0)

    def counts(self, mean_count: float, mask: np.ndarray, seed: int) -> np.ndarray:
        """Poisson counts, on any number of ranks the same up to the rounding of the density.

        Args:
            mean_count: of a cell of mean density.
            mask: share of each cell that is observed.
            seed: of the draw.

        Returns:
            float64 block of whole numbers.
        """
        rate = mean_count * mask * np.asarray(positive_density(self.density), np.float64)
        drawn = poisson.ppf(norm.cdf(self._unit_normal(seed)), np.where(rate > 0, rate, 1.0))
        return np.where(rate > 0, drawn, 0.0)

    def _unit_normal(self, seed: int) -> np.ndarray:
        return np.asarray(Space(self.state.box).normal(seed, NOISE).field, np.float64)
