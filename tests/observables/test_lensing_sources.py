"""Distances, and where the sources of lensing are."""

import numpy as np
import pytest
import tensorflow as tf
from derivatives import check_derivative
from reference import parameters_of, reference

from flowpm_dist.cosmology import Cosmology
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.line_of_sight import lensing_weight
from flowpm_dist.io.errors import UserError
from flowpm_dist.observables.lensing import (
    LensPlanes,
    SmailDistribution,
    SourcePlane,
    TabulatedDistribution,
    lensing_efficiency,
)
from flowpm_dist.observables.lensing.options import SourceOptions

EVOLVING = Cosmology(0.28, 0.045, 0.7, 0.95, sigma8=0.75, w0=-0.9, wa=0.2)


@pytest.fixture(scope="module")
def given():
    return reference("lensing")


@pytest.fixture(scope="module")
def cosmology(given):
    return Cosmology(**parameters_of(given))


def test_distances_of_camb(given, cosmology):
    distances, a = Distances(cosmology), 1 / (1 + given["z"])
    np.testing.assert_allclose(distances.comoving(a), given["chi"], rtol=1e-8)
    np.testing.assert_allclose(distances.scale_factor(given["chi"]), a, rtol=1e-8)
    planes = LensPlanes(given["plane_edges"])
    np.testing.assert_allclose(planes.scale_factor(distances), given["plane_a"], rtol=2e-8)


@pytest.mark.parametrize(
    "changes",
    [{}, {"w0": -3.0, "wa": 1.0}, {"w0": -0.3, "wa": 0.1}, {"Omega_m": 1.0}, {"Omega_m": 0.05}],
)
def test_the_scale_factor_is_the_inverse_of_the_distance(changes):
    distances = Distances(EVOLVING.replace(**changes))
    a = np.array([[1e-4, 0.02, 0.1], [0.5, 0.999, 1.0]])
    np.testing.assert_allclose(distances.scale_factor(distances.comoving(a)), a, rtol=1e-10)
    if changes == {"Omega_m": 1.0}:  # Einstein and de Sitter
        np.testing.assert_allclose(distances.comoving(a), 5995.84916 * (1 - a**0.5), rtol=1e-13)


def test_derivatives_of_distances():
    names = ("Omega_m", "w0", "wa")
    values = np.array([float(getattr(EVOLVING, name)) for name in names])

    def function(values):
        cosmology = EVOLVING.replace(**dict(zip(names, tf.unstack(values), strict=True)))
        distances = Distances(cosmology)
        chi = distances.comoving([0.3, 0.7]) / 1000
        a = distances.scale_factor([500.0, 3000.0])
        efficiency = SourcePlane(4.0).efficiency([500.0, 3000.0], distances)
        weight = lensing_weight(cosmology, [500.0, 3000.0]) * efficiency * 1e4
        return tf.reduce_sum((chi + a + weight) * [1.0, -0.4])

    def slope(values):
        """Its derivative along a line: Newton's method must have second derivatives, too."""
        with tf.GradientTape() as tape:
            tape.watch(values := tf.convert_to_tensor(values))
            result = function(values)
        return tf.reduce_sum(tape.gradient(result, values) * [0.1, 0.7, -0.4])

    check_derivative(function, values, 1e-4, rtol=1e-7)
    check_derivative(slope, values, 1e-4, rtol=1e-6)


def test_the_scale_factor_by_its_distance():
    distances = Distances(EVOLVING)
    check_derivative(lambda chi: tf.reduce_sum(distances.scale_factor(chi)), [0.5, 2000.0], 0.1)


def test_weights_of_reference(given, cosmology):
    smail = SmailDistribution(*(float(x) for x in given["smail"][[0, 1, 2]]))
    chi, distances = given["chi"][1:], Distances(cosmology)
    sources = [SourcePlane(float(given["z_source"])), smail]
    weights = lensing_weight(cosmology, chi) * lensing_efficiency(sources, chi, distances)
    scale = given["w_source"].max()
    np.testing.assert_allclose(weights[0], given["w_source"][1:], rtol=0, atol=1e-7 * scale)
    # The reference's own integral over n(z) is a sum over the 121 redshifts.
    np.testing.assert_allclose(weights[1], given["w_nz"][1:], rtol=0, atol=1e-3 * scale)
    table = TabulatedDistribution(given["z"], given["n_z"])
    found = lensing_weight(cosmology, chi) * table.efficiency(chi, distances)
    np.testing.assert_allclose(found, given["w_nz"][1:], rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize("shift", [0.0, 0.07, -0.07])
def test_integrals_over_n_of_z(shift):
    """Against a fine sum; a table has kinks, and a shift below z = 0 cuts a part off."""
    table_z, table_n = [0.05, 0.3, 0.35, 0.9, 1.4], [0.4, 1.0, 3.0, 0.5, 0.0]
    table = TabulatedDistribution(table_z, table_n, shift)
    smail = SmailDistribution(0.4, 1.7, 1.3, shift, z_max=2.5)
    distances = Distances(EVOLVING)
    edges = np.linspace(0.0, 3.0, 60001)
    z = (edges[1:] + edges[:-1]) / 2
    chi_z = distances.comoving(1 / (1 + z)).numpy()
    chi = np.array([0.0, 150.0, 800.0, 2000.0, 4000.0, 5500.0])
    moved = z - shift
    inside = (moved >= 0) & (moved <= 2.5)
    formula = np.where(inside, np.abs(moved) ** 1.7 * np.exp(-((np.abs(moved) / 0.4) ** 1.3)), 0)
    for source, n in (
        (table, np.interp(moved, table_z, table_n, left=0, right=0)),
        (smail, formula),
    ):
        n = n / n.sum()
        efficiency = (n * np.maximum(1 - chi[:, None] / chi_z, 0)).sum(axis=1)
        np.testing.assert_allclose(source.efficiency(chi, distances), efficiency, atol=2e-5)
        shares = np.histogram(chi_z, chi, weights=n)[0]
        np.testing.assert_allclose(source.fractions(chi, distances), shares, atol=1e-4)
        middles = (chi_z[1:] + chi_z[:-1]) / 2
        density = source.density(middles[::5000], distances) * np.diff(chi_z)[::5000]
        np.testing.assert_allclose(density, n[:-1][::5000], atol=1e-3 * n.max())


def test_a_table_of_sources_from_a_file(tmp_path):
    path = tmp_path / "nz.txt"
    path.write_text("# z n1 n2\n0.1, 1.0, 0.0\n0.5, 2.0, 1.0\n1.0, 0.0, 3.0\n")
    source = TabulatedDistribution.from_file(path, column=2)
    np.testing.assert_array_equal(source.n, [0.0, 1.0, 3.0])
    for text, match in (
        ("0.1 1\n0.2 -1\n", "negative"),
        ("", "no rows"),
        ("0.1\n0.2\n", "1 column:"),
        ("0.1 0\n0.2 0\n", "no sources"),
        ("0.2 1\n0.1 1\n", "increase"),
        ("z n\n", "no n"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=match):
            TabulatedDistribution.from_file(path)
    with pytest.raises(UserError, match=r"missing\.txt"):
        TabulatedDistribution.from_file(tmp_path / "missing.txt")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Distances(EVOLVING).comoving(0.0), "above 0"),
        (lambda: Distances(EVOLVING).scale_factor(2e4), "horizon"),
        (lambda: Distances(EVOLVING).scale_factor(-1.0), "between 0"),
        (lambda: SourcePlane(), "either"),
        (lambda: SourcePlane(1.0, distance=1000.0), "either"),
        (lambda: SourcePlane(0.1, shift=-0.2), "above 0"),
        (lambda: SourcePlane(distance=1000.0, shift=0.1), "redshift"),
        (lambda: SourcePlane(1.0).density(10.0, Distances(EVOLVING)), "distribution"),
        (lambda: SmailDistribution(0.0), "z0"),
        (lambda: SmailDistribution(0.5, shift=-3.5), "shift"),
        (lambda: SmailDistribution(0.5, z_max=np.inf), "z_max must be a finite number above 0"),
        (lambda: SmailDistribution(1e-6), "integrates to 0 above z = 0 with shift = 0"),
        (lambda: TabulatedDistribution([0, 0.2, 0.3, 1], [1, 1, 0, 0], -0.5), "shift = -0.5: it"),
        (lambda: TabulatedDistribution([0.1, 0.2], tf.zeros(2)), "is 0 everywhere"),
        (lambda: TabulatedDistribution([0.1, np.inf], [1.0, 1.0]), "must be finite: got inf"),
        (lambda: TabulatedDistribution([0.1], [1.0]), "two rows"),
        (lambda: TabulatedDistribution([0.1, 0.2], [np.nan, 1.0]), "finite"),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_names_of_sources_from_a_file_say_which_column(tmp_path):
    path = tmp_path / "nz.txt"
    path.write_text("0.1, 1.0, 0.0\n0.5, 2.0, 1.0\n")
    names = [SourceOptions(file=path, column=column).name for column in (1, 2)]
    assert names == ["nz.txt, column 1", "nz.txt, column 2"]
    path.write_text("0.1, 1.0\n0.5, 2.0\n")
    assert SourceOptions(file=path, shift=0.1).name == "nz.txt +0.1"
    assert SourceOptions(file=tmp_path / "gone.txt", column=2).name == "gone.txt, column 2"
