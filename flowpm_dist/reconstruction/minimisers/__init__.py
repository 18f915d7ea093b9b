"""Minimisers of minus the log posterior, one in each file."""

from flowpm_dist.reconstruction.minimisers.adam import AdamMinimiser
from flowpm_dist.reconstruction.minimisers.base import (
    Memory,
    Minimiser,
    NoProgressError,
    Report,
    StalledError,
)
from flowpm_dist.reconstruction.minimisers.lbfgs import LBFGS

__all__ = [
    "LBFGS",
    "AdamMinimiser",
    "Memory",
    "NoProgressError",
    "Minimiser",
    "Report",
    "StalledError",
]
