"""Likelihoods of the data, one in each file; your own derive from `Likelihood`."""

from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing, Likelihood, sum_over_cells
from flowpm_dist.reconstruction.likelihoods.gaussian import Gaussian
from flowpm_dist.reconstruction.likelihoods.poisson import LEAST_DENSITY, Poisson, positive_density

__all__ = [
    "EXACT",
    "LEAST_DENSITY",
    "Annealing",
    "Gaussian",
    "Likelihood",
    "Poisson",
    "positive_density",
    "sum_over_cells",
]
