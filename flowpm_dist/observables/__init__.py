"""The observables of a survey: structure formation, redshift space, biased tracers.

`ForwardModel` computes the observed density from white noise, `ConvergenceModel` maps of weak
lensing.
"""

from meshimpl.imports import lazy_names

_HOMES = {
    "ConvergenceModel": "convergence_model",
    "CountsOptions": "options",
    "DensityOptions": "options",
    "ForwardModel": "forward_model",
    "Parameters": "universe_model",
    "StructureFormation": "universe_model",
    "UniverseModel": "universe_model",
    "as_factor": "universe_model",
    "local_values": "universe_model",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
