"""FastPM's kick-drift-kick: leapfrog whose factors reproduce Zel'dovich motion at any step size.

A drift from a0 to a1 with the velocity at av takes (D1(a1) - D1(a0)) / G_D(av), a kick with the
force at af takes (G_D(a1) - G_D(a0)) / G_K(af), both in 1/H0.
Feng, Chu, Seljak and McDonald 2016, MNRAS 463, 2273 (arXiv:1603.00476), equations 21 to 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from flowpm_dist.cosmology import GrowthFunctions
from flowpm_dist.evolution.integrators.base import Integrator, Schedule, kick_drift_kick, rows

HALF_STEPS = ("arithmetic", "geometric")


def half_step_times(edges: Sequence[float], half_step: str) -> np.ndarray:
    """Where each step is halved: at the arithmetic or geometric mean of its edges [1].

    Raises:
        ValueError: another mean.
    """
    if half_step not in HALF_STEPS:
        raise ValueError(f"half_step {half_step!r} is not one of {', '.join(HALF_STEPS)}")
    a = np.asarray(edges, dtype=np.float64)
    return np.sqrt(a[:-1] * a[1:]) if half_step == "geometric" else 0.5 * (a[:-1] + a[1:])


class FastPM(Integrator):
    """Half kick, drift, half kick.

    Args:
        half_step: where a step is halved: at the "arithmetic" mean of its edges (as pmwd does) or
            at the "geometric" one (as FastPM does).

    Raises:
        ValueError: another mean.
    """

    def __init__(self, half_step: Literal["arithmetic", "geometric"] = "arithmetic") -> None:
        half_step_times([1.0, 1.0], half_step)
        self.half_step = half_step

    def schedule(self, growth: GrowthFunctions, edges: Sequence[float]) -> Schedule:
        """See `Integrator.schedule`. The growth is evaluated for all times at once."""
        a = np.asarray(edges, dtype=np.float64)
        d1, drift, kick = growth.d1(a), growth.g_drift(a), growth.g_kick(a)
        drift_middle = growth.g_drift(half_step_times(edges, self.half_step))
        gravity = 1.5 * growth.background.Omega_m
        openings = gravity * (drift_middle - drift[:-1]) / kick[:-1]
        drifts = (d1[1:] - d1[:-1]) / drift_middle
        closings = gravity * (drift[1:] - drift_middle) / kick[1:]
        return kick_drift_kick(
            edges, *(rows(1.0, factor, 0.0, 0.0) for factor in (openings, drifts, closings))
        )
