"""The linear matter power spectrum, normalised by A_s or by sigma8."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.background import HUBBLE_DISTANCE
from flowpm_dist.cosmology.camb_table import CambTable
from flowpm_dist.cosmology.eisenstein_hu import EisensteinHu
from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.interpolated import InterpolatedTransfer
from flowpm_dist.cosmology.parameters import Cosmology, as_float64

SIGMA8_RADIUS = 8.0
"""Radius of the spheres that define sigma8 [Mpc/h]."""


class LinearPower:
    """The linear power P(k): `power(k)` today, `power(k, a)`, `power.without_growth(k)`.

    It is evaluated element by element for k [h/Mpc] of any shape, eagerly or in a graph, in
    float64; P(0) = 0. It is differentiable with respect to the parameters; with transfer="camb",
    with respect to A_s, sigma8 and n_s only (see `CambTable`).

    Args:
        cosmology: the parameters.
        growth: the growth of the cosmology, if it exists already.
        transfer_nodes: wavenumbers [h/Mpc] at which the Eisenstein-Hu transfer function is
            tabulated (`InterpolatedTransfer`), to reproduce another code's runs.

    Attributes:
        A_s: the amplitude of the primordial spectrum, as given or as sigma8 implies it.

    Raises:
        ImportError, ValueError: see `CambTable`; ValueError also for nodes with CAMB.
    """

    def __init__(
        self,
        cosmology: Cosmology,
        growth: GrowthFunctions | None = None,
        *,
        transfer_nodes: Any = None,
    ) -> None:
        self.cosmology = cosmology
        self.growth = Growth(cosmology) if growth is None else growth
        self._d1_today = self.growth.d1(1.0)
        self._shape: Callable[[tf.Tensor], tf.Tensor]
        if cosmology.transfer != "camb" and transfer_nodes is None and cosmology.is_compiled:
            self._shape = functools.partial(_compiled_shape, cosmology.parameters())
        elif cosmology.transfer != "camb":
            self._shape = _EisensteinHuShape(cosmology, transfer_nodes)
        elif transfer_nodes is None:
            self._shape = _CambShape(cosmology, self._d1_today)
        else:
            raise ValueError('transfer_nodes go with transfer="eisenstein-hu", not with "camb"')
        self._unit = None if cosmology.A_s is not None else self._unit_sigma8()
        self.A_s = self._amplitude()

    def rescaled(self, cosmology: Cosmology) -> LinearPower:
        """Returns the power of a cosmology that differs in A_s or sigma8 only."""
        other = copy.copy(self)
        other.cosmology = cosmology
        other.A_s = other._amplitude()
        return other

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns the linear power at scale factor a [(Mpc/h)^3]; k [h/Mpc] and a broadcast."""
        return self.without_growth(k) * self.growth.d1(a) ** 2

    def without_growth(self, k: Any) -> tf.Tensor:
        """Returns the power without growth [(Mpc/h)^3]: P(k, a) = without_growth(k) D1(a)^2."""
        k = as_float64(k)
        positive = k > 0
        # A wavenumber of 1 in place of 0 keeps infinities out of the derivatives as well.
        power = self.A_s * self._shape(tf.where(positive, k, tf.ones_like(k)))
        return tf.where(positive, power, tf.zeros_like(power))

    def sigma8(self, a: Any = 1.0) -> tf.Tensor:
        """Returns the rms linear overdensity in spheres of 8 Mpc/h at scale factor a [1]."""
        return tf.sqrt(self.A_s) * self._unit_sigma8() * self.growth.d1(a)

    def _amplitude(self) -> tf.Tensor:
        """Returns A_s [1], as given or as sigma8 implies it."""
        if self.cosmology.A_s is not None:
            return as_float64(self.cosmology.A_s)
        return (as_float64(self.cosmology.sigma8) / (self._unit * self._d1_today)) ** 2

    def _unit_sigma8(self) -> tf.Tensor:
        """Returns sigma8 for A_s = 1 without growth."""
        k, weights = _sigma8_quadrature()
        return tf.sqrt(tf.reduce_sum(weights * self._shape(tf.constant(k))))


def sigma8(cosmology: Cosmology) -> tf.Tensor:
    """Returns the rms linear overdensity in spheres of 8 Mpc/h today [1], a float64 scalar."""
    return LinearPower(cosmology).sigma8()


class _EisensteinHuShape:
    """The power for A_s = 1 and D1 = 1, from the Poisson equation.

    k^3 P / (2 pi^2) = 4/25 A_s (k/k_pivot)^(n_s - 1) (c k/H0)^4 (T D1 / Omega_m)^2.
    """

    def __init__(self, cosmology: Cosmology, transfer_nodes: Any) -> None:
        values = cosmology.parameters()
        self._transfer: Callable[[tf.Tensor], tf.Tensor] = EisensteinHu(cosmology)
        if transfer_nodes is not None:
            self._transfer = InterpolatedTransfer(self._transfer, transfer_nodes)
        self._tilt = values["n_s"] - 1.0
        self._pivot = values["k_pivot"] / values["h"]  # [h/Mpc]
        self._amplitude = 0.32 * np.pi**2 * (HUBBLE_DISTANCE**2 / values["Omega_m"]) ** 2

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        tilted = tf.exp(self._tilt * tf.math.log(k / self._pivot))
        return self._amplitude * k * tilted * tf.square(self._transfer(k))


@tf.function(autograph=False, reduce_retracing=True)
def _compiled_shape(parameters: Mapping[str, tf.Tensor], k: tf.Tensor) -> tf.Tensor:
    """Returns `_EisensteinHuShape` at k; for cosmologies that change at every evaluation."""
    return _EisensteinHuShape(Cosmology(**parameters), None)(k)


class _CambShape:
    """The power for A_s = 1 and D1 = 1: CAMB's power today divided by D1(1)^2."""

    def __init__(self, cosmology: Cosmology, d1_today: tf.Tensor) -> None:
        self._table = CambTable(cosmology)
        self._growth = d1_today**2

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        return self._table(k) / self._growth


@functools.cache
def _sigma8_quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Returns k [h/Mpc] and weights [(h/Mpc)^3], each [4096]: sigma8^2 = sum of weights * P(k).

    It is the trapezoidal rule in ln k; the integrand vanishes at both ends.
    """
    ln_k = np.linspace(np.log(1e-5), np.log(100.0), 4096)
    k = np.exp(ln_k)
    x = k * SIGMA8_RADIUS
    series = 1.0 - x**2 / 10.0 + x**4 / 280.0
    top_hat = np.where(x > 0.03, 3.0 * (np.sin(x) - x * np.cos(x)) / x**3, series)
    return k, (ln_k[1] - ln_k[0]) * k**3 / (2.0 * np.pi**2) * top_hat**2
