"""Linear power: Eisenstein and Hu's fit, CAMB's, CLASS's or a user's tables; its amplitude."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import (
    arrays_within,
    as_array,
    as_float64,
    clip,
    exp,
    floor,
    gives_tensor,
    is_tensor,
    log,
    minimum,
    ones_like,
    sqrt,
    square,
    taken,
    total,
    where,
    zeros_like,
)
from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.boltzmann_tables import boltzmann_spline
from flowpm_dist.cosmology.eisenstein_hu import EisensteinHuShape, compiled_shape
from flowpm_dist.cosmology.growth import Growth, growth_of
from flowpm_dist.cosmology.parameters import (
    SHAPE,
    Cosmology,
    is_compiled,
    known_value,
)
from flowpm_dist.cosmology.power_table import PowerTable, Spline, spline_of

SIGMA8_RADIUS = 8.0
"""Radius of the spheres that define sigma8 [Mpc/h]."""


class LinearPower:
    """The linear power P(k) of all matter: `power(k)` today, `power(k, a)`.

    With massive neutrinos, `power.cb(k, a)` is the power of cold dark matter and baryons alone,
    which the particles of a simulation have. It is scaled back by the growth of each wavenumber.

    It is evaluated element by element for k [h/Mpc] of any shape, eagerly or in a graph, in
    float64; P(0) = 0. It is differentiable with respect to the parameters; with transfer="camb"
    or "class", only with respect to A_s, sigma8 and n_s, and with a table of power only with
    respect to sigma8: for other parameters LookupError is raised.

    CAMB's and CLASS's tables cover about 1e-5 h/Mpc to 20/Mpc. Outside a table the power is a power
    law, with the slope at the nearer end. Their dark energy is PPF. The power of cb today is their
    own, whatever `growth` is; a `PowerTable` gives it at its redshift.

    The fit of Eisenstein and Hu has the density of cb: neutrinos are radiation when matter begins
    to dominate. What they change later is in the growth.

    Args:
        cosmology: the parameters.
        growth: the growth of the cosmology, if it exists already.

    Raises:
        ImportError: transfer="camb" or "class", and the package camb or classy is missing.
        ValueError: a table, and parameters that only a graph knows (inside a tf.function).
    """

    def __init__(self, cosmology: Cosmology, growth: Growth | None = None) -> None:
        self.cosmology = cosmology
        self.growth = growth_of(Background(cosmology)) if growth is None else growth
        with arrays_within():
            self._shape = self._shape_of(cosmology)
            self._unit_today = None if cosmology.sigma8 is None else self._unit_sigma8(1.0)
            self._amplitude = self._amplitude_of(cosmology)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cosmology})"

    def _shape_of(self, cosmology: Cosmology) -> Callable[[Any], Any]:
        """Returns the power for A_s = 1 and D1 = 1 as a function of k > 0 [h/Mpc]."""
        if cosmology.power is not None:
            return self._shape_of_table(cosmology.power)
        if cosmology.transfer != "eisenstein-hu":
            return self._shape_of_code(cosmology)
        values = {**cosmology.values(), "Omega_m": self.growth.background.Omega_cb}
        if is_compiled(values):
            parameters = {name: as_float64(value) for name, value in values.items()}
            return lambda k: compiled_shape(parameters, as_float64(k))
        return EisensteinHuShape(values)

    def _shape_of_code(self, cosmology: Cosmology) -> Callable[[Any], Any]:
        """Returns the power of cb as CAMB or CLASS have it, with the tilt of this n_s."""
        parameters = {name: getattr(cosmology, name) for name in SHAPE}
        code = cosmology.transfer.upper()
        values = {name: known_number(name, each, code) for name, each in parameters.items()}
        spline = boltzmann_spline(cosmology.transfer, cosmology.m_nu_shares, **values)
        tilt = as_array(parameters.pop("n_s")) - 1.0
        guard = without_gradient(parameters, code)
        shape = _TableShape(spline, self._growth_from(1.0), guard)
        ln_pivot = np.log(values["k_pivot"] / values["h"])
        return lambda k: shape(k) * exp(tilt * (log(k) - ln_pivot))

    def _shape_of_table(self, table: PowerTable) -> Callable[[Any], Any]:
        """Returns the power of cb as a table of one redshift has it."""
        parameters = {name: getattr(self.cosmology, name) for name in SHAPE}
        source = "a table of power"
        h = known_number("h", parameters["h"], source) if table.unit == "Mpc" else 1.0
        a = 1.0 / (1.0 + table.redshift)
        growth = self._growth_from(a, with_neutrinos=table.of == "matter")
        return _TableShape(spline_of(table, h), growth, without_gradient(parameters, source))

    def _growth_from(self, a: float, *, with_neutrinos: bool = False) -> Callable[[Any], Any]:
        """Returns, as a function of k, the overdensity at a for a linear overdensity D1 = 1 of cb.

        Args:
            a: scale factor.
            with_neutrinos: whether it is the overdensity of all matter, not of cb.
        """
        matter = self._matter if with_neutrinos else None
        if not self.growth.by_scale and matter is None:
            of_all_scales = self.growth.d1(a)
            return lambda k: of_all_scales
        return lambda k: self.growth.d1(a, k) * (1.0 if matter is None else matter(k, a))

    def rescaled(self, cosmology: Cosmology) -> LinearPower:
        """Returns the power of a cosmology that differs in A_s, sigma8 or f_NL only."""
        other = copy.copy(self)
        other.cosmology, other._amplitude = cosmology, self._amplitude_of(cosmology)
        return other

    @property
    def A_s(self) -> tf.Tensor:
        """The amplitude of the primordial spectrum, as given or as sigma8 implies it.

        Raises:
            ValueError: the power is a table, which does not tell it.
        """
        self._check_primordial("A_s")
        return as_float64(self._amplitude)

    @gives_tensor
    def __call__(self, k: Any, a: Any = 1.0) -> Any:
        """Returns the linear power at scale factor a [(Mpc/h)^3]; k [h/Mpc] and a broadcast."""
        power, matter = self.cb(k, a), self._matter
        if matter is None:
            return power
        return power * square(matter(as_array(k, "k", "h/Mpc"), as_array(a, "a")))

    @gives_tensor
    def cb(self, k: Any, a: Any = 1.0) -> Any:
        """Returns the linear power of cold dark matter and baryons, as for all matter."""
        if self.growth.by_scale:
            return self.without_growth(k, a) * self.growth.d1(a) ** 2
        return self.without_growth(k) * self.growth.d1(a) ** 2

    @gives_tensor
    def without_growth(self, k: Any, a: Any = 1.0) -> Any:
        """Returns the power of cb without growth [(Mpc/h)^3]: P_cb(k, a) / D1(a)^2.

        It depends on the scale factor a where growth depends on the wavenumber.
        """
        k, a = as_array(k, "k", "h/Mpc"), as_array(a, "a")
        positive = k > 0
        # A wavenumber of 1 in place of 0 keeps infinities out of the derivatives as well.
        power = self._amplitude * self._shape(where(positive, k, ones_like(k)))
        power = where(positive, power, zeros_like(power))
        if not self.growth.by_scale:
            return power
        return power * square(self.growth.d1(a, k) / self.growth.d1(a))

    @property
    def _matter(self) -> Callable[[Any, Any], Any] | None:
        """Of k and a, all matter's overdensity over the overdensity of cb; None if all is cb."""
        neutrinos = self.growth.background.neutrinos
        return None if neutrinos is None else neutrinos.matter

    @gives_tensor
    def potential(self, k: Any) -> Any:
        """Returns the power of phi, the Gaussian potential of the matter era [(Mpc/h)^3].

        It is +3/5 of the curvature perturbation: k^3 P / (2 pi^2) = 9/25 A_s (k/k_pivot)^(n_s - 1).
        The linear overdensity before growth is M phi with M^2 = without_growth(k) / potential(k).
        Here M = 2/3 k^2 T(k) c^2 / (Omega_m H0^2) for D1 -> a at early times.
        """
        self._check_primordial("the potential")
        k = as_array(k, "k", "h/Mpc")
        n_s, k_pivot, h = (as_array(getattr(self.cosmology, n)) for n in ("n_s", "k_pivot", "h"))
        positive = k > 0
        nonzero = where(positive, k, ones_like(k))
        tilted = exp((n_s - 1.0) * log(nonzero * h / k_pivot))
        power = 0.72 * np.pi**2 * self._amplitude * tilted / nonzero**3
        return where(positive, power, zeros_like(power))

    @gives_tensor
    def sigma8(self, a: Any = 1.0) -> Any:
        """Returns the rms linear overdensity of all matter in spheres of 8 Mpc/h at a [1]."""
        return sqrt(self._amplitude) * self._unit_sigma8(a)

    @gives_tensor
    def sigma8_cb(self, a: Any = 1.0) -> Any:
        """Returns the same of cold dark matter and baryons [1]."""
        return sqrt(self._amplitude) * self._unit_sigma8(a, of_cb=True)

    def _check_primordial(self, what: str) -> None:
        if self.cosmology.power is not None:
            raise ValueError(f"{self.cosmology.power} does not tell {what}: no primordial power")

    def _amplitude_of(self, cosmology: Cosmology) -> Any:
        """Returns A_s; with a table, the factor of its power."""
        if cosmology.sigma8 is None:
            return as_array(1.0 if cosmology.A_s is None else cosmology.A_s)
        return (as_array(cosmology.sigma8) / self._unit_today) ** 2

    def _unit_sigma8(self, a: Any, *, of_cb: bool = False) -> Any:
        """Returns sigma8 for A_s = 1 at scale factor a."""
        k, weights = _sigma8_quadrature()
        if not self.growth.by_scale:
            return sqrt(total(weights * self._shape(k))) * self.growth.d1(a)
        a = as_array(a, "a")[..., np.newaxis]
        growth = self.growth.d1(a, k)
        if self._matter is not None and not of_cb:
            growth = growth * self._matter(k, a)
        return sqrt(total(weights * self._shape(k) * square(growth)))


class _TableShape:
    """The power of cb for D1 = 1, from a table at one redshift: a spline of ln P in ln k.

    Args:
        spline: see `log_spline`.
        growth: the overdensity at the table's redshift for D1 = 1, a function of k [h/Mpc].
        guard: a factor, see `without_gradient`.
    """

    def __init__(self, spline: Spline, growth: Callable[[Any], Any], guard: Any) -> None:
        self._start, self._step, self._coefficients = spline
        self._growth, self._guard = growth, guard

    def __call__(self, k: Any) -> Any:
        ln_k = log(k)
        cells = self._coefficients.shape[0]
        position = (ln_k - self._start) / self._step
        inside = clip(position, 0.0, float(cells))
        cell = minimum(floor(inside), cells - 1.0)
        c = taken(self._coefficients, cell)
        u = inside - cell
        ln_power = c[..., 0] + u * (c[..., 1] + u * (c[..., 2] + u * c[..., 3]))
        end_slope = c[..., 1] + u * (2.0 * c[..., 2] + 3.0 * u * c[..., 3])
        ln_power += (position - inside) * end_slope
        return exp(ln_power) * self._guard / square(self._growth(k))


def known_number(name: str, parameter: object, source: str = "CAMB") -> float:
    """Returns a parameter as a number, or raises ValueError if only a graph knows it."""
    known = known_value(parameter)
    if known is None:
        raise ValueError(
            f"{source} needs the number of {name}, which is not known inside a tf.function: make "
            'the LinearPower outside of it, or use transfer="eisenstein-hu"'
        )
    return known


def without_gradient(
    parameters: Mapping[str, object],
    source: str = "CAMB",
    power: str = "linear power",
    instead: str = 'transfer="eisenstein-hu"',
) -> Any:
    """Returns 1, whose gradient by a parameter that is a tensor is an error.

    Args:
        parameters: the parameters by name.
        source: what has computed it, for the message.
        power: what it is, for the message.
        instead: what has the gradients, for the message.
    """
    guard = np.float64(1.0)
    for name, parameter in parameters.items():
        if is_tensor(parameter):
            message = (
                f"{source} gives no derivative of the {power} by {name}: use {instead} for "
                "gradients by it"
            )
            barrier = tf.raw_ops.PreventGradient(input=as_float64(parameter), message=message)
            guard += 0.0 * barrier
    return guard


@functools.cache
def _sigma8_quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Returns k [h/Mpc] and weights [(h/Mpc)^3], each [1024]: sigma8^2 = sum of weights * P(k).

    It is the trapezoidal rule in ln k; the integrand vanishes at both ends. sigma8 is exact to 2e-9
    in usual universes, and to 2e-8 with n_s = 1.2.
    """
    ln_k = np.linspace(np.log(1e-4), np.log(100.0), 1024)
    k = np.exp(ln_k)
    x = k * SIGMA8_RADIUS
    series = 1.0 - x**2 / 10.0 + x**4 / 280.0
    top_hat = np.where(x > 0.03, 3.0 * (np.sin(x) - x * np.cos(x)) / x**3, series)
    return k, (ln_k[1] - ln_k[0]) * k**3 / (2.0 * np.pi**2) * top_hat**2
