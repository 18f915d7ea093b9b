"""Cosmology: parameters, expansion, growth and linear power, differentiable in float64."""

from meshimpl.lazy import lazy_names

_HOMES = {
    "Background": "background",
    "Cosmology": "parameters",
    "Distances": "distances",
    "Growth": "growth",
    "GrowthFunctions": "growth",
    "Halofit": "halofit",
    "InterpolatedGrowth": "interpolated",
    "InterpolatedTransfer": "interpolated",
    "LinearPower": "power",
    "NonlinearPower": "nonlinear",
    "PMWD_TRANSFER_NODES": "interpolated",
    "TabulatedPower": "tabulated",
    "lensing_weight": "distances",
    "limber_power": "limber",
    "sigma8": "power",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
