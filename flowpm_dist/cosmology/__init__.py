"""Cosmology: parameters, expansion, growth and linear power, differentiable in float64."""

from meshimpl.imports import lazy_names

_HOMES = {
    "Background": "background",
    "Cosmology": "parameters",
    "Distances": "background",
    "Fluid": "background",
    "Growth": "growth",
    "Halofit": "nonlinear",
    "LinearPower": "power",
    "NonlinearPower": "nonlinear",
    "PowerTable": "power_table",
    "TabulatedPower": "nonlinear",
    "Theory": "theory",
    "lensing_weight": "line_of_sight",
    "limber_power": "line_of_sight",
    "parameters_for": "code_parameters",
    "sigma8": "theory",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
