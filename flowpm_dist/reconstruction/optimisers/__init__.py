"""Optimisers, one in each file."""

from flowpm_dist.reconstruction.optimisers.adam import Adam
from flowpm_dist.reconstruction.optimisers.base import (
    Memory,
    NoProgressError,
    Optimiser,
    Report,
    StalledError,
)
from flowpm_dist.reconstruction.optimisers.lbfgs import LBFGS

__all__ = ["LBFGS", "Adam", "Memory", "NoProgressError", "Optimiser", "Report", "StalledError"]
