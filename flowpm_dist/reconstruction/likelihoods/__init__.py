"""Likelihoods of the data, one in each file; your own derive from `Likelihood`."""

from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing, Likelihood, sum_over_cells
from flowpm_dist.reconstruction.likelihoods.gaussian import Gaussian
from flowpm_dist.reconstruction.likelihoods.gaussian_maps import GaussianMaps
from flowpm_dist.reconstruction.likelihoods.poisson import Poisson

__all__ = [
    "EXACT",
    "Annealing",
    "Gaussian",
    "GaussianMaps",
    "Likelihood",
    "Poisson",
    "sum_over_cells",
]
