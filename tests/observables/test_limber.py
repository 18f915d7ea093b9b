"""Angular power of convergence in the Limber approximation, and tables of power."""

import numpy as np
import pytest
import tensorflow as tf
from derivatives import check_derivative
from reference import reference

from flowpm_dist.cosmology import (
    Cosmology,
    Growth,
    Halofit,
    LinearPower,
    NonlinearPower,
    TabulatedPower,
    lensing_weight,
    limber_power,
)
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.observables.lensing import (
    IntrinsicAlignment,
    LensPlanes,
    SmailDistribution,
    SourcePlane,
    TabulatedDistribution,
    born,
    convergence_power,
    plane_weights,
)
from flowpm_dist.statistics import angular_power

RNG = np.random.default_rng(2)
LCDM = Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, A_s=2e-9)
SOURCES = [SourcePlane(1.0), SmailDistribution(0.5, 2.0, 1.5)]
A = np.linspace(0.2, 1.0, 9)


@pytest.fixture(scope="module")
def given():
    return reference("lensing")


def frozen_table(given):
    return TabulatedPower(given["k"], A, np.tile(given["linear_power_z0"], (A.size, 1)))


def test_the_references_power_in_limbers_integral(given):
    """From its linear power at z = 0, frozen or with linear growth."""
    table, growth = frozen_table(given), Growth(LCDM)

    def growing(k, a):
        return table(k) * (growth.d1(a) / growth.d1(1.0)) ** 2

    frozen = convergence_power(given["ell"], SOURCES, LCDM, table)
    np.testing.assert_allclose(frozen[0, 0], given["cl_source_frozen"], rtol=4e-5)
    found = convergence_power(given["ell"], SOURCES, LCDM, growing)
    np.testing.assert_allclose(found[0, 0], given["cl_source_linear"], rtol=1e-4)
    np.testing.assert_allclose(found[1, 1], given["cl_nz_linear"], rtol=1e-4)
    np.testing.assert_array_equal(found[0, 1], found[1, 0])
    fine = convergence_power(given["ell"], SOURCES, LCDM, growing, panels=30)
    np.testing.assert_allclose(found, fine, rtol=5e-6)


def test_camb_gives_the_references_spectra(given):
    """CAMB's power depends on its accuracy settings by 4e-4."""
    ell, cosmology = given["ell"], LCDM.replace(transfer="camb")
    linear = convergence_power(ell, SOURCES, cosmology)
    np.testing.assert_allclose(linear[0, 0], given["cl_source_linear"], rtol=5e-4)
    np.testing.assert_allclose(linear[1, 1], given["cl_nz_linear"], rtol=5e-4)
    halofit = convergence_power(ell, SOURCES, cosmology, NonlinearPower(cosmology))
    np.testing.assert_allclose(halofit[0, 0], given["cl_source_halofit"], rtol=5e-4)
    np.testing.assert_allclose(halofit[1, 1], given["cl_nz_halofit"], rtol=5e-4)
    beyond = ell > 100  # where CCL and the reference agree to 4e-4
    np.testing.assert_allclose(halofit[1, 1][beyond], given["cl_nz_halofit_ccl"][beyond], rtol=3e-4)


@pytest.mark.parametrize("Omega_k", [0.0, 0.05])
def test_halofit_is_cambs(Omega_k):
    """CAMB's growth has radiation, which is what differs beyond today."""
    cosmology = LCDM.replace(transfer="camb", w0=-0.9, wa=0.2, Omega_k=Omega_k)
    camb, linear = NonlinearPower(cosmology), LinearPower(cosmology)
    k = np.array([0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 25.0])
    halofit = Halofit(linear)
    np.testing.assert_allclose(halofit(k), camb(k), rtol=2e-4)
    np.testing.assert_allclose(halofit(k, 0.5), camb(k, 0.5), rtol=5e-4)
    assert float(halofit(1.0) / linear(1.0)) > 2
    early = halofit(k, [[1 / 3], [0.003]])  # the second before anything is non-linear
    np.testing.assert_allclose(early[0], camb(k, 1 / 3), rtol=1e-3)
    np.testing.assert_allclose(early[1], linear(k, 0.003), rtol=1e-14)


@pytest.mark.parametrize("Omega_k", [0.05, -0.05])
def test_weights_and_limber_in_curved_space(Omega_k):
    """Against quadratures over redshifts with astropy's distances."""
    from astropy.cosmology import LambdaCDM

    cosmology = LCDM.replace(Omega_k=Omega_k)
    there = LambdaCDM(H0=100.0, Om0=0.31, Ode0=0.69 - Omega_k, Tcmb0=0.0)
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def quadrature(low, high):
        return low + 0.5 * (high - low) * (1 + nodes), 0.5 * (high - low) * weights

    def transverse(z1, z2):
        return there.angular_diameter_distance_z1z2(z1, z2).value * (1 + z2)

    def efficiency(z):
        z_s, dz = quadrature(z, 2.0)
        n_of_z = dz * z_s**2 * np.exp(-((z_s / 0.4) ** 1.5))
        return np.sum(n_of_z * transverse(z, z_s) / transverse(0, z_s))

    z, dz = quadrature(0.0, 2.0)
    lengths, slopes = transverse(0, z), 2997.92458 / there.efunc(z)  # dchi / dz
    matter = 1.5 * 0.31 / 2997.92458**2 * lengths * (1 + z)
    of_all = np.array([efficiency(each) for each in z]) / efficiency(1e-12)
    near = np.where(z < 1.0, 1.0, 0.0) * transverse(np.minimum(z, 1.0), 1.0) / transverse(0, 1.0)
    sources = [SourcePlane(1.0), SmailDistribution(0.4, z_max=2.0)]
    distances = Distances(cosmology)
    chi = distances.comoving(1 / (1 + z))
    found = lensing_weight(cosmology, chi) * [s.efficiency(chi, distances) for s in sources]
    known = matter * np.stack([near, of_all])
    np.testing.assert_allclose(found, known, atol=1e-7 * known.max())

    def power(k, a):
        return 1e4 * a**2 * k / (1 + (k / 0.02) ** 2) ** 1.2

    ell = np.array([10.0, 100.0, 1000.0])
    p = power((ell[:, np.newaxis] + 0.5) / lengths, 1 / (1 + z))
    expected = np.sum(dz * slopes * (known[1] / lengths) ** 2 * p, axis=1)
    spectra = convergence_power(ell, sources[1:], cosmology, power)[0, 0]
    np.testing.assert_allclose(spectra, expected, rtol=1e-6)
    flat = convergence_power(ell, sources[1:], LCDM, power)[0, 0]
    assert (np.abs(flat / expected - 1) > 1e-3).all()


def test_planes_as_the_nodes_of_the_integral():
    """One plane of a power law: C_l = (W dchi)^2 P(l / chi) / (chi^2 dchi)."""
    chi, width, ell = 900.0, 50.0, np.array([99.5, 499.5])
    weight = lensing_weight(LCDM, [chi])
    found = limber_power(ell, [chi], [0.7], [width], weight[tf.newaxis], lambda k, a: a * k**-1.5)
    expected = float(weight[0]) ** 2 * width / chi**2 * 0.7 * ((ell + 0.5) / chi) ** -1.5
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-13)


def test_maps_of_gaussian_planes_have_limbers_power():
    """Planes of linear power, added by `born` and measured, against the sum over these planes."""
    fov, pixels, count = 0.1, 32, 60
    planes, power = LensPlanes(np.linspace(0.0, 1800.0, 4)), LinearPower(LCDM)
    a = planes.scale_factor(Distances(LCDM))
    x, y = np.fft.fftfreq(pixels, fov / pixels)[:, None], np.fft.rfftfreq(pixels, fov / pixels)
    ell = 2 * np.pi * np.hypot(x, y)
    # A plane's overdensity has the power P(l / chi) / (chi^2 dchi).
    chi, width = (v.numpy()[:, None, None] for v in (planes.chi, planes.widths))
    c_ell = power(np.maximum(ell, 1.0) / chi, a.numpy()[:, None, None]) / (chi**2 * width)
    white = np.fft.rfft2(RNG.normal(size=(count, 3, pixels, pixels)))
    modes = white * np.sqrt(c_ell.numpy()) * (ell > 0) * pixels / fov
    delta = tf.constant(np.fft.irfft2(modes, s=(pixels, pixels)).swapaxes(0, 1))
    sources = [SourcePlane(0.4), SourcePlane(0.8)]
    kappa = tf.transpose(born(delta, planes, sources, LCDM), [1, 0, 2, 3])
    edges = np.array([100.0, 200.0, 300.0, 500.0, 800.0])
    found = angular_power(kappa[:, :, tf.newaxis], fov, edges, other=kappa[:, tf.newaxis])
    weights = plane_weights(planes, sources, LCDM) / planes.widths
    everywhere = 2 * np.pi * np.hypot(x, np.fft.fftfreq(pixels, fov / pixels)).ravel()
    at_modes = limber_power(
        np.maximum(everywhere, 1.0) - 0.5, planes.chi, a, planes.widths, weights, power
    )
    number = np.digitize(everywhere, edges)
    bins = [at_modes.numpy()[..., number == i].mean(-1) for i in range(1, len(edges))]
    ratio = found.power.mean(0) / np.stack(bins, axis=-1)
    np.testing.assert_array_less(np.abs(ratio - 1) / np.sqrt(2 / found.modes / count), 4)


def test_intrinsic_alignments_of_theory():
    """Against a fine sum; lensing and alignment have opposite signs for A_IA > 0."""
    table = TabulatedDistribution([0.2, 0.4, 0.8, 1.0], [0.0, 1.0, 0.7, 0.0])
    sources, ell = [table, SmailDistribution(0.3)], np.array([200.0, 1000.0])
    power, model = LinearPower(LCDM), IntrinsicAlignment(2.0, eta=0.5)
    found = convergence_power(ell, sources, LCDM, power, alignment=model, panels=16)
    distances = Distances(LCDM)
    edges = np.linspace(1e-3, float(sources[1].farthest(distances)), 3001)
    chi, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    a = distances.scale_factor(chi)
    kernels = [
        lensing_weight(LCDM, chi, a=a) * s.efficiency(chi, distances)
        + model.response(a, LCDM) * s.density(chi, distances)
        for s in sources
    ]
    expected = limber_power(ell, chi, a, width, tf.stack(kernels), power)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    parts = [
        convergence_power(ell, sources, LCDM, power, alignment=IntrinsicAlignment(float(x)))[0, 0]
        for x in (-1, 0, 1)
    ]
    linear, square = (parts[2] - parts[0]) / 2, (parts[2] + parts[0]) / 2 - parts[1]
    assert (linear.numpy() < 0).all() and (square.numpy() > 0).all()


@pytest.mark.parametrize("name", ["cosmology", "sources"])
def test_derivatives(name):
    fixed = {"cosmology": [0.31, 0.96, -0.95, 0.1, 0.0], "sources": [0.03, 0.3, 0.8]}

    def function(values):
        given = {k: tf.unstack(tf.convert_to_tensor(v, tf.float64)) for k, v in fixed.items()}
        given[name] = tf.unstack(tf.convert_to_tensor(values))
        cosmology = LCDM.replace(
            **dict(zip(("Omega_m", "n_s", "w0", "wa", "Omega_k"), given["cosmology"], strict=True))
        )
        shift, z0, amplitude = given["sources"]
        sources = [SmailDistribution(z0, shift=shift), SmailDistribution(0.5, 1.7, shift=shift)]
        alignment = IntrinsicAlignment(amplitude)
        power = Halofit(LinearPower(cosmology))
        options = {"alignment": alignment, "panels": 4}
        found = convergence_power([80.0, 900.0], sources, cosmology, power, **options)
        weights = np.random.default_rng(1).normal(size=found.shape)
        return tf.reduce_sum(tf.math.log(found) * weights)

    check_derivative(function, fixed[name], 1e-4)


def test_a_table_of_power_is_a_bicubic_spline():
    """It has what is cubic in ln k and a, and the power laws of the ends beyond them."""
    k, a = (
        np.geomspace(0.01, 10, 12) * RNG.uniform(0.95, 1.05, 12),
        np.array([0.3, 0.5, 0.6, 0.9, 1]),
    )

    def ln_power(k, a):
        x = np.log(k)
        return 0.3 - x + 0.1 * x**2 + (0.02 * x**3 + 1) * (a - 0.4 * a**3)

    table = TabulatedPower(k, a, np.exp(ln_power(k, a[:, None])))
    inner = np.exp(RNG.uniform(np.log(k[0]), np.log(k[-1]), (7, 1)))
    at = RNG.uniform(0.3, 1.0, 5)
    np.testing.assert_allclose(table(inner, at), np.exp(ln_power(inner, at)), rtol=1e-11)
    np.testing.assert_allclose(table(k[::-1], 1.0), np.exp(ln_power(k[::-1], 1.0)), rtol=1e-11)
    for end, factor in ((k[0], 0.1), (k[-1], 10.0)):
        slope = -1 + 0.2 * np.log(end) + 0.06 * np.log(end) ** 2 * (0.7 - 0.4 * 0.7**3)
        ratio = float(table(end * factor, 0.7) / table(end, 0.7))
        assert np.log(ratio) / np.log(factor) == pytest.approx(slope, rel=1e-9)


def test_a_table_of_power_is_differentiated():
    k, a = np.geomspace(0.01, 10, 6), np.array([0.3, 0.5, 0.6, 1.0])
    values = RNG.uniform(0.5, 1.5, (4, 6))
    arguments = [values, np.array([0.002, 0.2, 3.0, 40.0]), np.array([0.35, 0.5, 0.7, 0.9])]
    for number, argument in enumerate(arguments):

        def function(share, number=number, argument=argument):
            """Of a table, or of places in it, each of which moves by a share of itself."""
            moved = [*arguments[:number], argument * share, *arguments[number + 1 :]]
            table, k_at, a_at = (tf.convert_to_tensor(x, tf.float64) for x in moved)
            found = TabulatedPower(k, a, table)(k_at, a_at)
            return tf.reduce_sum(tf.math.log(found) * [1.0, 0.3, -0.7, 0.2])

        check_derivative(function, np.ones_like(argument), 1e-5)


def test_camb_has_no_derivatives_of_non_linear_power(monkeypatch):
    def table(redshifts, model, A_s, **parameters):
        return np.geomspace(1e-3, 10, 5), np.ones((len(redshifts), 5)) * A_s

    monkeypatch.setattr("flowpm_dist.cosmology.nonlinear.camb_power_table", table)
    matter = tf.constant(0.31, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(matter)
        power = NonlinearPower(LCDM.replace(Omega_m=matter))(0.1)
    assert float(power) == pytest.approx(2e-9)
    with pytest.raises(LookupError, match="Omega_m: use Halofit"):
        tape.gradient(power, matter)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TabulatedPower([0.1, 1, 2], A, np.ones((9, 3))), "four"),
        (lambda: TabulatedPower([0, 1, 2, 3], A, np.ones((9, 4))), "above 0"),
        (lambda: TabulatedPower([1, 2, 3, 4], A, np.ones((4, 9))), "shape"),
        (lambda: TabulatedPower([1, 2, 3, 4], A, np.zeros((9, 4))), "above 0"),
        (lambda: TabulatedPower([1, 2, 3, 4], A, np.ones((9, 4)))(1.0, 0.1), "from 0.2 to 1"),
        (lambda: NonlinearPower(LCDM, "halo"), "takahashi"),
        (lambda: convergence_power([100.0], [], LCDM), "one source"),
        (
            lambda: convergence_power([9.0], SOURCES, LCDM, alignment=IntrinsicAlignment(1.0)),
            "one redshift",
        ),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
