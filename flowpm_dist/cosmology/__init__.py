"""Cosmology: parameters, expansion, growth and linear power, differentiable in float64."""

from meshimpl.imports import lazy_names

_HOMES = {
    "Background": "parameters",
    "Cosmology": "parameters",
    "Distances": "distances",
    "Growth": "growth",
    "Halofit": "nonlinear",
    "LinearPower": "power",
    "NonlinearPower": "nonlinear",
    "TabulatedPower": "nonlinear",
    "lensing_weight": "distances",
    "limber_power": "distances",
    "sigma8": "power",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
