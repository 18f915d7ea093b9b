"""FastPM's kick-drift-kick: leapfrog whose factors reproduce Zel'dovich motion at any step size.

Feng, Chu, Seljak and McDonald 2016, MNRAS 463, 2273 (arXiv:1603.00476), equations 21 to 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from flowpm_dist.cosmology import GrowthFunctions
from flowpm_dist.integrators.base import Integrator, Step


class FastPM(Integrator):
    """Half kick, drift, half kick.

    Args:
        half_step: where a step is halved: at the "arithmetic" mean of its edges (as pmwd does) or
            at the "geometric" one (as FastPM does).

    Raises:
        ValueError: another mean.
    """

    def __init__(self, half_step: Literal["arithmetic", "geometric"] = "arithmetic") -> None:
        if half_step not in ("arithmetic", "geometric"):
            raise ValueError(f"half_step {half_step!r} is neither arithmetic nor geometric")
        self.half_step = half_step

    def steps(self, growth: GrowthFunctions, edges: Sequence[float]) -> list[Step]:
        """See `Integrator.steps`."""
        pairs = zip(edges[:-1], edges[1:], strict=True)
        return [self._step(growth, float(start), float(stop)) for start, stop in pairs]

    def _step(self, growth: GrowthFunctions, start: float, stop: float) -> Step:
        geometric = self.half_step == "geometric"
        middle = (start * stop) ** 0.5 if geometric else 0.5 * (start + stop)
        return Step(
            start,
            stop,
            opening=kick_factor(growth, start, middle, start),
            drift=drift_factor(growth, start, stop, middle),
            closing=kick_factor(growth, middle, stop, stop),
        )


def drift_factor(growth: GrowthFunctions, start: float, stop: float, at: float) -> tf.Tensor:
    """(D1(stop) - D1(start)) / G_D(at), for a velocity known at `at` [1/H0]."""
    return (growth.d1(stop) - growth.d1(start)) / growth.g_drift(at)


def kick_factor(growth: GrowthFunctions, start: float, stop: float, at: float) -> tf.Tensor:
    """(G_D(stop) - G_D(start)) / G_K(at), for a force known at `at` [1/H0]."""
    return (growth.g_drift(stop) - growth.g_drift(start)) / growth.g_kick(at)
