"""Surveys of one process: mocks of known power, densities by area, results and refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest

import flowpm_dist as fpm
from flowpm_dist import SurveyCatalogue, survey_multipoles
from flowpm_dist.io.errors import UserError

LOW, HIGH, CELL, CONTRAST = 200.0, 520.0, 20.0, 0.9
OCTANT = 41253 / 8  # [deg^2]
COSMOLOGY = dict(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8)


def density_at(positions):
    """Falls with the distance [(h/Mpc)^3]."""
    return 4e-3 * np.exp(-np.linalg.norm(positions, axis=-1) / 150)


def octant(rng, factor, contrast):
    """Points in an eighth of a shell, in cells whose overdensity is + or - the contrast."""
    cells = int(HIGH / CELL)
    corners = np.stack(np.indices((cells,) * 3), axis=-1).reshape(-1, 3) * CELL
    mean = factor * density_at(corners + CELL / 2) * CELL**3
    counts = rng.poisson(mean * (1 + contrast * rng.choice([-1, 1], len(corners))))
    points = np.repeat(corners, counts, axis=0) + rng.uniform(0, CELL, (counts.sum(), 3))
    distance = np.linalg.norm(points, axis=1)
    return points[(distance >= LOW) & (distance < HIGH)]


def made(points, density=True):
    return SurveyCatalogue(points, density=density_at(points) if density else None)


@pytest.mark.budget(60)
def test_the_monopole_of_mocks_of_known_power():
    """Cells at random: P = contrast^2 V_cell sinc^2 along each axis, the same in any window."""
    bins, powers = [0.03, 0.06, 0.09, 0.12], []
    randoms = made(octant(np.random.default_rng(0), 8.0, 0.0))
    for seed in range(1, 9):
        data = made(octant(np.random.default_rng(seed), 1.0, CONTRAST))
        found = survey_multipoles(data, randoms, 48, P0=5000.0, bins=bins, orders=(0, 2))
        powers.append(found.power)
    mean, error = np.mean(powers, axis=0), np.std(powers, axis=0, ddof=1) / np.sqrt(len(powers))
    directions = np.random.default_rng(1).normal(size=(10000, 3))
    k = found.k[:, None, None] * directions / np.linalg.norm(directions, axis=1)[:, None]
    shape = (np.sinc(k * CELL / (2 * np.pi)) ** 2).prod(axis=2).mean(axis=1)
    expected = np.array([CONTRAST**2 * CELL**3 * shape, np.zeros(3)])
    assert (error[0] < 0.08 * expected[0]).all()
    np.testing.assert_array_less(np.abs(mean - expected), 4 * error)


def test_the_shot_noise_of_points_at_random():
    """In a whole box every mode is independent: the monopole without shot noise is 0."""
    rng, size = np.random.default_rng(2), np.array([200.0, 200.0, 200.0])
    origin = np.array([500.0, 100.0, 0.0])
    weights = rng.uniform(0.2, 1.8, 20000)
    data = SurveyCatalogue(origin + rng.uniform(0, 200, (20000, 3)), weights)
    randoms = SurveyCatalogue(origin + rng.uniform(0, 200, (100000, 3)))
    found = survey_multipoles(data, randoms, 32, box_size=200.0, center=origin + size / 2)
    expected = np.sum(weights**2) + weights.sum() ** 2 / 100000
    assert found.shot_noise == pytest.approx(expected / found.normalisation, rel=1e-12)
    # The box has sharp edges, which cells of 10 Mpc/h blur by 1 / 40 each.
    assert found.normalisation == pytest.approx(weights.sum() ** 2 / size.prod(), rel=0.1)
    mean = np.average(found.power[0], weights=found.modes)
    assert abs(mean) < 4 * found.shot_noise * np.sqrt(2 / found.modes.sum())


def test_densities_by_area():
    rng = np.random.default_rng(3)
    points, places = octant(rng, 1.0, CONTRAST), octant(rng, 8.0, 0.0)
    known = survey_multipoles(made(points), made(places), 32, P0=5000.0)
    data, randoms = made(points, False), made(places, False)
    found = survey_multipoles(data, randoms, 32, P0=5000.0, area=OCTANT)
    # The number of galaxies differs from its mean by 1 %, the weights by less.
    assert found.normalisation == pytest.approx(known.normalisation, rel=0.02)
    assert found.shot_noise == pytest.approx(known.shot_noise, rel=0.02)
    without = survey_multipoles(data, randoms, 32)
    assert without.normalisation > 1.5 * known.normalisation
    with pytest.raises(ValueError, match=r"FKP weights need .* the area of the survey \[deg\^2\]"):
        survey_multipoles(data, randoms, 32, P0=5000.0)


def small(seed=1, count=50):
    return np.random.default_rng(seed).uniform(0, 100, (count, 3)) + 300


def test_the_result_is_a_table_and_a_picture(tmp_path):
    found = survey_multipoles(SurveyCatalogue(small()), SurveyCatalogue(small(2, 500)), 16)
    k, power = found
    assert power.shape == (3, len(k)) and found.alpha == pytest.approx(0.1)
    found.write_csv(str(tmp_path / "poles.csv"))
    first = (tmp_path / "poles.csv").read_text().splitlines()
    assert first[0] == "order,k [h/Mpc],modes,power [(Mpc/h)^3]" and len(first) == 1 + 3 * len(k)
    curves = [line.get_ydata() for line in found.plot().lines]
    np.testing.assert_array_equal(curves, k * power)


@pytest.mark.parametrize("seed", [2, 3])
def test_a_box_without_padding_holds_all_objects(seed):
    """Also if half its sides, added to its middle, are rounded to less than the last object."""
    data, randoms = SurveyCatalogue(small(seed)), SurveyCatalogue(small(seed + 50, 500))
    both = np.concatenate([data.positions, randoms.positions])
    longest = both.max(axis=0) - both.min(axis=0)
    for given in (dict(padding=0), dict(box_size=longest)):
        found = survey_multipoles(data, randoms, 16, **given)
        np.testing.assert_array_equal(found.box_size, longest)
        assert np.isfinite(found.power[:, 1:4]).all()


def test_no_density_follows_from_randoms_at_one_distance():
    places = small(2, 500)
    sphere = 400 * places / np.linalg.norm(places, axis=1)[:, None]
    data, randoms = SurveyCatalogue(sphere[:50]), SurveyCatalogue(sphere)
    message = "all randoms are at 400 Mpc/h, from which no number density follows: give `density`"
    with pytest.raises(ValueError, match=message):
        survey_multipoles(data, randoms, 16, P0=5000.0, area=500.0)
    assert survey_multipoles(data, randoms, 16).alpha == pytest.approx(0.1)


def test_what_is_refused():
    data, randoms = SurveyCatalogue(small()), SurveyCatalogue(small(2, 500))
    for given, message in {
        "P0": (dict(P0=-1.0), "P0 = -1.0: must be at least 0"),
        "padding": (dict(padding=-0.5), "padding = -0.5: must be at least 0"),
        "small": (dict(box_size=50.0), "give a larger box_size, or another center"),
        "away": (dict(center=[0, 0, 0]), "give a larger box_size, or another center"),
        "odd": (dict(orders=[1]), "must be even numbers"),
    }.values():
        with pytest.raises(ValueError, match=re.escape(message)):
            survey_multipoles(data, randoms, 16, **given)
    nothing = SurveyCatalogue(np.zeros((0, 3)))
    with pytest.raises(ValueError, match="the weights of the 0 data must have a sum above 0"):
        survey_multipoles(nothing, randoms, 16)
    with pytest.raises(ValueError, match="no cell of 10 Mpc/h has both data and randoms"):
        survey_multipoles(SurveyCatalogue(small() + 1000), randoms, 16)


def test_arrays_that_are_refused():
    places = small()
    for given, message in [
        ((places[:, :2],), "positions has the shape [50, 2]; must be [n, 3]"),
        ((places, np.ones(49)), "weights has the shape [49]; must be [50]"),
        ((places, None, np.full(50, np.nan)), "density nan of row 0 is not finite"),
        ((places, None, np.full(50, -1.0)), "density -1 of row 0 must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            SurveyCatalogue(*given)
    universe, angles = fpm.Cosmology(**COSMOLOGY), np.zeros(3)
    for sky, message in [
        ((angles, angles + 91, angles + 1), "DEC 91 of row 0 must lie from -90 to 90 degrees"),
        ((angles, angles, np.array([1, 0.5, 0])), "Z 0 of row 2 must be a redshift above 0"),
        ((angles + 361, angles, angles + 1), "RA 361 of row 0 must lie from -360 to 360 degrees"),
        ((angles + np.inf, angles, angles + 1), "RA inf of row 0 is not finite"),
        ((angles, angles, np.ones(2)), "shapes RA [3], DEC [3], Z [2] must be equal"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            SurveyCatalogue.from_sky(*sky, universe)
    curved = fpm.Cosmology(**COSMOLOGY, Omega_k=0.1)
    with pytest.raises(ValueError, match="Omega_k = 0.1: places in curved space"):
        SurveyCatalogue.from_sky(angles, angles, angles + 1, curved)


def test_a_file_whose_values_are_refused(tmp_path):
    path, universe = tmp_path / "galaxies.csv", fpm.Cosmology(**COSMOLOGY)
    for row, given, message in [
        ("10,20,0", {}, "galaxies.csv: Z 0 of row 1 must be a redshift above 0"),
        ("10,20,nan", {}, "galaxies.csv: Z nan of row 1 is not finite"),
        ("10,95,1", {}, "galaxies.csv: DEC 95 of row 1 must lie from -90 to 90 degrees"),
        ("10,20,-1", dict(columns=["RA", "DEC"]), "columns = ['RA', 'DEC']: must be the names of"),
        ("10,20,1", dict(weights=["W"]), "galaxies.csv has no column 'W'; it has RA, DEC, Z"),
        ("-1,20,1", dict(weights="RA"), "galaxies.csv: RA -1 of row 1 must be at least 0"),
    ]:
        path.write_text(f"RA,DEC,Z\n1,2,3\n{row}\n")
        with pytest.raises(UserError, match=re.escape(message)):
            fpm.read_galaxies(path, universe, **given)
    path.write_text("RA,DEC,Z\n")
    with pytest.raises(UserError, match="galaxies.csv has no rows"):
        fpm.read_galaxies(path, universe)
