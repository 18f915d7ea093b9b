"""The parts of a reconstruction, made as its plan asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.observables.forward_model import ForwardModel
from flowpm_dist.reconstruction.hmc import HMC
from flowpm_dist.reconstruction.likelihoods import Annealing, Gaussian, Likelihood, Poisson
from flowpm_dist.reconstruction.microcanonical import Microcanonical
from flowpm_dist.reconstruction.minimisers import LBFGS, AdamMinimiser, Minimiser
from flowpm_dist.reconstruction.mock import Mock
from flowpm_dist.reconstruction.observations import Observations, ObservedBlock
from flowpm_dist.reconstruction.options import SamplerOptions, SearchOptions
from flowpm_dist.reconstruction.plan import ReconstructionPlan
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.sampler import Sampler
from flowpm_dist.reconstruction.search import Stage, default_stages
from meshimpl.process_mesh import ProcessMesh


def model_of(plan: ReconstructionPlan, mesh: ProcessMesh) -> ForwardModel:
    """Returns the model from white noise to what is observed, with a halo that holds."""
    cosmology = Cosmology(**plan.cosmology.model_dump(exclude_none=True))
    asked = plan.model
    model = ForwardModel(
        plan.simulation.simulation(cosmology, mesh=mesh),
        asked.structure,
        redshift_space=asked.redshift_space,
        bias=asked.bias,
    )
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
    """

    data: np.ndarray
    mask: np.ndarray
    likelihood: Likelihood
    mock: Mock | None
    scale: float

    def density(self) -> np.ndarray:
        """Returns the data as a density; 0 where nothing is observed."""
        per_cell = self.scale * (self.mask if isinstance(self.likelihood, Poisson) else 1.0)
        seen = self.mask > 0
        return np.where(seen, self.data / np.where(seen, per_cell, 1.0), 0.0)


def observed_of(plan: ReconstructionPlan, model: ForwardModel) -> Observed:
    """Returns this rank's block of the data, of files or of a mock. On all ranks together.

    Raises:
        VolumeError: a file cannot be read.
    """
    box, asked = model.simulation.box, plan.data
    block = Observations(asked, plan.grid).block(box.offset, box.block)
    mock = None if asked.mock_seed is None else Mock.of(model, asked.mock_seed)
    data = block.data if mock is None else _data_of_mock(mock, plan, block)
    assert data is not None
    likelihood = likelihood_of(plan, box, block, data)
    return Observed(data, block.mask, likelihood, mock, asked.mean_count or 1.0)


def _data_of_mock(mock: Mock, plan: ReconstructionPlan, block: ObservedBlock) -> np.ndarray:
    asked = plan.data
    if asked.kind == "counts":
        assert asked.mean_count is not None
        return mock.counts(asked.mean_count, block.mask, asked.noise_seed)
    if not asked.add_noise:
        return np.where(block.mask > 0, np.asarray(mock.density, np.float64), 1.0)
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
    """
    observed, values = tf.constant(block.mask, box.dtype), tf.constant(data, box.dtype)
    if plan.data.kind == "counts":
        return Poisson(box, values, plan.data.mean_count, observed)
    return Gaussian(box, values, block.sigma, observed, plan.model.error)


def minimiser_of(search: SearchOptions) -> Minimiser:
    """Returns the minimiser of the search."""
    return LBFGS(search.history) if search.optimiser == "lbfgs" else AdamMinimiser(search.rate)


def sampler_of(asked: SamplerOptions) -> Sampler:
    """Returns the sampler of the chains."""
    if asked.method == "hmc":
        return HMC(leaps=asked.leaps, target=asked.target, seed=asked.seed)
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
