"""Galaxies in halos: numbers against the occupation, satellites against the NFW profile."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from catalogues import SIZE, about
from pydantic import ValidationError
from scipy.integrate import quad
from scipy.stats import kstest

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.occupation import (
    G,
    concentration,
    jeans_dispersion,
    mean_occupation,
    nfw_radius,
    populate,
)
from flowpm_dist.catalogues.options import HOD
from meshimpl.process_mesh import ProcessMesh

A = 0.5


def halos_of(mass: np.ndarray, **more: np.ndarray) -> Catalogue:
    rng = np.random.default_rng(3)
    columns = {
        "id": rng.permutation(10**11 + np.arange(len(mass))),
        "mass": mass,
        "position": rng.random((len(mass), 3)) * SIZE,
        "velocity": rng.normal(0, 300, (len(mass), 3)),
        **more,
    }
    return Catalogue("halos", columns, about(), ProcessMesh(""), len(mass), False)


def zheng(mass: float, hod: HOD) -> tuple[float, float]:
    """Means by the formulas, the error function as an integral."""
    z = (np.log10(mass) - hod.log_M_min) / hod.sigma_log_M
    centrals = 0.5 + quad(lambda t: np.exp(-(t**2)) / np.sqrt(np.pi), 0, z)[0]
    above = (mass - 10**hod.log_M_0) / 10**hod.log_M_1
    return centrals, centrals * above**hod.alpha if above > 0 else 0.0


@pytest.mark.parametrize("log_mass", [11.9, 12.5, 12.8, 13.5, 14.5])
def test_numbers_of_galaxies(log_mass):
    hod, count = HOD(seed=4), 20_000
    halos = halos_of(np.full(count, 10**log_mass))
    galaxies = populate(halos, hod)
    centrals, satellites = zheng(10**log_mass, hod)
    has_central = np.isin(halos.id, galaxies.host[galaxies.central])
    assert has_central.sum() == galaxies.central.sum()
    share = has_central.mean()
    assert share == pytest.approx(centrals, abs=5 * np.sqrt(centrals * (1 - centrals) / count))
    rows = np.searchsorted(np.sort(halos.id), galaxies.host[~galaxies.central])
    number = np.bincount(rows, minlength=count)
    assert number.mean() == pytest.approx(satellites, abs=5 * np.sqrt(satellites / count))
    # Of a Poisson number with mean m, the variance has the variance (m + 2 m^2) / n.
    error = np.sqrt((satellites + 2 * satellites**2) / count)
    assert number.var() == pytest.approx(satellites, abs=5 * error)
    # Satellites do not depend on the central galaxy.
    ordered = has_central[np.argsort(halos.id)]
    if 0.05 < centrals < 0.95:
        with_central, without = number[ordered], number[~ordered]
        spread = np.sqrt(satellites / len(with_central) + satellites / len(without))
        assert with_central.mean() == pytest.approx(without.mean(), abs=5 * spread)


def mass_within(x: np.ndarray) -> np.ndarray:
    return np.log(1 + x) - x / (1 + x)


@functools.cache
def rich() -> tuple[Catalogue, Catalogue]:
    """Halos of one mass and their 20,000 satellites or so."""
    halos = halos_of(np.full(2000, 1e15), radius_200m=np.where(np.arange(2000) < 9, np.nan, 2.2))
    return halos, populate(halos, HOD(concentration=6.0, seed=8))


def test_satellites_follow_the_profile():
    halos, galaxies = rich()
    order = np.argsort(halos.id)
    row = order[np.searchsorted(halos.id, galaxies.host, sorter=order)]
    apart = galaxies.position - halos.position[row]
    apart -= np.round(apart / SIZE) * SIZE
    central = galaxies.central
    assert np.abs(apart[central]).max() == 0
    assert (galaxies.velocity[central] == halos.velocity[row[central]]).all()
    assert ((galaxies.position >= 0) & (galaxies.position < SIZE)).all()
    radius = np.sqrt((apart[~central] ** 2).sum(axis=1))
    density = 200 * halos.header.cosmology["Omega_m"] * 2.77549975e11
    outer = np.where(row < 9, np.cbrt(3e15 / (4 * np.pi * density)), 2.2)[~central]
    assert (radius < outer * (1 + 1e-9)).all()
    share = mass_within(6 * radius / outer) / mass_within(6.0)
    assert len(share) > 15_000 and kstest(share, "uniform").pvalue > 1e-3
    for axis in range(3):
        assert kstest(apart[~central, axis] / radius, "uniform", (-1, 2)).pvalue > 1e-3
    # Velocities are independent of places, with the dispersion at each radius.
    mass = 4 / 3 * np.pi * density * outer**3
    faster = galaxies.velocity[~central] - halos.velocity[row[~central]]
    speed = np.sqrt(4.30091e-9 * mass / (A * outer))
    shells = np.linspace(0.05, 1, 5)
    for low, high in zip(shells[:-1], shells[1:], strict=True):
        inside = (radius / outer > low) & (radius / outer < high)
        squares = np.array([dispersion(6 * r, 6.0) for r in np.linspace(low, high, 9)])
        expected = np.interp(radius[inside] / outer[inside], np.linspace(low, high, 9), squares)
        normal = faster[inside] / (speed[inside] * np.sqrt(expected))[:, np.newaxis]
        assert normal.size > 5000
        assert normal.var() == pytest.approx(1, abs=5 * np.sqrt(2 / normal.size) + 2e-3)
        assert kstest(normal.ravel(), "norm").pvalue > 1e-3


def dispersion(x: float, c: float) -> float:
    """The Jeans equation's integral: rho sigma^2 = integral of rho G M / r^2 from x."""
    share = quad(lambda y: mass_within(y) / (y**3 * (1 + y) ** 2), x, np.inf)[0]
    return x * (1 + x) ** 2 * share * c / mass_within(c)


@pytest.mark.parametrize("c", [2.0, 6.0, 40.0])
def test_dispersion_is_the_integral_of_the_jeans_equation(c):
    x = np.array([1e-3, 0.03, 1.0, 1.7, c])
    expected = [dispersion(value, c) for value in x]
    np.testing.assert_allclose(jeans_dispersion(x, np.full(5, c)), expected, rtol=1e-6)


def test_radii_and_constants():
    share, c = np.array([0.0, 1e-8, 0.2, 0.9, 1.0]), np.full(5, 7.0)
    x = nfw_radius(share, c)
    np.testing.assert_allclose(mass_within(x), share * mass_within(7.0), rtol=1e-7, atol=1e-11)
    assert G == pytest.approx(4.30091e-9, rel=1e-3)
    # Duffy and others 2008: 10.14 at 2e12 Msun/h and z = 0.
    assert concentration(np.array([2e12]), 1.0, HOD()) == pytest.approx(10.14)
    assert concentration(np.array([2e14]), 0.5, HOD()) == pytest.approx(
        10.14 * 100**-0.081 / 2**1.01
    )
    assert mean_occupation(np.array([1e10]), HOD())[1] == 0


def test_the_same_galaxies_in_any_order_and_part():
    halos = halos_of(10 ** np.random.default_rng(0).uniform(12, 15, 700))
    whole = populate(halos, HOD(seed=2))
    order = np.lexsort((whole.satellite, whole.host, -whole.host_mass))
    assert (order == np.arange(len(whole))).all()
    shuffled = populate(halos.of(np.random.default_rng(1).permutation(700)), HOD(seed=2))
    for name, values in whole.columns.items():
        np.testing.assert_array_equal(values, shuffled[name])
    parts = [populate(halos.of(slice(n, None, 3)), HOD(seed=2)) for n in range(3)]
    for name, values in whole.columns.items():
        joined = np.concatenate([part[name] for part in parts])
        both = [np.concatenate([part[key] for part in parts]) for key in ("satellite", "host")]
        mass = np.concatenate([part.host_mass for part in parts])
        np.testing.assert_array_equal(values, joined[np.lexsort((*both, -mass))])
    mixed = whole.of(np.random.default_rng(2).permutation(len(whole))).sorted()
    for name, values in whole.columns.items():
        np.testing.assert_array_equal(values, mixed[name])
    other = populate(halos, HOD(seed=3))
    assert len(other) != len(whole) or (other.host != whole.host).any()
    one = whole.of(whole.host == whole.host[0])
    assert (one.satellite == np.arange(len(one)) + 1 - one.central.sum()).all()


def test_galaxies_are_written_and_read(tmp_path):
    galaxies = rich()[1]
    galaxies.write(tmp_path / "galaxies.hdf5")
    again = Catalogue.read(tmp_path / "galaxies.hdf5")
    assert again.kind == "galaxies" and again.about["hod"]["concentration"] == 6
    for name, values in galaxies.columns.items():
        np.testing.assert_array_equal(values, again[name])
        assert values.dtype == again[name].dtype


def by_environment(halos: Catalogue, hod: HOD) -> tuple[np.ndarray, np.ndarray]:
    near = halos.position[:, 0] < SIZE[0] / 2
    return near.astype(float), np.where(near, 3.0, 0.0)


def test_an_own_occupation():
    halos = halos_of(np.full(500, 1e13))
    galaxies = populate(halos, HOD(occupation=by_environment))
    near = halos.id[halos.position[:, 0] < SIZE[0] / 2]
    assert set(galaxies.host[galaxies.central]) == set(near)
    assert set(galaxies.host) == set(near)
    mean = (~galaxies.central).sum() / len(near)
    assert mean == pytest.approx(3, abs=5 * np.sqrt(3 / len(near)))


def test_what_cannot_be_populated_is_named():
    halos = halos_of(np.full(3, 1e13))
    with pytest.raises(ValueError, match="not in galaxies"):
        populate(populate(halos_of(np.full(3, 1e15))))
    with pytest.raises(ValueError, match="not in halos of a light cone"):
        populate(halos_of(np.full(3, 1e13), scale_factor=np.ones(3)))
    with pytest.raises(ValueError, match="mean numbers .* a number for each, from 0 to 1"):
        populate(halos, HOD(occupation=lambda halos, hod: (np.full(3, 2.0), np.zeros(3))))
    for wrong in ({"sigma_log_M": 0}, {"concentration": "duffy"}, {"log_M_1": 1e14}):
        with pytest.raises(ValidationError):
            HOD(**wrong)
    assert len(populate(halos_of(np.zeros(0)))) == 0
