"""Adjoints of an evolution, one in each file; a new adjoint derives from `Adjoint`."""

from flowpm_dist.evolution.adjoints.base import ADJOINTS, Adjoint
from flowpm_dist.evolution.adjoints.direct import DirectAdjoint
from flowpm_dist.evolution.adjoints.reversible import ReversibleAdjoint

ADJOINTS.update({"reversible": ReversibleAdjoint, "direct": DirectAdjoint})

__all__ = ["ADJOINTS", "Adjoint", "DirectAdjoint", "ReversibleAdjoint"]
