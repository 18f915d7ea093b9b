"""Cosmology: parameters, expansion, growth and linear power, differentiable in float64."""

from meshimpl.lazy import lazy_names

_HOMES = {
    "Background": "background",
    "Cosmology": "parameters",
    "Distances": "distances",
    "Growth": "growth",
    "GrowthFunctions": "growth",
    "InterpolatedGrowth": "interpolated",
    "InterpolatedTransfer": "interpolated",
    "LinearPower": "power",
    "PMWD_TRANSFER_NODES": "interpolated",
    "lensing_weight": "distances",
    "sigma8": "power",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
