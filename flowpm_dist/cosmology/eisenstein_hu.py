"""Transfer function of cold dark matter and baryons by Eisenstein and Hu, with wiggles.

Eisenstein and Hu 1998, "Baryonic features in the matter transfer function", astro-ph/9709112;
the equation numbers below are theirs.
"""

from __future__ import annotations

import math

import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology

# Omega_b h^2 below which the fit's own powers of it lose their derivatives; no effect above.
_FEW_BARYONS = 1e-8


class EisensteinHu:
    """T(k), 1 at k -> 0, of one cosmology; differentiable by all of its parameters."""

    def __init__(self, cosmology: Cosmology) -> None:
        values = cosmology.parameters()
        h2 = values["h"] ** 2
        self._h = values["h"]
        self._theta2 = (values["T_cmb"] / 2.7) ** 2
        self._matter = values["Omega_m"] * h2
        self._baryons = tf.maximum(values["Omega_b"] * h2, _FEW_BARYONS)
        self._baryon_fraction = values["Omega_b"] / values["Omega_m"]
        self._scales()
        self._cold_matter_shape()
        self._baryon_shape()

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        """T(k) (eq. 16) for wavenumbers k > 0 [h/Mpc], float64, any shape."""
        k = k * self._h  # [1/Mpc]
        cold, baryon_start = self._pressureless_forms(k)
        ks = k * self._sound_horizon
        baryon = self._baryon(k, ks, baryon_start)
        f = 1.0 / (1.0 + tf.square(tf.square(ks / 5.4)))
        cold_matter = f * cold[0] + (1.0 - f) * cold[1]  # eq. 17 and 18
        return cold_matter + self._baryon_fraction * (baryon - cold_matter)

    def _scales(self) -> None:
        """Equality, drag epoch, sound horizon [Mpc] and Silk damping [1/Mpc] (eq. 2 to 7)."""
        m, b, theta2 = self._matter, self._baryons, self._theta2
        z_equality = 2.50e4 * m / theta2**2
        self._k_equality = 7.46e-2 * m / theta2
        b1 = 0.313 * m**-0.419 * (1.0 + 0.607 * m**0.674)
        b2 = 0.238 * m**0.223
        z_drag = 1291.0 * m**0.251 / (1.0 + 0.659 * m**0.828) * (1.0 + b1 * b**b2)
        loading = 31.5 * b / theta2**2 * 1e3  # baryon to photon momentum, times the redshift
        r_drag, r_equality = loading / z_drag, loading / z_equality
        self._sound_horizon = (
            2.0
            / (3.0 * self._k_equality)
            * tf.sqrt(6.0 / r_equality)
            * tf.math.log(
                (tf.sqrt(1.0 + r_drag) + tf.sqrt(r_drag + r_equality)) / (1.0 + tf.sqrt(r_equality))
            )
        )
        self._k_silk = 1.6 * b**0.52 * m**0.73 * (1.0 + (10.4 * m) ** -0.95)
        self._r_drag = r_drag
        self._drag_ratio = (1.0 + z_equality) / (1.0 + z_drag)

    def _cold_matter_shape(self) -> None:
        """alpha_c and beta_c (eq. 11 and 12)."""
        m, fraction = self._matter, self._baryon_fraction
        a1 = (46.9 * m) ** 0.670 * (1.0 + (32.1 * m) ** -0.532)
        a2 = (12.0 * m) ** 0.424 * (1.0 + (45.0 * m) ** -0.582)
        self._alpha_c = a1**-fraction * a2 ** -(fraction**3)
        b1 = 0.944 / (1.0 + (458.0 * m) ** -0.708)
        b2 = (0.395 * m) ** -0.0266
        self._beta_c = 1.0 / (1.0 + b1 * ((1.0 - fraction) ** b2 - 1.0))

    def _baryon_shape(self) -> None:
        """alpha_b, beta_b and beta_node (eq. 14, 15, 23 and 24)."""
        m, fraction, y = self._matter, self._baryon_fraction, self._drag_ratio
        root = tf.sqrt(1.0 + y)
        g = y * (-6.0 * root + (2.0 + 3.0 * y) * tf.math.log((root + 1.0) / (root - 1.0)))
        self._alpha_b = (
            2.07 * self._k_equality * self._sound_horizon * (1.0 + self._r_drag) ** -0.75 * g
        )
        self._beta_b = 0.5 + fraction + (3.0 - 2.0 * fraction) * tf.sqrt((17.2 * m) ** 2 + 1.0)
        self._beta_node = 8.41 * m**0.435

    def _baryon(self, k: tf.Tensor, ks: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """T_b(k) (eq. 21 and 22), given the pressureless T0(k; 1, 1)."""
        ks2 = tf.square(ks)
        ks3 = ks * ks2
        phase = ks2 / _power(self._beta_node**3 + ks3, 1.0 / 3.0)
        damping = self._alpha_b * ks3 / (self._beta_b**3 + ks3)
        silk = tf.exp(-_power(k / self._k_silk, 1.4))
        envelope = start / (1.0 + ks2 / 5.2**2) + damping * silk
        return envelope * tf.sin(phase) / phase

    def _pressureless_forms(self, k: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """T0(k; alpha, beta) (eq. 10, 19, 20): [(1, beta_c), (alpha_c, beta_c)] and (1, 1)."""
        q = k / (13.41 * self._k_equality)
        q2 = tf.square(q)
        bend = 386.0 / (1.0 + 69.9 * _power(q, 1.08))
        with_beta = tf.math.log(math.e + 1.8 * self._beta_c * q)
        without = tf.math.log(math.e + 1.8 * q)
        one, suppressed = (14.2 + bend) * q2, (14.2 / self._alpha_c + bend) * q2
        cold = [with_beta / (with_beta + one), with_beta / (with_beta + suppressed)]
        return cold, without / (without + one)


def _power(x: tf.Tensor, exponent: float) -> tf.Tensor:
    """x**exponent for x > 0, several times faster than tf.pow on large float64 fields."""
    return tf.exp(exponent * tf.math.log(x))
