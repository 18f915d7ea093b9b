"""Initial conditions: white noise, the linear field, Lagrangian perturbation theory."""

from meshimpl.imports import lazy_names

_HOMES = {
    "InitialConditions": "conditions",
    "linear_amplitude": "conditions",
    "lpt_function": "lpt",
    "noise_function": "conditions",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
