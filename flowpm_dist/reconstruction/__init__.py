"""Reconstruction: the initial conditions of an observed universe, by gradients.

::

    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel

    model = ForwardModel(simulation, "pm")
    posterior = rec.Posterior(model, rec.Gaussian(box, data, sigma=0.5))
    found = rec.Search(posterior, rec.LBFGS()).run()
"""

from meshimpl.imports import lazy_names

_HOMES = {
    "AdjustedMicrocanonical": "adjusted_microcanonical",
    "Annealing": "likelihoods.base",
    "Chains": "chains",
    "EXACT": "likelihoods.base",
    "EvenPosterior": "posterior",
    "Gaussian": "likelihoods.gaussian",
    "GaussianMaps": "likelihoods.gaussian_maps",
    "HMC": "hmc",
    "LBFGS": "lbfgs",
    "Likelihood": "likelihoods.base",
    "LogDensity": "log_density",
    "MetropolisSampler": "sampler",
    "Microcanonical": "microcanonical",
    "NoProgressError": "lbfgs",
    "Phase": "chains",
    "PointCheckpoints": "checkpoints",
    "Poisson": "likelihoods.poisson",
    "Posterior": "posterior",
    "ReconstructionOptions": "options",
    "Sampler": "sampler",
    "Search": "search",
    "Space": "unknowns",
    "Stage": "search",
    "Universe": "universe",
    "Unknowns": "unknowns",
    "convergence": "diagnostics",
    "default_stages": "search",
    "first_points": "chains",
    "large_modes": "diagnostics",
    "sum_over_cells": "likelihoods.base",
    "warm_up": "chains",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
