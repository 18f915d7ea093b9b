"""Photons and neutrinos: their part of the expansion, and how massive neutrinos cluster.

A neutrino species has a third of `N_eff`, so its temperature is (4/11)^(1/3) (N_eff/3)^(1/4) T_cmb.
Its density is the integral of Fermi and Dirac's distribution over momenta. Its clustering is the
linear response of Chen, Upadhye and Wong 2020 (arXiv:2011.12504), which joins the exact limits of
small and of large wavenumbers:

    delta_nu = g delta_m,   g = (1 + k / k_FS)^-2,   k_FS = sqrt(1.5 Omega_m a) H0 / sigma_nu,

of each species, where sigma_nu is its speed today (Ringwald and Wong 2004, hep-ph/0408241). So the
overdensity of all matter is F delta_cb, with F = (1 - f_nu) / (1 - f_nu g), where f_nu and f_nu g
are summed over species. For gravity, the fraction f_nu of matter counts rho - 3 p, which is the
mass density at late times and 0 for radiation. For the power of all matter it counts the mass.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from flowpm_dist.cosmology.arrays import ones_like, sqrt, square, total, where

PHOTONS = 2.4729753e-5 / 2.7255**4
"""Omega h^2 of photons, over the fourth power of their temperature [1/K^4]."""

SPECIES = 3
"""The number of neutrino species."""

MASSLESS = 7 / 8 * (4 / 11) ** (4 / 3)
"""The density of a massless species over the density of photons [1]."""

_KELVIN = 8.617333262e-5  # [eV]
_ZETA3 = 1.2020569031595942
_HEAVY = 180 * _ZETA3 / (7 * math.pi**4)  # density over massless, by mass over temperature
_SPREAD = math.sqrt(1.5 * _ZETA3 / math.log(2))  # sigma_nu over c, by temperature over mass
_SPEED_OF_LIGHT = 2997.92458  # [100 km/s]


def _momenta() -> tuple[np.ndarray, np.ndarray]:
    """Returns momenta over temperature and weights of densities over massless ones, to 1e-11."""
    t, w = np.polynomial.legendre.leggauss(32)
    t, w = 0.5 * (t + 1.0), 0.5 * w
    q = 35.0 * t**2
    return q, 120 / (7 * math.pi**4) * q**2 / (np.exp(q) + 1.0) * 70.0 * t * w


_MOMENTA, _WEIGHTS = _momenta()

Shares: TypeAlias = tuple[float, ...]
"""The mass of each species over the sum of the masses [1]; none where all are equal."""


def shares_of(masses: Sequence[float]) -> Shares:
    """Returns the shares of three masses, or of other numbers in the same proportion.

    Raises:
        ValueError: they are not three, or one is negative or not finite, or all are 0.
    """
    each = np.asarray(masses, np.float64)
    if each.shape != (SPECIES,) or not (np.isfinite(each) & (each >= 0)).all() or not each.any():
        raise ValueError(f"must be {SPECIES} numbers of at least 0, not all 0; got {masses}")
    if np.ptp(each) <= 1e-12 * each.max():
        return ()
    return tuple(float(share) for share in each / each.sum())


def sum_and_shares(masses: Sequence[float]) -> tuple[float, Shares]:
    """Returns the sum of three masses, and their shares of it; see `shares_of`."""
    return math.fsum(masses), shares_of(masses) if any(masses) else ()


def photons(T_cmb: Any, h: Any) -> Any:
    """Returns the density of photons today over the critical density [1].

    Args:
        T_cmb: their temperature [K].
        h: Hubble constant [100 km/s/Mpc].
    """
    return PHOTONS * T_cmb**4 / h**2


@dataclass(frozen=True)
class Neutrinos:
    """Three neutrinos, of equal mass unless `shares` are given. Massless ones are radiation.

    Its methods take scale factors a [1] and wavenumbers k [h/Mpc], which broadcast, as arrays or
    tensors, and are differentiable by the parameters, also where the mass is 0.

    Attributes:
        m_nu: the sum of the masses [eV].
        N_eff: their effective number [1].
        T_cmb: temperature of the photons [K].
        h: Hubble constant [100 km/s/Mpc].
        Omega_m: all matter today over the critical density [1].
        shares: see `Shares`.
    """

    m_nu: Any
    N_eff: Any
    T_cmb: Any
    h: Any
    Omega_m: Any
    shares: Shares = ()

    @property
    def Omega_massless(self) -> Any:
        """Their density today if they had no mass [1]."""
        return MASSLESS * self.N_eff * photons(self.T_cmb, self.h)

    @property
    def is_radiation(self) -> bool:
        """Whether they expand as photons do: at early times."""
        return True

    @property
    def _mass(self) -> Any:
        """The mean mass over the temperature today [1]."""
        temperature = (4 / 11) ** (1 / 3) * sqrt(sqrt(self.N_eff / SPECIES)) * self.T_cmb
        return self.m_nu / SPECIES / (_KELVIN * temperature)

    @property
    def species(self) -> Sequence[float]:
        """The mass of each species that has one, over the mean mass [1]; one for equal masses."""
        return [SPECIES * share for share in self.shares if share > 0] if self.shares else [1.0]

    @functools.cached_property
    def _nodes(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Momenta, weights, and masses over the mean mass: of one species, or of three in turn."""
        if not self.shares:
            return _MOMENTA, _WEIGHTS, 1.0
        momenta, weights = (np.tile(values, SPECIES) for values in (_MOMENTA, _WEIGHTS))
        return momenta, weights / SPECIES, np.repeat(SPECIES * np.array(self.shares), len(_MOMENTA))

    @property
    def Omega_matter(self) -> Any:
        """Their part of `Omega_m` [1]: masses times numbers, without the energy of motion."""
        return _HEAVY * self._mass * self.Omega_massless

    @property
    def Omega(self) -> Any:
        """Their density today over the critical density [1]."""
        return self.a3_density(np.ones([]))

    def a3_density(self, a: Any) -> Any:
        """Density times a^3 over the critical density today [1]."""
        _, weights, _ = self._nodes
        return self.Omega_massless * total(weights * self._energies(a)) / a

    def a3_clustering(self, a: Any) -> Any:
        """Density less three times the pressure, times a^3, over the critical density today [1]."""
        return functools.reduce(operator.add, self._clustering(a))

    def _clustering(self, a: Any) -> list[Any]:
        """Returns the terms of `a3_clustering`, of each species that has a mass."""
        share = 1 / SPECIES if self.shares else 1.0
        terms = []
        for mass in self.species:
            of_mass = square((mass * self._mass * a)[..., np.newaxis])
            heavy = of_mass / sqrt(_MOMENTA**2 + of_mass)
            terms.append(share * self.Omega_massless * total(_WEIGHTS * heavy) / a)
        return terms

    def w(self, a: Any) -> Any:
        """Pressure over density [1]."""
        (momenta, weights, _), energy = self._nodes, self._energies(a)
        return total(weights * momenta**2 / energy) / (3.0 * total(weights * energy))

    def _energies(self, a: Any) -> Any:
        """Returns the energies at the nodes of the quadrature over the temperature, [..., node]."""
        momenta, _, masses = self._nodes
        return sqrt(momenta**2 + square((self._mass * a)[..., np.newaxis] * masses))

    def fractions(self, a: Any) -> list[Any]:
        """Returns f_nu of each species, its part of what clusters at large scales [1]."""
        parts = self._clustering(a)
        all_of_it = self.Omega_m - self.Omega_matter + functools.reduce(operator.add, parts)
        return [part / all_of_it for part in parts]

    def free_streaming(self, a: Any) -> list[Any]:
        """Returns the wavenumber k_FS of each species, beyond which it does not cluster [h/Mpc]."""
        speed = _SPREAD * _SPEED_OF_LIGHT  # times temperature over mass, at a = 1 [100 km/s]
        mean = sqrt(1.5 * self.Omega_m * a) * self._mass / speed
        return [mass * mean for mass in self.species]

    def gravity(self, k: Any, a: Any) -> Any:
        """Returns F: what clusters, over the overdensity of cb [1], see `fractions`."""
        return self._response(k, a, self.fractions(a))

    def matter(self, k: Any, a: Any) -> Any:
        """Returns F of matter by its mass: its overdensity, over the overdensity of cb [1]."""
        mean = self.Omega_matter / self.Omega_m
        share = 1 / SPECIES if self.shares else 1.0
        return self._response(k, a, [share * mass * mean for mass in self.species])

    def _response(self, k: Any, a: Any, fractions: list[Any]) -> Any:
        scales, mean = self.free_streaming(a), k <= 0  # which clusters, whatever the mass
        k = where(mean, ones_like(k), k)
        clustered = [
            fraction * where(mean, ones_like(scale / k), square(scale / (scale + k)))
            for fraction, scale in zip(fractions, scales, strict=True)
        ]
        rest = 1.0 - functools.reduce(operator.add, fractions)
        return rest / (1.0 - functools.reduce(operator.add, clustered))
