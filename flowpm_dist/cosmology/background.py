"""Expansion of a flat universe of matter and w0-wa dark energy, without radiation."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology, as_float64

HUBBLE_DISTANCE = 2997.92458
"""c/H0 [Mpc/h]."""


class Background:
    """Expansion rate and matter density as functions of the scale factor.

    Every method takes `a` [1] of any shape (number, array or tensor) and returns a float64 tensor
    of that shape, differentiable by the parameters.

    Dark energy follows w(a) = w0 + wa (1 - a) (Chevallier and Polarski 2001, gr-qc/0009008;
    Linder 2003, astro-ph/0208512).
    """

    def __init__(self, cosmology: Cosmology) -> None:
        values = cosmology.parameters()
        self.cosmology = cosmology
        self.Omega_m = values["Omega_m"]
        self.Omega_de = 1.0 - self.Omega_m
        self.w0 = values["w0"]
        self.wa = values["wa"]

    def e(self, a: Any) -> tf.Tensor:
        """Expansion rate E = H/H0 [1]."""
        return tf.sqrt(self.e2(a))

    def e2(self, a: Any) -> tf.Tensor:
        """E^2 = (H/H0)^2 [1]."""
        a = as_float64(a)
        return self.a3_e2(a) / a**3

    def a3_e2(self, a: Any) -> tf.Tensor:
        """a^3 E^2 [1], which stays finite at a = 0."""
        return self.Omega_m + self._dark_energy(as_float64(a))

    def dlne_dlna(self, a: Any) -> tf.Tensor:
        """dlnE/dlna = dlnH/dlna [1]."""
        a = as_float64(a)
        return -1.5 * (1.0 + self.w(a) * self.omega_de(a))

    def omega_m(self, a: Any) -> tf.Tensor:
        """Matter over the critical density at a [1]."""
        return self.Omega_m / self.a3_e2(a)

    def omega_de(self, a: Any) -> tf.Tensor:
        """Dark energy over the critical density at a [1]."""
        dark_energy = self._dark_energy(as_float64(a))
        return dark_energy / (self.Omega_m + dark_energy)

    def w(self, a: Any) -> tf.Tensor:
        """Equation of state of dark energy, pressure over density [1]."""
        return self.w0 + self.wa * (1.0 - as_float64(a))

    def _dark_energy(self, a: tf.Tensor) -> tf.Tensor:
        """Density of dark energy times a^3, over the critical density today."""
        return (
            self.Omega_de * a ** (-3.0 * (self.w0 + self.wa)) * tf.exp(-3.0 * self.wa * (1.0 - a))
        )
