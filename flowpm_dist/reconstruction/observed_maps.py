"""Observed maps of the convergence, from a file or of a mock, and their likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.map_files import read_convergence
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.reconstruction.likelihoods import GaussianMaps
from flowpm_dist.reconstruction.mock import Mock
from flowpm_dist.reconstruction.plan import ReconstructionPlan


@dataclass(frozen=True)
class ObservedMaps:
    """Observed maps of the convergence, and the likelihood of these data.

    Attributes:
        data: [source, x, y] [1], float64, whole on every rank.
        likelihood: of the data.
        mock: the truth, where it is known.
    """

    data: np.ndarray
    likelihood: GaussianMaps
    mock: Mock | None

    @classmethod
    def of(cls, plan: ReconstructionPlan, model: UniverseModel) -> ObservedMaps:
        """Returns the maps of a file, or of a mock with noise. On all ranks together.

        Raises:
            UserError: a file that cannot be read, or does not fit.
        """
        cone, asked = plan.lightcone, plan.data
        assert cone is not None
        if asked.mock_seed is None:
            assert asked.file is not None
            mock = None
            data = read_convergence(asked.file, len(cone.sources), cone.pixels, cone.field_of_view)
        else:
            mock = Mock.of(model, asked.mock_seed)
            data = np.asarray(mock.seen, np.float64)
            if asked.add_noise:
                assert cone.shape_noise is not None
                data = data + cone.noise(cone.shape_noise.seed)
        return cls(data, likelihood_of_maps(cone, model.simulation.box, data), mock)


def likelihood_of_maps(cone: ConvergenceOptions, box: Box, data: np.ndarray) -> GaussianMaps:
    """Returns the likelihood of maps with the noise of the shapes of galaxies.

    Args:
        cone: the light cone.
        box: of one universe, or of several chains.
        data: [source, x, y].
    """
    return GaussianMaps(box, tf.constant(data, box.dtype), cone.pixel_sigma())
