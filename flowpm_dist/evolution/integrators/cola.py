"""COLA: integrates the motion relative to second-order LPT, and takes LPT itself as exact.

The scheme's own velocity is the residual p - p_LPT. Its force is F - F_LPT, with F_LPT = D1 psi1 +
(D2 + D1^2) psi2 (over 1.5 Omega_m). A drift also adds the displacement of LPT. The residual
velocity is assumed to grow as u(a) = a^n. A kick with the force at c has the factor (u(a1) - u(a0))
/ (n u(c) c E(c)). A drift with the velocity at c has the factor 1 / u(c) times the integral of u /
(a^3 E) da.
Tassev, Zaldarriaga and Eisenstein 2013, JCAP 06, 036 (arXiv:1301.0322), appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, field_validator
from typing_extensions import override

from flowpm_dist.cosmology.arrays import arrays_within, reshape, sqrt, taken, total
from flowpm_dist.evolution.integrators.base import (
    Integrator,
    Interpolation,
    Schedule,
    followed_by_velocity,
    kick_drift_kick,
    kick_drift_kick_between,
    last_kicks,
    momentum_factor,
    rows,
)
from flowpm_dist.evolution.integrators.fastpm import HalfStep, half_step_times

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.growth import Growth

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


class COLA(Integrator):
    """Half kick, drift, half kick around the trajectories of second-order LPT.

    Attributes:
        exponent: n; the residual velocity is assumed to grow as a^n.
        half_step: where a step is divided into two halves, as for `FastPM`.

    Raises:
        ValueError: the exponent is 0, or half_step is unknown.
    """

    uses_lpt: ClassVar[bool] = True

    exponent: float = Field(default=-2.5, description="a number other than 0, such as -2.5")
    half_step: HalfStep = "arithmetic"

    @field_validator("exponent")
    @classmethod
    def _grows_or_decays(cls, exponent: float) -> float:
        if not exponent:
            raise ValueError("the residual velocity has to grow or to decay")
        return exponent

    @override
    def schedule(self, growth: Growth, edges: Sequence[float]) -> Schedule:
        a, n = np.asarray(edges, dtype=np.float64), self.exponent
        middle = half_step_times(edges, self.half_step)
        with arrays_within():
            rate = n * a ** (n - 1) * momentum_factor(growth, a)
            d1, d2 = growth.d1(a), growth.d2(a)
            residual = self._drifts(growth, a[:-1], a[1:], middle)
            last = self._velocity_of_lpt(growth, float(a[-1]), 1.0)
            gravity = 1.5 * growth.background.clustering(a)
        first, second = d1, d2 + d1**2

        def kicks(change: np.ndarray, at: slice) -> Any:
            factor = gravity[at] * change / rate[at]
            return rows(1.0, factor, -factor * first[at], -factor * second[at])

        drifts = rows(1.0, residual, d1[1:] - d1[:-1], d2[1:] - d2[:-1])
        opening = kicks(middle**n - a[:-1] ** n, slice(None, -1))
        closing = kicks(a[1:] ** n - middle**n, slice(1, None))
        steps = kick_drift_kick(edges, opening, drifts, closing)
        return followed_by_velocity(steps, last)

    @override
    def interpolation(
        self, growth: Growth, edges: Sequence[float], times: Sequence[float]
    ) -> Interpolation:
        import tensorflow as tf

        def kicked(a: np.ndarray) -> tf.Tensor:
            return tf.constant(a**self.exponent)

        def drifted(begin: np.ndarray, end: np.ndarray, half: np.ndarray) -> tf.Tensor:
            return self._drifts(growth, begin, end, half)

        halves = half_step_times(edges, self.half_step)
        residual = kick_drift_kick_between(edges, halves, times, kicked, drifted)
        a = np.asarray(times, dtype=np.float64)
        at_kick = np.asarray(edges, dtype=np.float64)[list(residual.kicks)]
        moved = [growth.d1(a) - growth.d1(at_kick), growth.d2(a) - growth.d2(at_kick)]
        scale = momentum_factor(growth, a)
        velocity = [scale * growth.d1_dlna(a), scale * growth.d2_dlna(a)]
        lpt = tf.stack([tf.stack(moved, axis=-1), tf.stack(velocity, axis=-1)], axis=-2)
        factors = tf.concat([residual.factors[..., :2], lpt], axis=-1)
        return Interpolation(residual.kicks, factors)

    @override
    def since_kick(
        self, growth: Growth, edges: Sequence[float], times: tf.Tensor
    ) -> tuple[np.ndarray | tf.Tensor, tf.Tensor]:
        a = np.asarray(edges, dtype=np.float64)
        kicks = last_kicks(times, a[:-1])
        begin, half = (taken(x, kicks) for x in (a, half_step_times(edges, self.half_step)))
        residual = self._drifts(growth, begin, times, half)
        lpt = (growth.d1(times) - growth.d1(begin), growth.d2(times) - growth.d2(begin))
        return kicks, rows(0.0, residual, *lpt)

    def _drifts(
        self,
        growth: Growth,
        begin: np.ndarray | tf.Tensor,
        end: np.ndarray | tf.Tensor,
        middle: np.ndarray | tf.Tensor,
    ) -> Any:
        half = 0.5 * (end - begin)
        times = 0.5 * (end + begin)[:, np.newaxis] + half[:, np.newaxis] * _NODES
        integrand = times ** (self.exponent - 3) / sqrt(growth.background.e2(times))
        return total(integrand * _WEIGHTS) * half / middle**self.exponent

    def _velocity_of_lpt(self, growth: Growth, a: float, sign: float) -> Any:
        """Factors [1, 4] that add `sign` times the canonical velocity of LPT."""
        scale = sign * momentum_factor(growth, a)
        first, second = scale * growth.d1_dlna(a), scale * growth.d2_dlna(a)
        return rows(1.0, 0.0, *(reshape(x, [1]) for x in (first, second)))

    def initial(self, growth: Growth, a: float, order: int) -> tf.Tensor:
        """Returns the LPT factors; the velocity has only what is beyond second-order LPT."""
        import tensorflow as tf

        factors = super().initial(growth, a, order)
        terms = np.arange(factors.shape[1]) - int(growth.by_scale)
        beyond = (terms < 0) | (terms >= 2)
        return tf.stack([factors[0], factors[1] * beyond])

    @override
    def from_canonical(self, growth: Growth, a: float) -> tf.Tensor:
        return self._velocity_of_lpt(growth, a, -1.0)[0]
