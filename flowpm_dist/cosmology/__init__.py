"""Cosmology: parameters, expansion, growth and linear power, differentiable in float64."""

from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.interpolated import (
    PMWD_TRANSFER_NODES,
    InterpolatedGrowth,
    InterpolatedTransfer,
)
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower, sigma8

__all__ = [
    "PMWD_TRANSFER_NODES",
    "Background",
    "Cosmology",
    "Growth",
    "GrowthFunctions",
    "InterpolatedGrowth",
    "InterpolatedTransfer",
    "LinearPower",
    "sigma8",
]
