"""The transfer function of Eisenstein and Hu (1998), differentiable by all parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import exp, log, maximum, sin, sqrt, square
from flowpm_dist.cosmology.background import HUBBLE_DISTANCE
from flowpm_dist.cosmology.neutrinos import MASSLESS
from flowpm_dist.cosmology.parameters import PARAMETERS

# Omega_b h^2 below which the fit's own powers of it lose their derivatives; no effect above.
_FEW_BARYONS = 1e-8
_NEUTRINOS = PARAMETERS["N_eff"].default


class EisensteinHuShape:
    """The power for A_s = 1 and D1 = 1, from the Poisson equation.

    k^3 P / (2 pi^2) = 4/25 A_s (k/k_pivot)^(n_s - 1) (c k/H0)^4 (T D1 / Omega_m)^2,

    The values are arrays or tensors by name; `Omega_m` among them counts cb alone.

    The transfer function T(k), 1 at k -> 0, has baryons and their wiggles. It is differentiable by
    all parameters. Eisenstein and Hu 1998, "Baryonic features in the matter transfer function",
    astro-ph/9709112; the equation numbers are theirs.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._tilt = values["n_s"] - 1.0
        self._pivot = values["k_pivot"] / values["h"]  # [h/Mpc]
        self._amplitude = 0.32 * np.pi**2 * (HUBBLE_DISTANCE**2 / values["Omega_m"]) ** 2
        h2 = values["h"] ** 2
        self._h = values["h"]
        self._theta2 = (values["T_cmb"] / 2.7) ** 2
        # The fit has the radiation of this number of neutrinos.
        self._radiation = (1.0 + MASSLESS * values["N_eff"]) / (1.0 + MASSLESS * _NEUTRINOS)
        self._matter = values["Omega_m"] * h2
        self._baryons = maximum(values["Omega_b"] * h2, _FEW_BARYONS)
        self._baryon_fraction = values["Omega_b"] / values["Omega_m"]
        self._scales()
        self._cold_matter_shape()
        self._baryon_shape()

    def __call__(self, k: Any) -> Any:
        """Returns P [(Mpc/h)^3] for wavenumbers k > 0 [h/Mpc], any shape."""
        tilted = exp(self._tilt * log(k / self._pivot))
        return self._amplitude * k * tilted * square(self.transfer(k))

    def transfer(self, k: Any) -> Any:
        """Returns T(k) (eq. 16) for wavenumbers k > 0 [h/Mpc], any shape."""
        k = k * self._h  # [1/Mpc]
        cold, baryon_start = self._pressureless_forms(k)
        ks = k * self._sound_horizon
        baryon = self._baryon(k, ks, baryon_start)
        f = 1.0 / (1.0 + square(square(ks / 5.4)))
        cold_matter = f * cold[0] + (1.0 - f) * cold[1]  # eq. 17 and 18
        return cold_matter + self._baryon_fraction * (baryon - cold_matter)

    def _scales(self) -> None:
        """Equality, drag epoch, sound horizon [Mpc] and Silk damping [1/Mpc] (eq. 2 to 7)."""
        m, b, theta2 = self._matter, self._baryons, self._theta2
        z_equality = 2.50e4 * m / theta2**2 / self._radiation
        self._k_equality = 7.46e-2 * m / theta2 / sqrt(self._radiation)
        b1 = 0.313 * m**-0.419 * (1.0 + 0.607 * m**0.674)
        b2 = 0.238 * m**0.223
        z_drag = 1291.0 * m**0.251 / (1.0 + 0.659 * m**0.828) * (1.0 + b1 * b**b2)
        loading = 31.5 * b / theta2**2 * 1e3  # baryon to photon momentum, times the redshift
        r_drag, r_equality = loading / z_drag, loading / z_equality
        self._sound_horizon = (
            2.0
            / (3.0 * self._k_equality)
            * sqrt(6.0 / r_equality)
            * log((sqrt(1.0 + r_drag) + sqrt(r_drag + r_equality)) / (1.0 + sqrt(r_equality)))
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
        root = sqrt(1.0 + y)
        g = y * (-6.0 * root + (2.0 + 3.0 * y) * log((root + 1.0) / (root - 1.0)))
        self._alpha_b = (
            2.07 * self._k_equality * self._sound_horizon * (1.0 + self._r_drag) ** -0.75 * g
        )
        self._beta_b = 0.5 + fraction + (3.0 - 2.0 * fraction) * sqrt((17.2 * m) ** 2 + 1.0)
        self._beta_node = 8.41 * m**0.435

    def _baryon(self, k: Any, ks: Any, start: Any) -> Any:
        """T_b(k) (eq. 21 and 22), given the pressureless T0(k; 1, 1)."""
        ks2 = square(ks)
        ks3 = ks * ks2
        phase = ks2 / _power(self._beta_node**3 + ks3, 1.0 / 3.0)
        damping = self._alpha_b * ks3 / (self._beta_b**3 + ks3)
        silk = exp(-_power(k / self._k_silk, 1.4))
        envelope = start / (1.0 + ks2 / 5.2**2) + damping * silk
        return envelope * sin(phase) / phase

    def _pressureless_forms(self, k: Any) -> tuple[list[Any], Any]:
        """T0(k; alpha, beta) (eq. 10, 19, 20): [(1, beta_c), (alpha_c, beta_c)] and (1, 1)."""
        q = k / (13.41 * self._k_equality)
        q2 = square(q)
        bend = 386.0 / (1.0 + 69.9 * _power(q, 1.08))
        with_beta = log(math.e + 1.8 * self._beta_c * q)
        without = log(math.e + 1.8 * q)
        one, suppressed = (14.2 + bend) * q2, (14.2 / self._alpha_c + bend) * q2
        cold = [with_beta / (with_beta + one), with_beta / (with_beta + suppressed)]
        return cold, without / (without + one)


@tf.function(autograph=False, reduce_retracing=True)
def compiled_shape(parameters: Mapping[str, tf.Tensor], k: tf.Tensor) -> tf.Tensor:
    """Returns `EisensteinHuShape` at k; for cosmologies that change at every evaluation."""
    return EisensteinHuShape(parameters)(k)


def _power(x: Any, exponent: float) -> Any:
    """x**exponent for x > 0, several times faster than tf.pow on large float64 fields."""
    return exp(exponent * log(x))
