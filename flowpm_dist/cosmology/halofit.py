"""Non-linear matter power by halofit, with gradients by all that the linear power depends on.

Smith and others (2003, astro-ph/0207664), with the fit of Takahashi and others (2012,
arXiv:1208.2701), for a flat universe without massive neutrinos.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import as_float64
from flowpm_dist.cosmology.power import LinearPower

_LN_K = np.linspace(np.log(1e-4), np.log(3e3), 1024)
_SMALLEST, _LARGEST = np.log(3e-3), np.log(100.0)  # ln of the radii that are tried [Mpc/h]
_HALVINGS = 24  # of that range: Newton's method does the rest


@dataclass(frozen=True)
class _Scales:
    """What the fit depends on, at scale factors [...]."""

    k: tf.Tensor  # of non-linear scales [h/Mpc]
    slope: tf.Tensor  # n_eff, of the power there
    curvature: tf.Tensor  # C
    exists: tf.Tensor  # whether there are such scales


class Halofit:
    """The non-linear power P(k, a) of a linear one: `halofit(k, a)`, in the place of `LinearPower`.

    Differentiable by whatever the linear power is differentiable by, and by k and a. CAMB's halofit
    (`NonlinearPower`) is the same fit with CAMB's growth, which has radiation, and no gradients.

    Where fluctuations are below 1 on all scales above 3 kpc/h, the power is linear.

    Args:
        linear: the linear power, whose cosmology counts.
    """

    def __init__(self, linear: LinearPower) -> None:
        self.linear, self.growth = linear, linear.growth
        k = np.exp(_LN_K)
        step = _LN_K[1] - _LN_K[0]
        self._k = tf.constant(k)
        self._variance = step * k**3 / (2 * np.pi**2) * linear.without_growth(k)  # for D1 = 1

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns P [(Mpc/h)^3] for k > 0 [h/Mpc] and a [1], which broadcast; float64."""
        k, a = as_float64(k), as_float64(a)
        scales, power = self._scales(a), self.linear(k, a)
        volume = k**3 / (2 * np.pi**2)
        dimensionless = volume * power
        y = k / scales.k
        background = self.growth.background
        matter, dark, w = (f(a) for f in (background.omega_m, background.omega_de, background.w))
        n, c = scales.slope, scales.curvature
        n2, n3, n4, stiff = n**2, n**3, n**4, dark * (1 + w)
        # Takahashi and others 2012, appendix.
        a_n = 1.5222 + 2.8553 * n + 2.3706 * n2 + 0.9903 * n3 + 0.2250 * n4
        a_n = 10 ** (a_n - 0.6038 * c + 0.1749 * stiff)
        b_n = 10 ** (-0.5642 + 0.5864 * n + 0.5716 * n2 - 1.5474 * c + 0.2279 * stiff)
        c_n = 10 ** (0.3698 + 2.0404 * n + 0.8161 * n2 + 0.5869 * c)
        gamma = 0.1971 - 0.0843 * n + 0.8460 * c
        alpha = tf.abs(6.0835 + 1.3373 * n - 0.1959 * n2 - 5.5274 * c)
        beta = 2.0379 - 0.7354 * n + 0.3157 * n2 + 1.2490 * n3 + 0.3980 * n4 - 0.1682 * c
        nu = 10 ** (5.2105 + 3.6902 * n)
        quasi = (1 + dimensionless) ** beta / (1 + alpha * dimensionless)
        quasi *= dimensionless * tf.exp(-y / 4 - y**2 / 8)
        halo = a_n * y ** (3 * matter**-0.0307)
        halo /= 1 + b_n * y**matter**-0.0585 + (c_n * matter**0.0743 * y) ** (3 - gamma)
        halo /= 1 + nu / y**2
        return tf.where(scales.exists, (quasi + halo) / volume, power)

    def _scales(self, a: tf.Tensor) -> _Scales:
        """Returns the scales at which the variance of the density, smoothed by a Gaussian, is 1."""
        ln_growth = 2.0 * tf.math.log(self.growth.d1(a))

        def excess(ln_r: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Returns ln sigma^2(R), and its first two derivatives by ln R."""
            x2 = tf.square(self._k * tf.exp(ln_r)[..., tf.newaxis])
            terms = self._variance * tf.exp(-x2)
            sigma2 = tf.reduce_sum(terms, axis=-1)
            first = tf.reduce_sum(-2.0 * x2 * terms, axis=-1) / sigma2
            second = tf.reduce_sum(4.0 * x2 * (x2 - 1.0) * terms, axis=-1) / sigma2
            return ln_growth + tf.math.log(sigma2), first, second - first**2

        variance, unit = tf.stop_gradient(self._variance), tf.exp(-tf.stop_gradient(ln_growth))

        def exceeds(ln_r: tf.Tensor) -> tf.Tensor:
            x2 = tf.square(self._k * tf.exp(ln_r)[..., tf.newaxis])
            return tf.tensordot(tf.exp(-x2), variance, 1) > unit

        low = tf.fill(tf.shape(a), tf.constant(_SMALLEST, tf.float64))
        exists = exceeds(low)
        high = tf.fill(tf.shape(a), tf.constant(_LARGEST, tf.float64))
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            above = exceeds(middle)
            low, high = tf.where(above, middle, low), tf.where(above, high, middle)
        ln_r = tf.stop_gradient(low)
        for _ in range(2):  # which have the derivatives, too
            value, slope, _ = excess(ln_r)
            ln_r -= tf.where(exists, value / slope, tf.zeros_like(value))
        _, slope, curvature = excess(ln_r)
        return _Scales(tf.exp(-ln_r), -3.0 - slope, -curvature, exists)
