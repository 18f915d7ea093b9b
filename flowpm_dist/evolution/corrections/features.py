"""The inputs of a correction: how nonlinear its universe is at the scale of a cell.

The same learned numbers may therefore suit other cosmologies, times and cells.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.power import LinearPower

FEATURES = 3
EARLIEST = 1e-6
"""Scale factor before which ratios that are 0 / 0 at a = 0 are taken as there."""


def features(power: LinearPower, cell: float, a: np.ndarray) -> tf.Tensor:
    """Returns three numbers for each scale factor, float64 [..., 3]; differentiable.

    The first is s / (1 + s), where s is the rms linear overdensity, smoothed by a Gaussian of the
    side of a cell. The second is 1 + slope / 3, with the slope of s^2 by the logarithm of that
    radius. The third is Omega_m(a).

    Args:
        power: the linear power of the universe, with its growth.
        cell: the side of a cell [Mpc/h].
        a: scale factors [...].
    """
    import tensorflow as tf

    rms, slope = _at_scale(power, cell)
    s = rms * power.growth.d1(a)
    matter = power.growth.background.omega_m(np.maximum(a, EARLIEST))
    return tf.stack([s / (1.0 + s), tf.ones_like(s) * (1.0 + slope / 3.0), matter], axis=-1)


def _at_scale(power: LinearPower, cell: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rms and slope of the linear overdensity at the scale of a cell, without growth."""
    import tensorflow as tf

    k, weights = _quadrature(cell)
    per_mode = power.without_growth(k) * weights
    variance = tf.reduce_sum(per_mode)
    slope = tf.reduce_sum(per_mode * (-2.0 * (k * cell) ** 2)) / variance
    return tf.sqrt(variance), slope


@functools.lru_cache(maxsize=64)
def _quadrature(radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns k [h/Mpc] and weights [(h/Mpc)^3] of the variance under a Gaussian of a radius."""
    ln_k = np.linspace(np.log(1e-3 / radius), np.log(6.0 / radius), 256)
    k = np.exp(ln_k)
    return k, (ln_k[1] - ln_k[0]) * k**3 / (2.0 * np.pi**2) * np.exp(-((k * radius) ** 2))
