"""Ways to differentiate an evolution, one a file; one of your own derives from `Adjoint`."""

from flowpm_dist.evolution.adjoints.base import ADJOINTS, Adjoint, AdjointChoice
from flowpm_dist.evolution.adjoints.direct import DirectAdjoint
from flowpm_dist.evolution.adjoints.reversible import ReversibleAdjoint

ADJOINTS.update({"reversible": ReversibleAdjoint, "direct": DirectAdjoint})

__all__ = ["ADJOINTS", "Adjoint", "AdjointChoice", "DirectAdjoint", "ReversibleAdjoint"]
