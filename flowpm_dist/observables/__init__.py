"""The observables of a survey: structure formation, redshift space, biased tracers.

`ForwardModel` goes from white noise to the observed density, `ConvergenceModel` to maps of weak
lensing.
"""

from meshimpl.lazy import lazy_names

_HOMES = {
    "ConvergenceModel": "convergence_model",
    "ForwardModel": "forward_model",
    "ForwardModelOptions": "options",
    "Parameters": "universe_model",
    "UniverseModel": "universe_model",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
