"""The linear matter power spectrum, normalised by A_s or by sigma8."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.camb_tables import camb_spline
from flowpm_dist.cosmology.distances import HUBBLE_DISTANCE
from flowpm_dist.cosmology.eisenstein_hu import EisensteinHu
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.cosmology.options import SHAPE
from flowpm_dist.cosmology.parameters import Cosmology, as_float64, known_value

SIGMA8_RADIUS = 8.0
"""Radius of the spheres that define sigma8 [Mpc/h]."""


class LinearPower:
    """The linear power P(k): `power(k)` today, `power(k, a)`, `power.without_growth(k)`.

    It is evaluated element by element for k [h/Mpc] of any shape, eagerly or in a graph, in
    float64; P(0) = 0. It is differentiable with respect to the parameters; with transfer="camb",
    with respect to A_s, sigma8 and n_s only: a gradient by another parameter raises LookupError.

    CAMB's table covers about 1e-5 h/Mpc to 20/Mpc; beyond, the power is a power law with the slope
    at that end. Dark energy is CAMB's PPF, neutrinos are massless.

    Args:
        cosmology: the parameters.
        growth: the growth of the cosmology, if it exists already.

    Attributes:
        A_s: the amplitude of the primordial spectrum, as given or as sigma8 implies it.

    Raises:
        ImportError: transfer="camb", and the package camb is missing.
        ValueError: transfer="camb", and parameters that only a graph knows (inside a tf.function).
    """

    def __init__(self, cosmology: Cosmology, growth: Growth | None = None) -> None:
        self.cosmology = cosmology
        self.growth = Growth(cosmology) if growth is None else growth
        self._d1_today = self.growth.d1(1.0)
        self._shape = self._shape_of(cosmology)
        self._unit = None if cosmology.A_s is not None else self._unit_sigma8()
        self.A_s = self._amplitude()

    def _shape_of(self, cosmology: Cosmology) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns the power for A_s = 1 and D1 = 1 as a function of k > 0 [h/Mpc]."""
        if cosmology.transfer == "camb":
            return _CambShape(cosmology, self._d1_today)
        if cosmology.is_compiled:
            return functools.partial(_compiled_shape, cosmology.parameters())
        return _EisensteinHuShape(cosmology)

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

    def __init__(self, cosmology: Cosmology) -> None:
        values = cosmology.parameters()
        self.transfer: Callable[[tf.Tensor], tf.Tensor] = EisensteinHu(cosmology)
        self._tilt = values["n_s"] - 1.0
        self._pivot = values["k_pivot"] / values["h"]  # [h/Mpc]
        self._amplitude = 0.32 * np.pi**2 * (HUBBLE_DISTANCE**2 / values["Omega_m"]) ** 2

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        tilted = tf.exp(self._tilt * tf.math.log(k / self._pivot))
        return self._amplitude * k * tilted * tf.square(self.transfer(k))


@tf.function(autograph=False, reduce_retracing=True)
def _compiled_shape(parameters: Mapping[str, tf.Tensor], k: tf.Tensor) -> tf.Tensor:
    """Returns `_EisensteinHuShape` at k; for cosmologies that change at every evaluation."""
    return _EisensteinHuShape(Cosmology(**parameters))(k)


class _CambShape:
    """The power for A_s = 1 and D1 = 1: CAMB's power today, log-log cubic in k, over D1(1)^2."""

    def __init__(self, cosmology: Cosmology, d1_today: tf.Tensor) -> None:
        parameters = {name: getattr(cosmology, name) for name in SHAPE}
        values = {name: known_number(name, parameter) for name, parameter in parameters.items()}
        self._start, self._step, coefficients = camb_spline(**values)
        self._coefficients = tf.constant(coefficients)
        self._tilt = as_float64(parameters.pop("n_s")) - values["n_s"]  # 0, with a derivative
        self._ln_pivot = np.log(values["k_pivot"] / values["h"])
        self._guard = without_gradient(parameters)
        self._growth = d1_today**2

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        ln_k = tf.math.log(k)
        cells = self._coefficients.shape[0]
        position = (ln_k - self._start) / self._step
        inside = tf.clip_by_value(position, 0.0, float(cells))
        cell = tf.minimum(tf.cast(inside, tf.int32), cells - 1)
        c = tf.gather(self._coefficients, cell)
        u = inside - tf.cast(cell, tf.float64)
        ln_power = c[..., 0] + u * (c[..., 1] + u * (c[..., 2] + u * c[..., 3]))
        end_slope = c[..., 1] + u * (2.0 * c[..., 2] + 3.0 * u * c[..., 3])
        ln_power += (position - inside) * end_slope
        tilted = tf.exp(ln_power + self._tilt * (ln_k - self._ln_pivot))
        return tilted * self._guard / self._growth


def known_number(name: str, parameter: object) -> float:
    """Returns a parameter as a number, or raises ValueError if only a graph knows it."""
    known = known_value(parameter)
    if known is None:
        raise ValueError(
            f"CAMB needs the number of {name}, which is not known inside a tf.function: make "
            'the LinearPower outside of it, or use transfer="eisenstein-hu"'
        )
    return known


def without_gradient(
    parameters: Mapping[str, object],
    power: str = "linear power",
    instead: str = 'transfer="eisenstein-hu"',
) -> tf.Tensor:
    """Returns 1, a float64 tensor whose gradient by a parameter that is a tensor is an error.

    Args:
        parameters: the parameters by name.
        power: what CAMB computes, for the message.
        instead: what has the gradients, for the message.
    """
    guard = tf.constant(1.0, tf.float64)
    for name, parameter in parameters.items():
        if isinstance(parameter, (tf.Tensor, tf.Variable)):
            message = (
                f"CAMB gives no derivative of the {power} by {name}: use {instead} for gradients "
                "by it"
            )
            barrier = tf.raw_ops.PreventGradient(input=as_float64(parameter), message=message)
            guard += 0.0 * barrier
    return guard


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
