"""Galaxies in halos: a halo occupation distribution, with satellites in NFW profiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.special import erf, lambertw, ndtri, spence
from scipy.stats import poisson

from flowpm_dist.catalogues.abundance import predicted
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.options import HOD, MOST_SATELLITES
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.space import Space
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.particles import CRITICAL_DENSITY, HUBBLE
from flowpm_dist.options import python_object
from meshimpl.philox import uniform_pair

G = 3 * HUBBLE**2 / (8 * np.pi * CRITICAL_DENSITY * 1e10)
"""Constant of gravity [(km/s)^2 Mpc / Msun]."""
PURPOSE = 0x484F4400
"""Last word of the counters of random numbers, plus the number of the draw: no other numbers of the
same seed, such as white noise at the lattice site that is a halo's id, have these counters."""


def populate(halos: Catalogue, hod: HOD | None = None) -> Catalogue:
    """Returns galaxies in halos. On all ranks together; the same on any number of ranks.

    A halo has a central galaxy or none, at its position and with its velocity, and a Poisson number
    of satellites, whether or not it has a central. Satellites follow an NFW profile (Navarro, Frenk
    and White 1997) about the halo's position, isotropic, out to the radius of 200 times the mean
    density: `radius_200m` where the catalogue has it, and otherwise the radius of a sphere of the
    halo's `mass`. Their velocities are the halo's and a Gaussian one, isotropic, whose dispersion
    solves the Jeans equation of the profile (Lokas and Mamon 2001). The occupation depends on
    `mass`. A galaxy lies on the rank of its halo, even where it is outside the rank's block.

    Args:
        halos: at one time.
        hod: the occupation.

    Returns:
        Galaxies with columns host, host_mass, central, satellite, position and velocity.

    Raises:
        ValueError: galaxies, or halos of a light cone; or mean numbers that halos
            cannot have.
    """
    hod = hod or HOD()
    if halos.kind != "halos" or "scale_factor" in halos.columns:
        kind = halos.kind if halos.kind != "halos" else "halos of a light cone"
        raise ValueError(f"galaxies are placed in halos at one time, not in {kind}")
    halos.mesh.check_equal("galaxies", hod=hod)
    centrals, satellites = _numbers(halos, hod)
    row = np.concatenate([np.flatnonzero(centrals), np.repeat(np.arange(len(halos)), satellites)])
    number = _counted(satellites)
    satellite = np.concatenate([np.zeros(len(row) - len(number), np.int64), number])
    position, velocity = halos["position"][row], halos["velocity"][row].astype(np.float64)
    outer = slice(len(row) - len(number), None)
    moved, faster = _in_profile(halos, hod, row[outer], number)
    space = Space(halos.box_size, halos.mesh)
    position[outer] = space.positions(space.places(position[outer] + moved))
    velocity[outer] += faster
    columns = {
        "host": halos["id"][row],
        "host_mass": halos["mass"][row],
        "central": satellite == 0,
        "satellite": satellite,
        "position": position,
        "velocity": velocity,
    }
    about = {**halos.about, "hod": hod.model_dump(mode="json", exclude={"occupation"})}
    return replace(halos.with_columns(columns, "galaxies"), about=about).sorted()


def check_occupation(hod: HOD | None, section: str) -> None:
    """Imports a user's own occupation, so that a mistake ends a job before its work.

    Args:
        hod: the occupation; None checks nothing.
        section: the name of its section in the run file.

    Raises:
        UserError: a module has no such object.
    """
    if hod is not None and hod.occupation is not None:
        try:
            python_object(hod.occupation)
        except ValueError as error:
            raise UserError(f"{section}.occupation: {error}") from error


def mean_occupation(mass: np.ndarray, hod: HOD) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean numbers of central and satellite galaxies by mass [Msun/h]; see `HOD`."""
    mass = np.asarray(mass, np.float64)
    centrals = 0.5 * (1 + erf((np.log10(mass) - hod.log_M_min) / hod.sigma_log_M))
    above = np.maximum(mass - 10**hod.log_M_0, 0) / 10**hod.log_M_1
    return centrals, np.where(above > 0, centrals * above**hod.alpha, 0)


def expected_density(theory: Theory, hod: HOD, a: float = 1.0) -> float:
    """Returns about how many galaxies there are by the mass function of Watson 2013 [(h/Mpc)^3].

    Args:
        theory: the universe's.
        hod: the occupation, whose own function is not used.
        a: scale factor.
    """
    mass = np.geomspace(1e10, 1e16, 600)
    galaxies = sum(mean_occupation(mass, hod))
    return float(np.trapezoid(predicted(theory, mass, a) * galaxies, np.log(mass)))


def _numbers(halos: Catalogue, hod: HOD) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether halos have a central galaxy, and their numbers of satellites [n]."""
    if hod.occupation is None:
        means = mean_occupation(halos["mass"], hod)
    else:
        means = python_object(hod.occupation)(halos, hod)
    of_centrals, of_satellites = (np.asarray(mean, np.float64) for mean in means)
    for mean, most in ((of_centrals, 1), (of_satellites, MOST_SATELLITES)):
        if mean.shape != (len(halos),) or not ((mean >= 0) & (mean <= most)).all():
            raise ValueError(
                f"the occupation gives mean numbers {mean} of {len(halos)} halos: they must be a "
                "number for each, from 0 to 1 of centrals and from 0 of satellites"
            )
    first, second = _uniform(hod.seed, halos["id"], 0, 0)
    satellites = np.zeros(len(halos), np.int64)
    some = second > np.exp(-of_satellites)
    satellites[some] = poisson.ppf(second[some], of_satellites[some])
    return first < of_centrals, satellites


def _counted(numbers: np.ndarray) -> np.ndarray:
    """Returns 1 to n for each of some numbers n, one after the other."""
    ends = np.cumsum(numbers)
    return np.arange(1, numbers.sum() + 1) - np.repeat(ends - numbers, numbers)


def _uniform(seed: int, halo: np.ndarray, galaxy: np.ndarray | int, draw: int) -> np.ndarray:
    """Returns two uniform numbers above 0 and below 1 of each galaxy [2, n]."""
    counter = (halo & 0xFFFFFFFF, halo >> 32, galaxy, PURPOSE + draw)
    return np.maximum(uniform_pair(counter, seed), 2.0**-54)


def _in_profile(
    halos: Catalogue, hod: HOD, row: np.ndarray, number: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions [Mpc/h] and velocities [km/s] of satellites relative to their halos [n, 3].

    Args:
        halos: the halos.
        hod: the occupation.
        row: the halo of each satellite [n].
        number: the number of each satellite in its halo [n].
    """
    density = 200 * halos.header.matter_density
    radius = np.cbrt(3 * halos["mass"] / (4 * np.pi * density))
    if "radius_200m" in halos.columns:
        known = np.isfinite(halos["radius_200m"])
        radius = np.where(known, halos["radius_200m"], radius)
    radius = radius[row]
    mass = 4 / 3 * np.pi * density * radius**3
    c = concentration(mass, halos.a, hod)
    draws = np.concatenate([_uniform(hod.seed, halos["id"][row], number, n) for n in range(4)])
    x = nfw_radius(draws[0], c)
    # Functions of scipy treat each number alone, so that no order of galaxies changes a bit.
    towards = ndtri(draws[1:4])
    towards *= x / c * radius / np.sqrt((towards**2).sum(axis=0))
    speed = np.sqrt(G * mass / (halos.a * radius) * jeans_dispersion(x, c))
    return towards.T, (speed * ndtri(draws[4:7])).T


def concentration(mass: np.ndarray, a: float, hod: HOD) -> np.ndarray:
    """Returns the concentrations of halos by their mass within 200 times the mean density.

    Args:
        mass: [n] [Msun/h].
        a: scale factor.
        hod: names the relation, or has a number.
    """
    if hod.concentration == "duffy2008":
        return 10.14 * (mass / 2e12) ** -0.081 * a**1.01
    return np.full_like(mass, hod.concentration)


def nfw_radius(share: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns radii within which an NFW profile has some shares of its mass [scale radii].

    m(x) = ln(1 + x) - x / (1 + x) is inverted by Lambert's W (Robotham and Howlett 2018,
    arXiv:1805.09550).

    Args:
        share: shares of the mass within c, from 0 to 1 [n].
        c: concentrations [n].
    """
    # Below 1e-12, or 2e-6 scale radii, the inverse is rounding alone.
    mass = np.maximum(share, 1e-12) * (np.log1p(c) - c / (1 + c))
    return -1 / lambertw(-np.exp(-1 - mass)).real - 1


def jeans_dispersion(x: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns mean square velocities along an axis in an NFW profile, isotropic [G M / radius].

    From Lokas and Mamon 2001 (MNRAS 321, 155, arXiv:astro-ph/0002395), equation 14.

    Args:
        x: radii [scale radii] [n].
        c: concentrations [n].
    """
    x = np.maximum(x, 1e-5)
    log = np.log1p(x)
    bracket = (
        *(np.pi**2 - np.log(x) - 1 / x - 1 / (1 + x) ** 2 - 6 / (1 + x), 3 * log**2),
        *((1 + 1 / x**2 - 4 / x - 2 / (1 + x)) * log, 6 * spence(1 + x)),
    )
    gain = c / (np.log1p(c) - c / (1 + c))
    return np.maximum(0.5 * gain * x * (1 + x) ** 2 * sum(bracket), 0)
