"""The bias of tracers, one scheme in each file."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from flowpm_dist.observables.bias.base import Bias
from flowpm_dist.observables.bias.eulerian import EulerianBias
from flowpm_dist.observables.bias.lagrangian import LagrangianBias
from flowpm_dist.options import python_object

SCHEMES: tuple[type[Bias], ...] = (EulerianBias, LagrangianBias)

__all__ = ["SCHEMES", "Bias", "EulerianBias", "LagrangianBias", "bias_with"]


def bias_with(names: Collection[str], named: str | None = None) -> Bias | None:
    """Returns the scheme that has these parameters, or None if there are none.

    Args:
        names: the names of the parameters.
        named: "package.module:object" of a custom class.

    Raises:
        ValueError: the scheme does not have them, or there is none.
    """
    if named is not None:
        own = cast(Bias, python_object(named)())
        if missing := set(own.parameters) ^ set(names):
            told = ", ".join(own.parameters) or "none"
            raise ValueError(
                f"bias_scheme {named!r} has the parameters {told}; bias must have a value for each "
                f"(differing: {', '.join(sorted(missing))})"
            )
        return own
    for scheme in SCHEMES:
        if names and set(names) <= set(scheme.parameters):
            return scheme()
    if names:
        known = "; ".join(", ".join(scheme.parameters) for scheme in SCHEMES)
        raise ValueError(f"no bias scheme has the parameters {', '.join(names)} ({known})")
    return None
