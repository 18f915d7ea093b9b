"""Checks of the arguments of a simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowpm_dist.evolution.integrators import Integrator


def three(value: Any, kind: type, name: str) -> tuple[Any, Any, Any]:
    """Returns one value for each axis.

    Args:
        value: one number, or three.
        kind: int or float.
        name: of the argument, for messages.

    Raises:
        ValueError: other than one number or three, or not whole where `kind` is int.
    """
    values = [value] * 3 if np.ndim(value) == 0 else list(value)
    if len(values) != 3:
        raise ValueError(f"{name} {value!r}: one number or three are needed")
    if kind is int and any(int(v) != v for v in values):
        raise ValueError(f"{name} {value!r}: whole numbers are needed")
    x, y, z = (kind(v) for v in values)
    return x, y, z


def check_edges(steps: Any, integrator: Integrator) -> np.ndarray:
    """Returns the edges of steps in scale factor, float64 [steps + 1].

    Raises:
        ValueError: they do not increase from 0 or more, or from above 0 where the integrator must.
    """
    edges = np.asarray(steps, dtype=np.float64)
    if edges.ndim != 1 or edges.size < 2 or not (np.diff(edges) > 0).all() or edges[0] < 0:
        raise ValueError(
            f"steps {steps!r}: at least two scale factors, not below 0 and increasing, are needed"
        )
    if edges[0] == 0 and not integrator.starts_at_zero:
        raise ValueError(f"steps {steps!r}: this integrator must start later than a = 0")
    return edges
