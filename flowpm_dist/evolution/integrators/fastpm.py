"""FastPM's kick-drift-kick: leapfrog whose factors reproduce Zel'dovich motion at any step size.

A drift from a0 to a1 with the velocity at av has the factor (D1(a1) - D1(a0)) / G_D(av). A kick
with the force at af has the factor (G_D(a1) - G_D(a0)) / G_K(af). Both are in 1/H0.
Feng, Chu, Seljak and McDonald 2016, MNRAS 463, 2273 (arXiv:1603.00476), equations 21 to 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from flowpm_dist.cosmology.arrays import arrays_within, taken
from flowpm_dist.evolution.integrators.base import (
    Integrator,
    Interpolation,
    Schedule,
    kick_drift_kick,
    kick_drift_kick_between,
    last_kicks,
    rows,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.growth import Growth

HalfStep = Annotated[
    Literal["arithmetic", "geometric"], Field(description='"arithmetic" or "geometric"')
]


def half_step_times(edges: Sequence[float], half_step: HalfStep) -> np.ndarray:
    """Returns the middle of each step, the arithmetic or geometric mean of its edges [1]."""
    a = np.asarray(edges, dtype=np.float64)
    return np.sqrt(a[:-1] * a[1:]) if half_step == "geometric" else 0.5 * (a[:-1] + a[1:])


class FastPM(Integrator):
    """Half kick, drift, half kick.

    Attributes:
        half_step: where a step is divided into two halves: at the "arithmetic" mean of its edges
            (as in pmwd) or at their "geometric" mean (as in FastPM).

    Raises:
        ValueError: half_step is unknown.
    """

    half_step: HalfStep = "arithmetic"

    def schedule(self, growth: Growth, edges: Sequence[float]) -> Schedule:
        """Returns the operations of a run; the growth is evaluated for all times at once."""
        a = np.asarray(edges, dtype=np.float64)
        with arrays_within():
            D1, G_D, G_K = growth.d1(a), growth.g_drift(a), growth.g_kick(a)
            G_D_half = growth.g_drift(half_step_times(edges, self.half_step))
            gravity = 1.5 * growth.background.clustering(a)
        opening = gravity[:-1] * (G_D_half - G_D[:-1]) / G_K[:-1]
        drift = (D1[1:] - D1[:-1]) / G_D_half
        closing = gravity[1:] * (G_D[1:] - G_D_half) / G_K[1:]
        return kick_drift_kick(
            edges, *(rows(1.0, factor, 0.0, 0.0) for factor in (opening, drift, closing))
        )

    @override
    def interpolation(
        self, growth: Growth, edges: Sequence[float], times: Sequence[float]
    ) -> Interpolation:
        def drifted(begin: np.ndarray, end: np.ndarray, half: np.ndarray) -> tf.Tensor:
            return (growth.d1(end) - growth.d1(begin)) / growth.g_drift(half)

        halves = half_step_times(edges, self.half_step)
        return kick_drift_kick_between(edges, halves, times, growth.g_drift, drifted)

    @override
    def since_kick(
        self, growth: Growth, edges: Sequence[float], times: tf.Tensor
    ) -> tuple[np.ndarray | tf.Tensor, tf.Tensor]:
        a = np.asarray(edges, dtype=np.float64)
        kicks = last_kicks(times, a[:-1])
        begin, half = (taken(x, kicks) for x in (a, half_step_times(edges, self.half_step)))
        drift = (growth.d1(times) - growth.d1(begin)) / growth.g_drift(half)
        return kicks, rows(0.0, drift, 0.0, 0.0)
