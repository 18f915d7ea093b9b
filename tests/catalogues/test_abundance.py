"""Abundance of halos: counts by hand, and the fits against colossus."""

import numpy as np
import pytest

import flowpm_dist as fpm
from flowpm_dist.catalogues.abundance import FITS, mass_function, predicted, sigma_of
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.clustering import tracer_power
from meshimpl.process_mesh import ProcessMesh

UNIVERSE = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, sigma8=0.81)
MASS = np.geomspace(1e12, 1e15, 4)
COLOSSUS = {
    ("Warren 2006", 1.0): [3.84165e-3, 4.95338e-4, 4.59832e-5, 7.50232e-7],
    ("Watson 2013", 1.0): [3.83255e-3, 4.64272e-4, 4.41924e-5, 8.46036e-7],
    ("Warren 2006", 0.5): [4.04579e-3, 3.47568e-4, 8.67852e-6, 1.23476e-9],
    ("Watson 2013", 0.5): [3.77348e-3, 3.37308e-4, 9.5924e-6, 1.64954e-9],
}
"""dn / dlnM at `MASS` of colossus without radiation, with masses "fof"; by fit and scale factor."""


def catalogue(number: np.ndarray, position: np.ndarray | None = None) -> Catalogue:
    header = {"a": 1.0, "grid": [8] * 3, "box_size": [40.0] * 3, "cosmology": UNIVERSE.numbers()}
    columns = {"id": np.arange(len(number)), "number": number, "mass": number * 1e12}
    columns["position"] = np.zeros((len(number), 3)) if position is None else position
    mesh = ProcessMesh("")
    return Catalogue("halos", columns, {**header, "minimum": 20}, mesh, len(number), False)


@pytest.mark.parametrize("name, a", COLOSSUS)
def test_the_fits_are_those_of_colossus(name, a):
    """Growth and spectrum of the two codes differ by up to 4e-4 in sigma, which rare halos feel."""
    found = predicted(fpm.Theory(UNIVERSE), MASS, a, FITS[name])
    tolerance = 1e-3 if a == 1.0 else 8e-3
    np.testing.assert_allclose(found, COLOSSUS[name, a], rtol=tolerance)


def test_spheres_of_8_have_sigma8():
    found = sigma_of(fpm.Theory(UNIVERSE), np.array([8.0]), 1.0)
    np.testing.assert_allclose(found, 0.81, rtol=1e-6)


def test_halos_are_counted_by_mass():
    number = np.array([2, 3, 3, 5, 20, 21, 900])
    edges = np.array([2e12, 4e12, 8e12, 30e12, 40e12])
    found = mass_function(catalogue(number), edges)
    assert found.count.tolist() == [3, 1, 2, 0]
    per_count = 1 / (40.0**3 * np.diff(np.log(edges)))
    np.testing.assert_allclose(found.abundance, found.count * per_count, rtol=1e-14)
    np.testing.assert_allclose(found.error, np.sqrt([3, 1, 2, 1]) * per_count, rtol=1e-14)
    means = [np.log([2, 3, 3]).mean(), np.log(5), np.log([20, 21]).mean(), np.log([30, 40]).mean()]
    np.testing.assert_allclose(found.mass, 1e12 * np.exp(means), rtol=1e-14)


def test_bins_hold_all_halos_by_default():
    number = np.array([20, 20, 35, 1234])
    halos = catalogue(number)
    halos = halos.with_columns({**halos.columns, "mass": number * halos.header.mass * 1e10})
    found = mass_function(halos)
    assert found.count.sum() == 4
    assert found.count[0] >= 2


@pytest.mark.parametrize("edges", [[3e12], [3e12, 1e12], [1e12, 1e12]])
def test_edges_that_do_not_increase(edges):
    with pytest.raises(ValueError, match="must increase"):
        mass_function(catalogue(np.array([30])), np.array(edges))


def test_objects_that_are_matter_have_no_bias():
    """Points painted twice: bias 1 without scatter; at random places: the power is noise."""
    rng = np.random.default_rng(2)
    points = catalogue(np.full(4000, 20), rng.random((4000, 3)) * 40)
    density = points.density(16)
    found = tracer_power(points, density)
    np.testing.assert_allclose(found.bias, 1.0, rtol=1e-12)
    np.testing.assert_allclose(found.error, 0.0, atol=1e-6)
    np.testing.assert_allclose(found.shot_noise, 40.0**3 / 4000)
    # Up to the mesh's Nyquist wavenumber, 1.26, where plain cloud in cell has 0.31 of it too much.
    assert (np.abs(found.power) < 4 * found.shot_noise * np.sqrt(2 / found.modes)).all()
    with pytest.raises(ValueError, match="matter of"):
        other = fpm.Field(
            density.block, fpm.Box((16,) * 3, (30.0,) * 3, points.mesh, density.dtype)
        )
        tracer_power(points, other)


def test_bins_of_mass_lie_between_whole_particles():
    """Counts of a smooth abundance, N for all masses from N - 1/2 to N + 1/2."""
    number = np.arange(20, 1200)
    halos = catalogue(np.repeat(number, np.round(3e7 / number**2).astype(int)))
    halos = halos.with_columns(
        {**halos.columns, "mass": halos["number"] * halos.header.mass * 1e10}
    )
    found = mass_function(halos)
    edges = found.edges / (halos.header.mass * 1e10)
    np.testing.assert_allclose(edges % 1, 0.5, atol=1e-6)
    counts = 3e7 * (1 / edges[:-1] - 1 / edges[1:])
    # Counts of each N are rounded, by 1/2 at most, and the last bin goes beyond them.
    assert (np.abs(found.count - counts)[:-1] < np.diff(edges)[:-1] / 2 + 1e-3 * counts[:-1]).all()


def test_a_light_cone_is_no_box():
    halos = catalogue(np.array([30]))
    cone = halos.with_columns({**halos.columns, "scale_factor": np.array([0.9])})
    for call in (mass_function, Catalogue.shot_noise, lambda found: found.density(8)):
        with pytest.raises(ValueError, match="needs halos of a box at one time, not a light cone"):
            call(cone)


def test_a_catalogue_without_objects_has_no_density():
    with pytest.raises(ValueError, match="0 halos: there is no density"):
        catalogue(np.zeros(0, int)).density(8)
