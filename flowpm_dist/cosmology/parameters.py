"""The parameters and the expansion of a flat universe of matter and dark energy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_array, as_float64, exp, gives_tensor, is_tensor, sqrt
from flowpm_dist.cosmology.options import (
    K_PIVOT,
    LATEST_DARK_ENERGY,
    PARAMETER_UNITS,
    RANGES,
    SHAPE,
    T_CMB,
    Transfer,
    dark_energy_fades,
)
from flowpm_dist.options import in_unit
from flowpm_dist.options.html import as_html

Parameter: TypeAlias = float | tf.Tensor | tf.Variable
"""A number, or a scalar floating tensor when gradients are wanted."""

AMPLITUDES = ("A_s", "sigma8")
_compiled = ContextVar("compiled", default=False)


@contextmanager
def compiled_cosmologies() -> Iterator[None]:
    """Compiles growth and power of cosmologies that are made of tensors in the `with` block.

    Compiling takes a few seconds, once. Each evaluation then takes a third of the time. Posteriors
    use this, because each of their evaluations has another cosmology.
    """
    token = _compiled.set(True)
    try:
        yield
    finally:
        _compiled.reset(token)


@dataclass(frozen=True)
class Cosmology:
    """Parameters of a flat universe of matter and w0-wa dark energy, checked at construction.

    Values are Python numbers, or scalar TensorFlow tensors or variables to differentiate by. A
    tensor whose value is not known yet (inside a tf.function) is not checked.

    Attributes:
        Omega_m: matter (cold dark matter and baryons) today over the critical density [1].
        Omega_b: baryons today over the critical density [1].
        h: Hubble constant [100 km/s/Mpc].
        n_s: tilt of the primordial scalar spectrum [1].
        A_s: amplitude of the primordial scalar spectrum at `k_pivot` [1]; or
        sigma8: rms linear overdensity in spheres of 8 Mpc/h today [1]. Exactly one of the two.
        w0, wa: dark energy equation of state w(a) = w0 + wa (1 - a) [1].
        T_cmb: temperature of the microwave background today [K], for the transfer function only:
            E(a) has no radiation.
        k_pivot: pivot wavenumber of `A_s` and `n_s` [1/Mpc].
        transfer: "eisenstein-hu" (differentiable) or "camb" (tables, needs the package camb).

    Raises:
        ValueError: a value out of its range, or not exactly one amplitude.
        TypeError: a value that is neither a number nor a scalar floating tensor.
    """

    Omega_m: Parameter
    Omega_b: Parameter
    h: Parameter
    n_s: Parameter
    A_s: Parameter | None = None
    sigma8: Parameter | None = None
    w0: Parameter = -1.0
    wa: Parameter = 0.0
    T_cmb: Parameter = T_CMB
    k_pivot: Parameter = K_PIVOT
    transfer: Transfer = "eisenstein-hu"

    def __post_init__(self) -> None:
        given = [name for name in AMPLITUDES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "exactly one of A_s and sigma8 must be given, got "
                + ("both" if given else "neither")
            )
        if self.transfer not in get_args(Transfer):
            known = ", ".join(map(repr, get_args(Transfer)))
            raise ValueError(f"transfer must be one of {known}, got {self.transfer!r}")
        for name in (*SHAPE, *given):
            object.__setattr__(self, name, _scalar(name, getattr(self, name)))
        value = {name: known_value(getattr(self, name)) for name in self.names}
        for name, number in value.items():
            if number is not None and not RANGES[name].holds(number):
                raise ValueError(f"{name} must be {RANGES[name].what}; got {number:g}")
        baryons, matter = value["Omega_b"], value["Omega_m"]
        if baryons is not None and matter is not None and baryons >= matter:
            raise ValueError(
                f"Omega_b must be below Omega_m, which contains it: got Omega_b = {baryons:g}, "
                f"Omega_m = {matter:g}"
            )
        w0, wa = value["w0"], value["wa"]
        if w0 is not None and wa is not None and not dark_energy_fades(w0, wa):
            raise ValueError(
                f"w0 + wa must be at most {LATEST_DARK_ENERGY:g}, so that matter dominates early: "
                f"got w0 = {w0:g}, wa = {wa:g}"
            )

    @classmethod
    def planck18(cls) -> Cosmology:
        """Planck 2018 with lensing and BAO (arXiv:1807.06209), normalised to its sigma8 today.

        Planck's cosmology has neutrinos of 0.06 eV, which slow the growth of structure. This one
        has no neutrinos. With Planck's A_s = 2.1064e-9 it would have sigma8 = 0.829 (0.823 with
        CAMB's transfer function), and its power today would be 5 % too high. Therefore sigma8 is
        set instead; the A_s that it implies is lower by 5 %.
        """
        return cls(Omega_m=0.30966, Omega_b=0.04897, h=0.6766, n_s=0.96822, sigma8=0.8102)

    @classmethod
    def from_astropy(cls, cosmology: Any, **parameters: Any) -> Cosmology:
        """The matter and dark energy of an `astropy.cosmology` object.

        Radiation and neutrinos are left out. Their share of the density is added to dark energy, so
        that the universe stays flat. A warning says how large this share was.

        Args:
            cosmology: FlatLambdaCDM, FlatwCDM, Flatw0waCDM, or LambdaCDM, wCDM, w0waCDM without
                curvature.
            **parameters: parameters that astropy does not have (`n_s`, and `A_s` or `sigma8`), and
                any that replace astropy's.

        Raises:
            TypeError: another kind of dark energy, or not an astropy cosmology.
            ValueError: a curved universe; no baryon density, `n_s` or amplitude is given.
        """
        from flowpm_dist.cosmology.astropy_bridge import parameters_from_astropy

        if "n_s" not in parameters or not any(name in parameters for name in AMPLITUDES):
            given = ", ".join(parameters) or "neither"
            raise ValueError(
                "astropy's cosmologies have no spectrum of initial fluctuations: give n_s, and A_s "
                f"or sigma8, as keywords (given: {given})"
            )
        return cls(**{**parameters_from_astropy(cosmology, parameters), **parameters})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numerical parameters that are set, A_s or sigma8 among them."""
        return SHAPE + tuple(n for n in AMPLITUDES if getattr(self, n) is not None)

    @property
    def is_compiled(self) -> bool:
        """Whether growth and power of this cosmology are compiled, see `compiled_cosmologies`."""
        return _compiled.get() and any(is_tensor(getattr(self, n)) for n in self.names)

    def parameters(self) -> dict[str, tf.Tensor]:
        """The numerical parameters that are set, by name, as scalar float64 tensors."""
        return {name: as_float64(getattr(self, name)) for name in self.names}

    def values(self) -> dict[str, Any]:
        """The same as NumPy's numbers where they are plain numbers, for `cosmology.arrays`."""
        return {name: as_array(getattr(self, name)) for name in self.names}

    def numbers(self) -> dict[str, Any]:
        """Returns plain numbers that make the same cosmology, as `Cosmology(**numbers)`."""
        values = {name: float(getattr(self, name)) for name in self.names}
        return {**values, "transfer": self.transfer}

    def facts(self) -> dict[str, str]:
        """Returns the parameters as texts by name, for notebooks."""
        values = {name: known_value(getattr(self, name)) for name in self.names}
        texts = {n: "a tensor" if v is None else f"{v:.6g}" for n, v in values.items()}
        return texts | {"transfer": self.transfer}

    def _repr_html_(self) -> str:
        return as_html(self, self.facts)

    def replace(self, **changes: Any) -> Cosmology:
        """A copy with some parameters changed; a new A_s replaces sigma8, and vice versa.

        Raises:
            TypeError: an unknown parameter.
            ValueError: as at construction.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise TypeError(f"no cosmological parameter {name!r}: one of {', '.join(known)}")
        if changes.get("A_s") is not None:
            changes.setdefault("sigma8", None)
        elif changes.get("sigma8") is not None:
            changes.setdefault("A_s", None)
        return dataclasses.replace(self, **changes)


def _scalar(name: str, value: Any) -> Parameter:
    if is_tensor(value):
        if not value.dtype.is_floating:
            raise TypeError(f"{name} must be a floating tensor, got {value.dtype.name}")
        if value.shape.rank not in (0, None):
            raise TypeError(f"{name} must be a scalar, got a tensor of shape {value.shape}")
        return value
    value = in_unit(name, value, PARAMETER_UNITS.get(name, ""))
    if isinstance(value, (bool, str)) or np.ndim(value) != 0:
        raise TypeError(f"{name} must be a number or a scalar tensor, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a scalar tensor, got {value!r}") from None


def known_value(value: Any) -> float | None:
    """The number behind `value`, or None when a graph has yet to compute it."""
    if is_tensor(value):
        known = tf.get_static_value(value.read_value() if hasattr(value, "read_value") else value)
        return None if known is None else float(known)
    return float(value)


class Background:
    """Expansion rate and matter density as functions of the scale factor.

    Every method takes `a` [1] of any shape (number, array or tensor) and returns a float64 tensor
    of that shape, differentiable by the parameters.

    Dark energy follows w(a) = w0 + wa (1 - a) (Chevallier and Polarski 2001, gr-qc/0009008;
    Linder 2003, astro-ph/0208512).
    """

    def __init__(self, cosmology: Cosmology) -> None:
        values = cosmology.values()
        self.cosmology = cosmology
        self.Omega_m = values["Omega_m"]
        self.Omega_de = 1.0 - self.Omega_m
        self.w0 = values["w0"]
        self.wa = values["wa"]

    @gives_tensor
    def e(self, a: Any) -> Any:
        """Expansion rate E = H/H0 [1]."""
        return sqrt(self.e2(a))

    @gives_tensor
    def e2(self, a: Any) -> Any:
        """E^2 = (H/H0)^2 [1]."""
        a = as_array(a, "a")
        return self.a3_e2(a) / a**3

    @gives_tensor
    def a3_e2(self, a: Any) -> Any:
        """a^3 E^2 [1], which stays finite at a = 0."""
        return self.Omega_m + self._dark_energy(as_array(a, "a"))

    @gives_tensor
    def dlne_dlna(self, a: Any) -> Any:
        """dlnE/dlna = dlnH/dlna [1]."""
        a = as_array(a, "a")
        return -1.5 * (1.0 + self.w(a) * self.omega_de(a))

    @gives_tensor
    def omega_m(self, a: Any) -> Any:
        """Matter over the critical density at a [1]."""
        return self.Omega_m / self.a3_e2(a)

    @gives_tensor
    def omega_de(self, a: Any) -> Any:
        """Dark energy over the critical density at a [1]."""
        dark_energy = self._dark_energy(as_array(a, "a"))
        return dark_energy / (self.Omega_m + dark_energy)

    @gives_tensor
    def w(self, a: Any) -> Any:
        """Equation of state of dark energy, pressure over density [1]."""
        return self.w0 + self.wa * (1.0 - as_array(a, "a"))

    def _dark_energy(self, a: Any) -> Any:
        """Density of dark energy times a^3, over the critical density today."""
        return self.Omega_de * a ** (-3.0 * (self.w0 + self.wa)) * exp(-3.0 * self.wa * (1.0 - a))
