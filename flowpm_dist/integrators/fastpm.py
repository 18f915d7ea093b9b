"""FastPM's kick-drift-kick: leapfrog whose factors reproduce Zel'dovich motion at any step size.

A drift from a0 to a1 with the velocity at av takes (D1(a1) - D1(a0)) / G_D(av), a kick with the
force at af takes (G_D(a1) - G_D(a0)) / G_K(af), both in 1/H0.
Feng, Chu, Seljak and McDonald 2016, MNRAS 463, 2273 (arXiv:1603.00476), equations 21 to 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
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
        """See `Integrator.steps`. The growth is evaluated for all times at once."""
        times = np.asarray(edges, dtype=np.float64)
        start, stop = times[:-1], times[1:]
        middle = np.sqrt(start * stop) if self.half_step == "geometric" else 0.5 * (start + stop)
        d1, drift, kick = growth.d1(times), growth.g_drift(times), growth.g_kick(times)
        drift_middle = growth.g_drift(middle)
        openings = (drift_middle - drift[:-1]) / kick[:-1]
        drifts = (d1[1:] - d1[:-1]) / drift_middle
        closings = (drift[1:] - drift_middle) / kick[1:]
        factors = tf.unstack(tf.stack([openings, drifts, closings], axis=1))
        return [
            Step(float(a), float(b), opening, drift_factor, closing)
            for a, b, (opening, drift_factor, closing) in zip(
                start, stop, map(tf.unstack, factors), strict=True
            )
        ]
