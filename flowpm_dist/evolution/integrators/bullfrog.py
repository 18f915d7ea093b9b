"""BullFrog: drift-kick-drift in growth time, with factors from second-order LPT.

Its velocity is v = dx/dD1, with D1 as time. In a step from D_n to D_n+1 = D_n + dD the particles
drift by dD/2, are kicked, and drift by dD/2 again. The kick is v = alpha v + (1 - alpha) A / D_half
with A = -grad phi, laplacian phi = delta and D_half = D_n + dD/2. With E = D2(D1), here positive,

    alpha = (E'_n+1 - F) / (E'_n - F),   F = (E_n + E'_n dD/2 + D_half^2) / D_half.

After each step the velocity agrees with second-order LPT. Where D2 is proportional to D1^2
(Einstein-de Sitter), the positions agree with it, too. Elsewhere they agree to the order of the
square of the step.
Rampf, List and Hahn 2025 (arXiv:2409.19049), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from typing_extensions import override

from flowpm_dist.cosmology.arrays import arrays_within
from flowpm_dist.evolution.integrators.base import (
    Integrator,
    Interpolation,
    Schedule,
    between_kicks,
    drift_kick_drift,
    followed_by_velocity,
    kicks_of,
    last_kicks,
    rows,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.growth import Growth


class BullFrog(Integrator):
    """Drift, kick, drift; it may start from first-order LPT, or from rest at a = 0."""

    starts_at_zero: ClassVar[bool] = True

    @override
    def schedule(self, growth: Growth, edges: Sequence[float]) -> Schedule:
        a = np.asarray(edges, dtype=np.float64)
        with arrays_within():
            d1, second, slope = growth.d1(a), growth.d2(a), growth.by_d1(a, 2)
            last = growth.g_drift(a[-1:])
        half = 0.5 * (d1[1:] - d1[:-1])
        middle = d1[:-1] + half
        force = (second[:-1] + slope[:-1] * half + middle**2) / middle
        alpha = (slope[1:] - force) / (slope[:-1] - force)
        drift = rows(1.0, half, 0.0, 0.0)
        kick = rows(alpha, (1.0 - alpha) / middle, 0.0, 0.0)
        to_canonical = rows(last, 0.0, 0.0, 0.0)
        return followed_by_velocity(drift_kick_drift(edges, drift, kick, drift), to_canonical)

    def initial(self, growth: Growth, a: float, order: int) -> tf.Tensor:
        """Returns the LPT factors D_n and dD_n/dD1, float64 [2, terms]."""
        from flowpm_dist.initial.lpt import growth_terms_by_d1

        return growth_terms_by_d1(growth, a, order)

    def from_canonical(self, growth: Growth, a: float) -> tf.Tensor:
        """Returns the factors [4] from the canonical velocity to dx/dD1.

        Raises:
            ValueError: at a = 0, where the canonical velocity is 0 whatever dx/dD1 is.
        """
        if a == 0:
            raise ValueError("a given state of the particles needs a start later than a = 0")
        return rows(1.0 / growth.g_drift(np.array([a])), 0.0, 0.0, 0.0)[0]

    def interpolation(
        self, growth: Growth, edges: Sequence[float], times: Sequence[float]
    ) -> Interpolation:
        """Returns the states between kicks; a kick that ends at D has the factor alpha(D)."""
        import tensorflow as tf

        a, t = np.asarray(edges, dtype=np.float64), np.asarray(times, dtype=np.float64)
        kicks = kicks_of(t, a)
        begin, end = growth.by_d1(a[kicks], 2), growth.by_d1(a[kicks + 1], 2)
        drift = growth.d1(t) - 0.5 * (growth.d1(a[kicks]) + growth.d1(a[kicks + 1]))
        share = (growth.by_d1(t, 2) - begin) / (end - begin)
        by_velocity = between_kicks(kicks, share, drift, drift > 0)
        canonical = growth.g_drift(t)
        scale = tf.stack([tf.ones_like(canonical), canonical], axis=-1)
        return Interpolation(by_velocity.kicks, by_velocity.factors * scale[:, :, tf.newaxis])

    @override
    def since_kick(
        self, growth: Growth, edges: Sequence[float], times: tf.Tensor
    ) -> tuple[np.ndarray | tf.Tensor, tf.Tensor]:
        import tensorflow as tf

        d1, now = growth.d1(np.asarray(edges, dtype=np.float64)), growth.d1(times)
        middle = 0.5 * (d1[1:] + d1[:-1])
        kicks = last_kicks(now, middle)
        return kicks, rows(0.0, now - tf.gather(middle, kicks), 0.0, 0.0)
