"""What a reconstruction observes: its model, its data and their likelihood."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.white_noise import noise_function
from flowpm_dist.observables.universe_model import Parameters, UniverseModel
from flowpm_dist.reconstruction.likelihoods import Likelihood
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.unknowns import Space, Use
from flowpm_dist.simulation.state import State
from meshimpl.process_mesh import ProcessMesh


def model_of(options: ReconstructionOptions, mesh: ProcessMesh) -> UniverseModel:
    """Returns the model from white noise to what is observed, with a fixed halo.

    Raises:
        ObservationError: a custom structure or bias that cannot be used.
    """
    cosmology = Cosmology(**options.cosmology.model_dump(exclude_none=True))
    simulation = options.simulation(cosmology, mesh=mesh)
    model = options.observation.forward_model(simulation, options.lightcone)
    model.hold_halo()
    return model


@dataclass(frozen=True)
class Universe:
    """A universe, found or of a mock, with its observation without noise.

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
        return cls(*model.retry_with_wider_halo(lambda: model.look(noise, parameters)))

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


class Observed(abc.ABC):
    """The data, their likelihood, and how the results show them; a class for each kind of data.

    Args:
        options: the checked run file.
        data: float64: this rank's block of a density or of counts, or whole maps.
        likelihood: the likelihood of the data.
        truth: the universe of a mock; None where the truth is not known.
    """

    def __init__(
        self,
        options: ReconstructionOptions,
        data: np.ndarray,
        likelihood: Likelihood,
        truth: Universe | None,
    ) -> None:
        self.options, self.data, self.likelihood, self.truth = options, data, likelihood, truth

    @classmethod
    @abc.abstractmethod
    def of(cls, options: ReconstructionOptions, model: UniverseModel) -> Self:
        """Returns the data of a file or of a mock. On all ranks together.

        Raises:
            UserError: a file that cannot be read, or does not fit.
        """

    @staticmethod
    @abc.abstractmethod
    def kept_likelihood(options: ReconstructionOptions, box: Box, folder: Path) -> Likelihood:
        """Returns the likelihood of the data that a search has written, for chains.

        Args:
            options: the checked run file.
            box: the box of the chains.
            folder: the folder of the reconstruction.
        """

    def fields(self, found: Universe, *, fits_amplitude: bool) -> dict[str, Field]:
        """Returns the fields of the data for reconstruction.zarr."""
        return {}

    def facts(self, maps: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns what result.json says of the maps."""
        return {}

    @abc.abstractmethod
    def maps(self, found: Universe) -> dict[str, np.ndarray]:
        """Returns maps of data and reconstruction by name, on rank 0. On all ranks together."""

    @abc.abstractmethod
    def write(self, folder: Path, maps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
        """Writes the maps and their figures. On rank 0.

        Raises:
            WriteError: they cannot be written.
        """


def observed_kind(options: ReconstructionOptions) -> type[Observed]:
    """Returns the class of the data of an observation: cells or maps."""
    from flowpm_dist.reconstruction.observed_cells import ObservedCells
    from flowpm_dist.reconstruction.observed_maps import ObservedMaps

    return ObservedMaps if options.observation.layout == "maps" else ObservedCells
