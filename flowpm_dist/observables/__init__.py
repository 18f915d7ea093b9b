"""The observables of a survey: structure formation, redshift space, biased tracers.

`ForwardModel` goes from white noise to the observed density.
"""

from meshimpl.lazy import lazy_names

_HOMES = {
    "ForwardModel": "forward_model",
    "ForwardModelOptions": "options",
    "Parameters": "forward_model",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
