"""The parts of a reconstruction, made as its plan asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.observables.convergence_model import ConvergenceModel
from flowpm_dist.observables.forward_model import forward_model_of
from flowpm_dist.observables.observations import Observations, ObservedBlock
from flowpm_dist.observables.options import ObservationError
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.options import nearest, python_object
from flowpm_dist.reconstruction.adjusted_microcanonical import AdjustedMicrocanonical
from flowpm_dist.reconstruction.hmc import HMC
from flowpm_dist.reconstruction.likelihoods import Annealing, Gaussian, Likelihood, Poisson
from flowpm_dist.reconstruction.likelihoods.base import in_dtype_of
from flowpm_dist.reconstruction.microcanonical import Microcanonical
from flowpm_dist.reconstruction.minimisers import LBFGS, AdamMinimiser, Minimiser
from flowpm_dist.reconstruction.mock import Mock
from flowpm_dist.reconstruction.observed_maps import ObservedMaps
from flowpm_dist.reconstruction.options import SamplerOptions, SearchOptions
from flowpm_dist.reconstruction.plan import ReconstructionPlan
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.sampler import Sampler
from flowpm_dist.reconstruction.search import Stage, default_stages
from meshimpl.process_mesh import ProcessMesh


def model_of(plan: ReconstructionPlan, mesh: ProcessMesh) -> UniverseModel:
    """Returns the model from white noise to what is observed, with a halo that holds.

    Raises:
        ObservationError: an object of the user's own that cannot serve.
    """
    cosmology = Cosmology(**plan.cosmology.model_dump(exclude_none=True))
    simulation, cone = plan.simulation.simulation(cosmology, mesh=mesh), plan.lightcone
    model: UniverseModel
    if cone is None:
        model = forward_model_of(plan.observation, simulation)
    else:
        model = ConvergenceModel(simulation, cone.light_cone(), *cone.population())
    model.hold_halo()
    return model


@dataclass(frozen=True)
class Observed:
    """This rank's block of the observed universe, and the likelihood of the data.

    Attributes:
        data: density or counts, float64 block [x, y, z].
        mask: share of each cell that is observed, float64 block.
        likelihood: of the data.
        mock: the truth, where it is known.
        scale: a cell's data over its density: 1, or the mean count.
        counts: whether the data are counts.
    """

    data: np.ndarray
    mask: np.ndarray
    likelihood: Likelihood
    mock: Mock | None
    scale: float
    counts: bool = False

    def density(self) -> np.ndarray:
        """Returns the data as a density; 0 where nothing is observed."""
        per_cell = self.scale * (self.mask if self.counts else 1.0)
        seen = self.mask > 0
        return np.where(seen, self.data / np.where(seen, per_cell, 1.0), 0.0)


def observed_of(plan: ReconstructionPlan, model: UniverseModel) -> Observed | ObservedMaps:
    """Returns the data, of files or of a mock: this rank's block, or maps. On all ranks together.

    Raises:
        UserError: a file cannot be read.
    """
    if plan.lightcone is not None:
        return ObservedMaps.of(plan, model)
    box, asked = model.simulation.box, plan.data
    observations = Observations(plan.observation, plan.grid, asked.file)
    block = observations.block(box.offset, box.block)
    mock = None if asked.mock_seed is None else Mock.of(model, asked.mock_seed)
    data = block.data if mock is None else _data_of_mock(mock, plan, block)
    assert data is not None
    likelihood = likelihood_of(plan, box, block, data)
    mean_count = plan.observation.mean_count
    return Observed(data, block.mask, likelihood, mock, mean_count or 1.0, mean_count is not None)


def _data_of_mock(mock: Mock, plan: ReconstructionPlan, block: ObservedBlock) -> np.ndarray:
    asked, mean_count = plan.data, plan.observation.mean_count
    if plan.observation.kind == "counts":
        assert mean_count is not None
        return mock.counts(mean_count, block.mask, asked.noise_seed)
    if not asked.add_noise:
        return np.where(block.mask > 0, np.asarray(mock.seen, np.float64), 1.0)
    assert block.sigma is not None
    return mock.noisy_density(block.sigma, block.mask, asked.noise_seed)


def likelihood_of(
    plan: ReconstructionPlan, box: Box, block: ObservedBlock, data: np.ndarray
) -> Likelihood:
    """Returns the likelihood of the data in a block, for the densities of a box.

    Args:
        plan: the kind of data and the error of the model.
        box: of one universe, or of several chains.
        block: what this rank observes.
        data: density or counts [x, y, z].

    Raises:
        ObservationError: an object of the user's own that cannot serve.
    """
    observed, values = tf.constant(block.mask, box.dtype), tf.constant(data, box.dtype)
    mean_count, error = plan.observation.mean_count, plan.likelihood.error
    noise = block.sigma if mean_count is None else mean_count
    if (name := plan.likelihood.name) is not None:
        try:
            found = python_object(name)(box, values, in_dtype_of(box, noise), observed)
        except ValueError as error_of_object:
            raise ObservationError(f"likelihood {name!r}: {error_of_object}") from error_of_object
        own = cast(Likelihood, found)
        for missing in plan.of_likelihood:
            if missing not in own.parameters:
                raise ObservationError(
                    f"likelihood {name!r} has no parameter {missing}"
                    f"{nearest(missing, own.parameters)} (it has "
                    f"{', '.join(own.parameters) or 'none'}): leave priors.{missing} out, or name "
                    "it in `parameters` of the likelihood"
                )
        return own
    if mean_count is not None:
        return Poisson(box, values, noise, observed)
    return Gaussian(box, values, noise, observed, error)


def minimiser_of(search: SearchOptions) -> Minimiser:
    """Returns the minimiser of the search."""
    return LBFGS(search.history) if search.optimiser == "lbfgs" else AdamMinimiser(search.rate)


def sampler_of(asked: SamplerOptions) -> Sampler:
    """Returns the sampler of the chains."""
    if asked.method == "hmc":
        return HMC(leaps=asked.leaps, target=asked.target, seed=asked.seed)
    if asked.method == "adjusted-microcanonical":
        return AdjustedMicrocanonical(
            leaps=asked.leaps, length=asked.length, target=asked.target, seed=asked.seed
        )
    return Microcanonical(
        leaps=asked.leaps,
        length=asked.length,
        energy_error=asked.energy_error,
        seed=asked.seed,
    )


def stages_of(search: SearchOptions, posterior: Posterior) -> list[Stage]:
    """Returns the stages that are asked for, or the default ones."""
    if search.stages is None:
        return default_stages(posterior, search.evaluations)
    return [
        Stage(Annealing(radius, inflation), evaluations)
        for radius, inflation, evaluations in search.stages
    ]
