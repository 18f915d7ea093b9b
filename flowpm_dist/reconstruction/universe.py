"""A universe with its observation, such as a mock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import tensorflow as tf

from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.observables.universe_model import Parameters, UniverseModel
from flowpm_dist.reconstruction.unknowns import Space, Use
from flowpm_dist.simulation.state import State


@dataclass(frozen=True)
class Universe:
    """A reconstructed universe or a mock, with its observation without noise.

    Attributes:
        state: its particles and initial conditions.
        expected: what the model expects to be observed: a density, block [x, y, z] of mean 1, or
            maps.
    """

    state: State
    expected: tf.Tensor

    @classmethod
    def of(cls, model: UniverseModel, noise: tf.Tensor, parameters: Parameters) -> Self:
        """Returns the universe of white noise, block [x, y, z], and of values of parameters."""
        return cls(*model.retry_with_wider_halo(lambda: model.run_and_observe(noise, parameters)))

    @classmethod
    def mock(cls, model: UniverseModel, seed: int) -> Self:
        """Returns the universe of a seed, with the white noise of `Simulation.run` for that seed.

        Its cosmology and bias are the model's own.
        """
        noise = noise_function(model.simulation.box)(np.asarray(seed, np.int64))
        return cls.of(model, noise, {})

    def unit_normal(self, seed: int) -> np.ndarray:
        """Returns noise for a mock's observation, float64 block [x, y, z]."""
        return np.asarray(Space(self.state.box).normal(seed, Use.NOISE).field, np.float64)
