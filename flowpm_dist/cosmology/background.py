"""The expansion of a universe: densities, expansion rate, distances. It loads TensorFlow late."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from flowpm_dist.cosmology.arrays import (
    as_array,
    as_float64,
    cos,
    cosh,
    exp,
    gives_tensor,
    is_tensor,
    known,
    ones_like,
    repeated,
    sin,
    sinh,
    sqrt,
    total,
    where,
    zeros_like,
)
from flowpm_dist.cosmology.neutrinos import Neutrinos, Shares, photons
from flowpm_dist.cosmology.parameters import PARAMETERS, Cosmology, affecting
from flowpm_dist.options import in_unit, keep_in_units

A_MAX = 2.0
"""Largest scale factor [1] of growth functions and steps."""

HUBBLE_DISTANCE = 2997.92458
"""c/H0 [Mpc/h]."""

RADIATION = 1.0 / 3.0, 0.0
"""w0 and wa of radiation."""

GROWTH = affecting("growth")
"""The parameters that growth depends on."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)

_ROOTS = np.linspace(0.0, 1.0, 129)  # of scale factors
_CONVEX = 0.05  # root of a scale factor in the era of matter
_NEWTON = 10  # steps; each doubles the number of right digits, and the third has six


def expansion_parameters(*, radiation: bool) -> tuple[str, ...]:
    """Returns the names of the parameters that E(a) and growth depend on."""
    return affecting("background", "growth") if radiation else GROWTH


@dataclasses.dataclass(frozen=True)
class Fluid:
    """A part of the universe that expands with it and does not cluster.

    Its equation of state is w(a) = w0 + wa (1 - a) (Chevallier and Polarski 2001, gr-qc/0009008;
    Linder 2003, astro-ph/0208512).

    Attributes:
        Omega: its density today over the critical density [1].
        w0, wa: its equation of state [1]: pressure over density. w0 + wa must be below 0, or it is
            radiation, with w0 = 1/3 and wa = 0: growth starts from these and from matter alone.
    """

    Omega: Any
    w0: Any
    wa: Any = 0.0

    def __post_init__(self) -> None:
        keep_in_units(self, Omega="", w0="", wa="")
        early = known(self.w0 + self.wa)
        if early is not None and not early < 0 and (known(self.w0), known(self.wa)) != RADIATION:
            raise ValueError(f"w0 + wa = {early:g} of a fluid: must be below 0; or it is radiation")

    @property
    def is_radiation(self) -> bool:
        """Whether it expands as photons do."""
        return (known(self.w0), known(self.wa)) == RADIATION

    def w(self, a: Any) -> Any:
        """Pressure over density at scale factors a [1], arrays or tensors."""
        a = in_unit("a", a)
        return self.w0 + self.wa * (1.0 - a)

    def a3_density(self, a: Any) -> Any:
        """Density times a^3 over the critical density today [1]."""
        a = in_unit("a", a)
        return self.Omega * a ** (-3.0 * (self.w0 + self.wa)) * exp(-3.0 * self.wa * (1.0 - a))


class Background:
    """Expansion rate and densities as functions of the scale factor.

    Every method takes `a` [1] of any shape (number, array or tensor) and returns a float64 tensor
    of that shape, differentiable by the parameters.

    The universe is made of cold matter with baryons, which cluster, and of fluids: `others`, and
    dark energy, which has what is left of the critical density. A universe with more in it is a
    subclass with more `others`; growth, distances and the normalisation of the power follow.

    With radiation, the fluids have photons and neutrinos. Massive neutrinos become part of matter;
    at small scales they do not cluster, see `neutrinos.Neutrinos`.

    Args:
        parameters: a `Cosmology`, or its parameters by name: those that the fluids need. Among
            these, "radiation" is True or False, and "m_nu_shares" as in `Cosmology`.

    Attributes:
        values: the parameters by name, as float64 arrays or tensors.
        m_nu_shares: the shares of the masses of neutrinos, see `Cosmology.m_nu_shares`.
        has_radiation: whether anything in it is radiation at early times.
        neutrinos: those that have a mass; None without.
        Omega_m: matter today over the critical density, massive neutrinos included [1].
        Omega_cb: cold dark matter and baryons today over the critical density [1].
        Omega_de: dark energy today over the critical density [1].
        Omega_k: the curvature of space [1], 0 where it is flat.
    """

    def __init__(self, parameters: Cosmology | Mapping[str, Any]) -> None:
        if not isinstance(parameters, Mapping):
            parameters = {**parameters.values(), **parameters.expansion}
        filled = {name: parameters.get(name, row.default) for name, row in PARAMETERS.items()}
        self.values = {name: as_array(v) for name, v in filled.items() if v is not None}
        self._with_radiation = bool(parameters.get("radiation", False))
        self.m_nu_shares: Shares = tuple(parameters.get("m_nu_shares", ()))
        self.Omega_m, self.Omega_k = self.values["Omega_m"], self.values["Omega_k"]
        self.neutrinos = self._massive_neutrinos()
        self.Omega_cb = self.Omega_m
        if self.neutrinos is not None:
            self.Omega_cb = self.Omega_m - self.neutrinos.Omega_matter
        others = self.others()
        self.Omega_de = reduce(lambda left, fluid: left - fluid.Omega, others, 1.0 - self.Omega_cb)
        self.dark_energy = Fluid(self.Omega_de, self.values["w0"], self.values["wa"])
        self.fluids = (self.dark_energy, *others)
        self.has_radiation = any(fluid.is_radiation for fluid in self.fluids)

    def __repr__(self) -> str:
        densities = (f"{name}={getattr(self, name)}" for name in ("Omega_m", "Omega_de", "Omega_k"))
        return f"{type(self).__name__}({', '.join(densities)}, fluids={self.fluids})"

    @property
    def is_flat(self) -> bool:
        """Whether space is flat; not if Omega_k is a tensor, whatever its value."""
        return not is_tensor(self.Omega_k) and bool(self.Omega_k == 0)

    def others(self) -> tuple[Fluid | Neutrinos, ...]:
        """Returns the fluids besides dark energy: curvature expands as one with w = -1/3."""
        curvature = () if self.is_flat else (Fluid(self.Omega_k, -1.0 / 3.0),)
        if not self._with_radiation:
            return curvature
        light = photons(self.values["T_cmb"], self.values["h"])
        if self.neutrinos is not None:
            return (*curvature, Fluid(light, *RADIATION), self.neutrinos)
        return (*curvature, Fluid(light + self._all_neutrinos().Omega_massless, *RADIATION))

    def _massive_neutrinos(self) -> Neutrinos | None:
        """Returns the neutrinos if they may have a mass; a tensor is a mass, whatever its value."""
        mass = self.values["m_nu"]
        massless = not is_tensor(mass) and bool(mass == 0)
        return None if massless or not self._with_radiation else self._all_neutrinos()

    def _all_neutrinos(self) -> Neutrinos:
        names = ("m_nu", "N_eff", "T_cmb", "h", "Omega_m")
        return Neutrinos(**{name: self.values[name] for name in names}, shares=self.m_nu_shares)

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
        """a^3 E^2 [1], which stays finite at a = 0 without radiation."""
        a = as_array(a, "a")
        return reduce(add, (fluid.a3_density(a) for fluid in self.fluids), self.Omega_cb)

    @gives_tensor
    def dlne_dlna(self, a: Any) -> Any:
        """dlnE/dlna = dlnH/dlna [1]."""
        a = as_array(a, "a")
        pressures = [fluid.w(a) * share for fluid, share in self.shares(a)]
        return -1.5 * (1.0 + reduce(add, pressures))

    @gives_tensor
    def omega_m(self, a: Any) -> Any:
        """Matter over the critical density at a [1], as `clustering` counts it."""
        a = as_array(a, "a")
        return self.clustering(a) / self.a3_e2(a)

    @gives_tensor
    def clustering(self, a: Any) -> Any:
        """Density times a^3 of what clusters at large scales over the critical density today [1].

        It is `Omega_m`, or less while massive neutrinos are still radiation.
        """
        a = as_array(a, "a")
        if self.neutrinos is None:
            return self.Omega_m * ones_like(a)
        return self.Omega_cb + self.neutrinos.a3_clustering(a)

    @gives_tensor
    def omega_de(self, a: Any) -> Any:
        """Dark energy over the critical density at a [1]."""
        (_, share), *_ = self.shares(a)
        return share

    @gives_tensor
    def w(self, a: Any) -> Any:
        """Equation of state of dark energy, pressure over density [1]."""
        return self.dark_energy.w(as_array(a, "a"))

    def shares(self, a: Any) -> list[tuple[Fluid | Neutrinos, Any]]:
        """Returns each fluid with its density over the critical density at a [1]."""
        a = as_array(a, "a")
        densities = [(fluid, fluid.a3_density(a)) for fluid in self.fluids]
        critical = reduce(add, (density for _, density in densities), self.Omega_cb)
        return [(fluid, density / critical) for fluid, density in densities]


def background_of(universe: Cosmology | Background) -> Background:
    """Returns the background of a cosmology, or the one given."""
    return universe if isinstance(universe, Background) else Background(universe)


class Distances:
    """Comoving distances of scale factors, and scale factors of comoving distances.

    chi(a) = c/H0 int_a^1 da / (a^2 E). With u = sqrt(a) the integrand is 2 / sqrt(a^3 E^2), which
    is smooth down to a = 0, and is integrated by Gauss-Legendre quadrature to 1e-12 or better.

    The methods take numbers, arrays or tensors of any shape, and return a float64 tensor of that
    shape, differentiable by their argument and by the parameters (`scale_factor` up to the third
    derivative).

    Args:
        universe: the parameters, or the background.
    """

    def __init__(self, universe: Cosmology | Background) -> None:
        self.background = background_of(universe)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.background})"

    @gives_tensor
    def comoving(self, a: Any) -> Any:
        """Returns the comoving distance chi [Mpc/h] of scale factors a [1].

        Raises:
            ValueError: a scale factor that is not above 0, or is above 2.
        """
        a = as_array(a, "a")
        times = known(a)
        if times is not None and not np.all((times > 0) & (times <= A_MAX)):
            raise ValueError(f"scale factors must lie above 0 and not above {A_MAX:g}, got {times}")
        return self._of_root(sqrt(a))

    @gives_tensor
    def scale_factor(self, chi: Any) -> Any:
        """Returns the scale factor a [1] at which light left a comoving distance chi [Mpc/h].

        Newton's method in sqrt(a): chi is convex in it, so that a start at a = 0 converges too.

        Raises:
            ValueError: a distance that is negative, or from which light has not yet arrived.
        """
        chi = as_array(chi, "chi", "Mpc/h")
        horizon = self._of_root(np.zeros([]))
        values, limit = known(chi), known(horizon)
        both = values is not None and limit is not None
        if both and not np.all((values >= 0) & (values < limit)):
            raise ValueError(
                f"distances must lie between 0 and the horizon at {limit:.0f} Mpc/h, got {values}"
            )
        if not both:
            root = as_float64(zeros_like(chi))
            if self.background.has_radiation:  # not convex further back
                root = root + _CONVEX
            root = repeated(lambda x: self._newton(x, chi), root, _NEWTON)
        else:
            # A table gives five or more right digits, two steps from there give all.
            reached = np.asarray(self._of_root(_ROOTS))
            root = np.interp(values, reached[::-1], _ROOTS[::-1])
            root = repeated(lambda x: self._newton(x, chi), root, 2)
        # Two more steps hardly change the solution; they provide its derivatives.
        return self._newton(self._newton(root, chi), chi) ** 2

    @gives_tensor
    def redshift(self, chi: Any) -> Any:
        """Returns the redshift z [1] of a comoving distance [Mpc/h], as `scale_factor` does."""
        return 1.0 / self.scale_factor(chi) - 1.0

    @gives_tensor
    def transverse(self, chi: Any) -> Any:
        """Returns the comoving transverse distance f_K [Mpc/h] of comoving distances chi [Mpc/h].

        A length across the line of sight, divided by the angle under which it is seen, is a f_K
        (Hogg 1999, astro-ph/9905116). In flat space f_K = chi. With Omega_k > 0 it is
        c/H0 sinh(sqrt(Omega_k) chi H0/c) / sqrt(Omega_k). With Omega_k < 0 it is the same with
        -Omega_k and the sine.
        """
        chi = as_array(chi, "chi", "Mpc/h")
        if self.background.is_flat:
            return chi
        x, far, root = self._curvature(chi)
        series = 1.0 + x / 6.0 * (1.0 + x / 20.0 * (1.0 + x / 42.0))
        return chi * where(far, where(x > 0, sinh(root), sin(root)) / root, series)

    @gives_tensor
    def transverse_slope(self, chi: Any) -> Any:
        """Returns C = d f_K / d chi [1] at comoving distances chi [Mpc/h], 1 in flat space.

        It is cosh(sqrt(Omega_k) chi H0/c), or the cosine as in `transverse`. With it,
        f_K(chi_2 - chi_1) = f_K(chi_2) C(chi_1) - f_K(chi_1) C(chi_2).
        """
        chi = as_array(chi, "chi", "Mpc/h")
        if self.background.is_flat:
            return ones_like(chi)
        x, far, root = self._curvature(chi)
        series = 1.0 + x / 2.0 * (1.0 + x / 12.0 * (1.0 + x / 30.0 * (1.0 + x / 56.0)))
        return where(far, where(x > 0, cosh(root), cos(root)), series)

    @gives_tensor
    def tangent(self, chi: Any) -> Any:
        """Returns f_K / C [Mpc/h] at comoving distances chi [Mpc/h], see `transverse_slope`.

        With t for it, f_K(chi_2 - chi_1) / f_K(chi_2) = C(chi_1) - f_K(chi_1) / t(chi_2).
        """
        return self.transverse(chi) / self.transverse_slope(chi)

    def widest(self, chi: Any) -> float:
        """Returns the largest f_K [Mpc/h] up to a comoving distance chi [Mpc/h], a number.

        In a closed universe f_K decreases beyond a quarter of the way around it.
        """
        end, curvature = float(in_unit("chi", chi, "Mpc/h")), known(self.background.Omega_k)
        if curvature < 0:
            end = min(end, 0.5 * np.pi * HUBBLE_DISTANCE / float(np.sqrt(-curvature)))
        return float(known(self.transverse(end)))

    def _curvature(self, chi: Any) -> tuple[Any, Any, Any]:
        """Returns x = Omega_k (chi H0/c)^2, whether a series in x is too short, and the root."""
        x = self.background.Omega_k * (chi / HUBBLE_DISTANCE) ** 2
        far = abs(x) > 1e-2
        return x, far, sqrt(where(far, abs(x), ones_like(x)))

    def _of_root(self, root: Any) -> Any:
        """Returns the distance [Mpc/h] of root = sqrt(a)."""
        half = 0.5 * (1.0 - root)
        nodes = root[..., np.newaxis] + half[..., np.newaxis] * (1.0 + _NODES)
        slopes = 2.0 / sqrt(self.background.a3_e2(nodes**2))
        return HUBBLE_DISTANCE * half * total(_WEIGHTS * slopes)

    def _newton(self, root: Any, chi: Any) -> Any:
        slope = 2.0 * HUBBLE_DISTANCE / sqrt(self.background.a3_e2(root**2))
        return root + (self._of_root(root) - chi) / slope
