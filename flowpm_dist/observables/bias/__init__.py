"""The bias of tracers, one scheme in each file."""

from __future__ import annotations

from collections.abc import Collection

from flowpm_dist.observables.bias.base import Bias
from flowpm_dist.observables.bias.eulerian import EulerianBias
from flowpm_dist.observables.bias.lagrangian import LagrangianBias

SCHEMES: tuple[type[Bias], ...] = (EulerianBias, LagrangianBias)

__all__ = ["SCHEMES", "Bias", "EulerianBias", "LagrangianBias", "bias_with"]


def bias_with(names: Collection[str]) -> Bias | None:
    """Returns the scheme that has these parameters, or None if there are none."""
    for scheme in SCHEMES:
        if names and set(names) <= set(scheme.parameters):
            return scheme()
    if names:
        known = "; ".join(", ".join(scheme.parameters) for scheme in SCHEMES)
        raise ValueError(f"no bias scheme has the parameters {', '.join(names)} ({known})")
    return None
