"""The parts of a reconstruction, as its run file asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.config.objects import simulation_of
from flowpm_dist.config.reconstruction import ReconstructionConfig
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.observables.forward_model import ForwardModel
from flowpm_dist.reconstruction.hmc import HMC
from flowpm_dist.reconstruction.likelihoods import Annealing, Gaussian, Likelihood, Poisson
from flowpm_dist.reconstruction.microcanonical import Microcanonical
from flowpm_dist.reconstruction.mock import Mock
from flowpm_dist.reconstruction.observations import Observations, ObservedBlock
from flowpm_dist.reconstruction.optimisers import LBFGS, Adam, Optimiser
from flowpm_dist.reconstruction.posterior import Posterior
from flowpm_dist.reconstruction.sampler import Sampler
from flowpm_dist.reconstruction.search import Stage, default_stages
from meshimpl.process_mesh import ProcessMesh


def model_of(config: ReconstructionConfig, mesh: ProcessMesh) -> ForwardModel:
    """From white noise to what is observed, with a halo that holds."""
    order = 1 if config.model.structure == "1lpt" else 2
    simulation = simulation_of(
        Cosmology(**config.cosmology.model_dump(exclude_none=True)),
        config.box,
        InitialOptions(lpt_order=order),  # type: ignore[arg-type]
        config.evolution,
        config.run,
        mesh=mesh,
    )
    model = ForwardModel(
        simulation,
        config.model.structure,
        redshift_space=config.model.redshift_space,
        bias=config.model.bias,
    )
    model.hold_halo()
    return model


@dataclass(frozen=True)
class Observed:
    """What this rank knows of the observed universe.

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

    def map_of(self) -> np.ndarray:
        """The data as a density; 0 where nothing is observed."""
        per_cell = self.scale * (self.mask if isinstance(self.likelihood, Poisson) else 1.0)
        seen = self.mask > 0
        return np.where(seen, self.data / np.where(seen, per_cell, 1.0), 0.0)


def observed_of(config: ReconstructionConfig, model: ForwardModel) -> Observed:
    """The data of a run file: this rank's block of its files, or of a mock. On all ranks together.

    Raises:
        VolumeError: a file cannot be read.
    """
    box, section = model.simulation.box, config.data
    block = Observations(section, config.box.grid).block(box.offset, box.block)
    mock = None if section.mock_seed is None else Mock.of(model, section.mock_seed)
    data = block.data if mock is None else _of_mock(mock, config, block)
    assert data is not None
    likelihood = likelihood_of(config, box, block, data)
    return Observed(data, block.mask, likelihood, mock, section.mean_count or 1.0)


def _of_mock(mock: Mock, config: ReconstructionConfig, block: ObservedBlock) -> np.ndarray:
    section = config.data
    if section.kind == "counts":
        assert section.mean_count is not None
        return mock.counts(section.mean_count, block.mask, section.noise_seed)
    if not section.add_noise:
        return np.where(block.mask > 0, np.asarray(mock.density, np.float64), 1.0)
    assert block.sigma is not None
    return mock.noisy_density(block.sigma, block.mask, section.noise_seed)


def likelihood_of(
    config: ReconstructionConfig, box: Box, block: ObservedBlock, data: np.ndarray
) -> Likelihood:
    """Of the data in a block, for the densities of a box, or of those of several chains."""
    observed = tf.constant(block.mask, box.dtype)
    if config.data.kind == "counts":
        return Poisson(box, tf.constant(data, box.dtype), config.data.mean_count, observed)
    density = tf.constant(data, box.dtype)
    return Gaussian(box, density, block.sigma, observed, config.model.error)


def optimiser_of(config: ReconstructionConfig) -> Optimiser:
    """The way down."""
    search = config.search
    return LBFGS(search.history) if search.optimiser == "lbfgs" else Adam(search.rate)


def sampler_of(config: ReconstructionConfig) -> Sampler:
    """That draws."""
    asked = config.sampler
    if asked.method == "hmc":
        return HMC(leaps=asked.leaps, target=asked.target, seed=asked.seed)
    return Microcanonical(
        leaps=asked.leaps,
        length=asked.length,
        energy_error=asked.energy_error,
        seed=asked.seed,
    )


def stages_of(config: ReconstructionConfig, posterior: Posterior) -> list[Stage]:
    """Those that are asked for, or default ones."""
    if config.search.stages is None:
        return default_stages(posterior, config.search.evaluations)
    return [
        Stage(Annealing(radius, inflation), evaluations)
        for radius, inflation, evaluations in config.search.stages
    ]
