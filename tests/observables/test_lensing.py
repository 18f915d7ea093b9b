"""Lensing by given planes: reference planes, gradients, identities, noise, and what is refused."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from derivatives import check_derivative
from reference import parameters_of, reference, relative_rms

from flowpm_dist.cosmology import Cosmology, Growth
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.grid.flat_sky import FlatSky
from flowpm_dist.observables.lensing import (
    IntrinsicAlignment,
    LensPlanes,
    SmailDistribution,
    SourcePlane,
    TabulatedDistribution,
    born,
    convergence,
    plane_weights,
    ray_trace,
    shape_noise,
    shear,
)
from flowpm_dist.observables.lensing.ray_tracing import bilinear

EVOLVING = Cosmology(0.28, 0.045, 0.7, 0.95, sigma8=0.75, w0=-0.9, wa=0.2)
PLANES = LensPlanes(np.linspace(0.0, 2000.0, 5))
FOV = 0.02
RNG = np.random.default_rng(3)


def planes_of(pixels=16, amplitude=20.0):
    """Smooth overdensities, large enough to bend rays by some pixels."""
    noise = np.fft.rfft2(RNG.normal(size=(4, pixels, pixels)))
    x, y = np.fft.fftfreq(pixels, 1 / pixels)[:, None], np.arange(pixels // 2 + 1)
    return amplitude * np.fft.irfft2(noise * np.exp(-0.15 * (x**2 + y**2)), s=(pixels, pixels))


DELTA = planes_of()
BINS = [SourcePlane(0.5), SourcePlane(0.9), SmailDistribution(0.3)]


@pytest.fixture(scope="module")
def given():
    return reference("lensing")


@pytest.fixture(scope="module")
def cosmology(given):
    return Cosmology(**parameters_of(given))


@pytest.fixture(scope="module")
def lenses(given):
    return LensPlanes(given["plane_edges"], given["plane_chi"], given["plane_a"])


def test_born_is_the_references(given, cosmology, lenses):
    sources = [SourcePlane(distance=chi) for chi in (*given["plane_chi"], given["chi_source"])]
    for dtype, atol in ((np.float64, 1e-12), (np.float32, 1e-6)):
        kappa = born(given["plane_delta"].astype(dtype), lenses, sources, cosmology)
        assert kappa.dtype == dtype
        maps = kappa.numpy()[:, *given["pixels"]]
        np.testing.assert_allclose(maps, given["born_kappa"], rtol=1e-10, atol=atol)


def test_rays_are_the_references(given, cosmology, lenses):
    fov = float(given["fov"])
    delta = given["plane_delta"]
    sky = FlatSky.of(tf.constant(delta), fov)
    np.testing.assert_allclose(sky.centres()[:, 0, 0], given["theta"], rtol=1e-14)
    sources = [SourcePlane(1.0), SourcePlane(distance=500.0)]
    rays = ray_trace(delta, lenses, sources, cosmology, fov)
    pixels = tuple(given["pixels"])
    centres, expected = sky.centres()[pixels], given["ray_jacobian"] - np.eye(2)
    deflected = given["ray_position"] - centres
    assert relative_rms(rays.position[0].numpy()[pixels] - centres, deflected) < 1e-7
    assert relative_rms(rays.jacobian[0].numpy()[pixels] - np.eye(2), expected) < 1e-7
    trace = given["ray_jacobian"].trace(0, 1, 2)
    np.testing.assert_allclose(rays.kappa[0].numpy()[pixels], 1 - trace / 2, rtol=0, atol=1e-9)
    # Before the second source, at 500 Mpc/h, there are two planes.
    near = LensPlanes(lenses.edges[:3], lenses.chi[:2], lenses.a[:2])
    alone = ray_trace(delta[:2], near, sources[1:], cosmology, fov)
    np.testing.assert_allclose(rays.jacobian[1], alone.jacobian[0], rtol=0, atol=1e-13)
    # In float32, rays of 4 degrees are known to 1e-7 of them: 1e-5 pixels.
    single = ray_trace(delta.astype(np.float32), lenses, sources, cosmology, fov)
    assert relative_rms(single.jacobian[0].numpy()[pixels] - np.eye(2), expected) < 1e-3


def test_components_of_the_jacobian():
    kappa, gamma1, gamma2, omega = 0.1, 0.02, -0.03, 0.005
    fields = ray_trace(DELTA, PLANES, BINS[:1], EVOLVING, FOV, positions=[0.001, 0.002])
    jacobian = [[1 - kappa - gamma1, -gamma2 - omega], [-gamma2 + omega, 1 - kappa + gamma1]]
    found = type(fields)(fields.position, tf.constant([jacobian]))
    values = [float(x[0]) for x in (found.kappa, found.gamma1, found.gamma2, found.rotation)]
    np.testing.assert_allclose(values, [kappa, gamma1, gamma2, omega], atol=1e-7)


def test_weak_planes_give_born():
    """Rays differ from Born in second order, and their rotation is of second order."""
    differences, rotations = [], []
    sources = BINS[1:]
    for scale in (1e-3, 1e-2):
        rays = ray_trace(scale * DELTA, PLANES, sources, EVOLVING, FOV)
        kappa = born(scale * DELTA, PLANES, sources, EVOLVING)
        kappa -= tf.reduce_mean(kappa, [1, 2], keepdims=True)  # which deflections do not have
        gamma1, gamma2 = shear(kappa, FOV)
        parts = ((rays.kappa, kappa), (rays.gamma1, gamma1), (rays.gamma2, gamma2))
        assert all(relative_rms(a.numpy(), b.numpy()) < 20 * scale for a, b in parts)
        differences.append([float(tf.norm(a - b)) for a, b in parts])
        rotations.append(float(tf.norm(rays.rotation)))
    np.testing.assert_allclose(np.divide(*differences[::-1]), 100, rtol=0.1)
    assert rotations[1] / rotations[0] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("Omega_k", [0.3, -0.25])
def test_rays_of_curved_space(Omega_k):
    """One after another through three lines of mass, whose deflections are known exactly.

    A plane of one wave deflects by a sine. Rays are followed by lengths across, x = f_K theta.
    """
    cosmology = EVOLVING.replace(Omega_k=Omega_k)
    root = np.sqrt(abs(Omega_k)) / 2997.92458

    def length(chi):
        return (np.sinh if Omega_k > 0 else np.sin)(root * chi) / root

    planes, pixels, wave = LensPlanes([0.0, 500.0, 1200.0, 2000.0]), 64, 2 * np.pi / FOV
    x = (np.arange(pixels) + 0.5) / pixels * FOV
    delta = np.zeros((3, pixels, pixels)) + 3.0 * np.sin(wave * x)[:, np.newaxis]
    rays = ray_trace(delta, planes, [SourcePlane(distance=2300.0)], cosmology, FOV)
    chi, a = planes.chi.numpy(), planes.scale_factor(Distances(cosmology)).numpy()
    strength = 1.5 * 0.28 / 2997.92458**2 * length(chi) / a * planes.widths.numpy()
    deflections = []

    def reached(end):
        passed = zip(chi, deflections, strict=False)
        return x - sum(length(end - at) / length(end) * angle for at, angle in passed)

    for at, kappa in zip(chi, 3.0 * strength, strict=True):
        place = reached(at) / FOV * pixels - 0.5  # deflections are linear between centres
        lower = np.floor(place)
        waves = [
            -2 * kappa / wave * np.cos(wave * (lower + n + 0.5) / pixels * FOV) for n in (0, 1)
        ]
        deflections.append(waves[0] + (place - lower) * (waves[1] - waves[0]))
    np.testing.assert_allclose(rays.position[0, :, 0, 0], reached(2300.0), rtol=0, atol=1e-13)


def test_a_distribution_is_the_mean_of_planes():
    z, n = np.array([0.2, 0.25, 0.9, 0.95]), np.array([1.0, 0.0, 0.0, 0.0])
    narrow = TabulatedDistribution(z[:2], [1.0, 1.0])
    far = TabulatedDistribution(z[2:], [1.0, 1.0])
    both = TabulatedDistribution(z, [1.0, 1.0, 1.0, 1.0])
    distances = Distances(EVOLVING)
    middle = TabulatedDistribution(z[1:3], [1.0, 1.0])
    share = np.diff(z) / (z[-1] - z[0])
    rays = ray_trace(DELTA, PLANES, [narrow, middle, far, both], EVOLVING, FOV)
    mean = tf.tensordot(tf.constant(share), rays.jacobian[:3], 1)
    np.testing.assert_allclose(rays.jacobian[3], mean, rtol=0, atol=1e-10)
    assert float(both.fractions([0.0, 9000.0], distances)[0]) == pytest.approx(1, rel=1e-12)
    assert n.sum() == 1


def weighted(rays):
    """A number that all rays enter."""
    weights = np.random.default_rng(5)
    position = weights.normal(size=rays.position.shape) / FOV
    jacobian = weights.normal(size=rays.jacobian.shape)
    return tf.reduce_sum(rays.position * position) + tf.reduce_sum(rays.jacobian * jacobian)


def test_ray_tracing_is_differentiated_by_planes_and_positions():
    """Its derivative along a direction is the product with the gradient."""
    positions = RNG.uniform(0, FOV, (40, 2))

    def by_planes(delta):
        return weighted(ray_trace(delta, PLANES, BINS, EVOLVING, FOV, positions))

    def by_positions(theta):
        return weighted(ray_trace(DELTA, PLANES, BINS, EVOLVING, FOV, theta))

    check_derivative(by_planes, DELTA, 1e-6)
    check_derivative(by_positions, positions, 1e-9)
    # The same in a graph.
    delta = tf.constant(DELTA)

    def gradient(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = by_planes(value)
        return tape.gradient(result, value)

    np.testing.assert_allclose(
        tf.function(gradient, autograph=False)(delta), gradient(delta), rtol=0, atol=1e-12
    )


def test_second_derivatives_of_rays_are_refused():
    delta = tf.constant(DELTA)
    with tf.GradientTape() as outer:
        outer.watch(delta)
        with tf.GradientTape() as tape:
            tape.watch(delta)
            result = weighted(ray_trace(delta, PLANES, BINS, EVOLVING, FOV))
        first = tape.gradient(result, delta)
    with pytest.raises(LookupError, match="no second derivative"):
        outer.gradient(first, delta)


@pytest.mark.parametrize(
    ("name", "values", "step"),
    [
        ("cosmology", [0.28, -0.9, 0.2, 0.0], 1e-5),
        ("cosmology", [0.28, -0.9, 0.2, -0.2], 1e-5),
        ("sources", [0.02, 0.3, 2.1, 1.6], 1e-5),
        ("n", [0.5, 1.5, 1.0, 0.3], 1e-5),
        ("alignment", [1.3, 0.7], 1e-5),
        # [Mpc/h]; with a smaller step the difference is lost in rounding errors
        ("edges", [10.0, 600.0, 1100.0, 1500.0, 2000.0], 1e-2),
    ],
)
def test_derivatives_by_cosmology_and_sources(name, values, step):
    def function(values):
        given = {name: tf.convert_to_tensor(values)}
        Omega_m, w0, wa, Omega_k = tf.unstack(
            given.get("cosmology", tf.constant([0.28, -0.9, 0.2, 0.0], tf.float64))
        )
        cosmology = EVOLVING.replace(Omega_m=Omega_m, w0=w0, wa=wa, Omega_k=Omega_k)
        shift, *smail = tf.unstack(
            given.get("sources", tf.constant([0.02, 0.3, 2.1, 1.6], tf.float64))
        )
        sources = [
            SourcePlane(0.8, shift),
            SmailDistribution(*smail, shift),
            TabulatedDistribution([0.1, 0.3, 0.6, 1.0], given.get("n", [1.0] * 4), shift),
        ]
        if name == "alignment":
            alignment = IntrinsicAlignment(*tf.unstack(given[name]))
            maps = born(DELTA, PLANES, sources, cosmology, alignment=alignment)
            return tf.reduce_sum(maps * np.random.default_rng(7).normal(size=maps.shape))
        planes = LensPlanes(given.get("edges", PLANES.edges))
        return weighted(ray_trace(DELTA, planes, sources, cosmology, FOV))

    check_derivative(function, values, step)


def test_shear_and_back():
    kappa = planes_of(pixels=15)  # of an even number, Nyquist modes are lost
    kappa = tf.constant(kappa - kappa.mean((1, 2), keepdims=True))
    gamma1, gamma2 = shear(kappa, (FOV, 0.03))
    even, odd = convergence(gamma1, gamma2, (FOV, 0.03))
    np.testing.assert_allclose(even, kappa, rtol=0, atol=1e-10)
    np.testing.assert_allclose(odd, 0, atol=1e-10)
    # A wave along y: gamma1 = -kappa. One along the diagonal x = y: gamma2 = kappa.
    x, y = np.meshgrid(*2 * [(np.arange(16) + 0.5) / 16], indexing="ij")
    for angle, expected in ((y, (-1, 0)), (x + y, (0, 1)), (x - y, (0, -1))):
        wave = tf.constant(np.cos(2 * np.pi * angle))
        for found, factor in zip(shear(wave, FOV), expected, strict=True):
            np.testing.assert_allclose(found, factor * wave, atol=1e-13)

    def squares(maps):
        first, second = shear(maps, FOV)
        return tf.reduce_sum(first**2 + 0.3 * second**2 + first * second)

    check_derivative(squares, DELTA, 1e-3)


def test_reading_is_linear_and_periodic():
    sky = FlatSky.of(tf.zeros([4, 6], tf.float64), (4.0, 3.0))
    maps = tf.constant(RNG.normal(size=(4, 6, 2)))
    np.testing.assert_allclose(bilinear(maps, tf.constant(sky.centres()), sky), maps, atol=1e-15)
    corner = bilinear(maps, tf.constant([[0.0, 0.0], [4.0, -3.0]], tf.float64), sky)
    mean = (maps[0, 0] + maps[-1, 0] + maps[0, -1] + maps[-1, -1]) / 4
    np.testing.assert_allclose(corner, [mean, mean], atol=1e-15)


def test_intrinsic_alignments():
    model = IntrinsicAlignment(0.8, eta=1.5, z_pivot=0.5)
    a, growth = np.array([0.4, 0.8]), Growth(EVOLVING)
    expected = -0.8 * (1 / a / 1.5) ** 1.5 * 0.0134 * 0.28 * growth.d1(1.0) / growth.d1(a)
    np.testing.assert_allclose(model.response(a, EVOLVING), expected, rtol=1e-13)
    plain = plane_weights(PLANES, BINS, EVOLVING)
    aligned = plane_weights(PLANES, BINS, EVOLVING, model)
    distances = Distances(EVOLVING)
    response = model.response(PLANES.scale_factor(distances), EVOLVING)
    # Sources at z = 0.5 lie in the third slab.
    assert 1000 < float(BINS[0].farthest(distances)) < 1500
    np.testing.assert_allclose((aligned - plain)[0], response * [0, 0, 1, 0], atol=1e-16)
    shares = tf.reduce_sum((aligned - plain)[2] / response)
    assert float(shares) == pytest.approx(float(BINS[2].fractions([0.0, 2000.0], distances)[0]))


def test_shape_noise():
    noise = shape_noise((128, 128), 0.02, 0.26, [5.0, 30.0], seed=4, dtype=tf.float64)
    assert noise.shape == (2, 2, 128, 128)
    pixel = 0.02 / 128 / np.deg2rad(1 / 60)
    expected = 0.26 / np.sqrt(np.array([5.0, 30.0]) * pixel**2)
    # The error of a variance from 16,384 values is 1.1 %.
    np.testing.assert_allclose(noise.numpy().std((2, 3)) / expected[:, None], 1, atol=0.03)
    assert abs(np.corrcoef(noise[0].numpy().reshape(2, -1))[0, 1]) < 0.03
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=f"seed = {seed}: must be a whole number from 0"):
            shape_noise((8, 8), 0.02, 0.26, 5.0, seed=seed)
    again = shape_noise((128, 128), 0.02, 0.26, [5.0, 30.0], seed=4)
    np.testing.assert_array_equal(again, tf.cast(noise, tf.float32))
    other = shape_noise((8, 8), 0.02, 0.26, 5.0, seed=5, components=1)
    assert other.shape == (1, 8, 8)
    sigma = tf.constant(0.3, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(sigma)
        total = tf.reduce_sum(shape_noise((8, 8), 0.02, sigma, 5.0, 1, dtype=tf.float64) ** 2)
    assert float(tape.gradient(total, sigma)) == pytest.approx(float(2 * total / sigma))


@pytest.mark.parametrize("follow", ["born", "ray_trace"])
def test_sources_behind_the_last_plane_are_told(follow):
    """Not those whose lensing by matter there would be nothing to speak of."""
    near = SourcePlane(distance=2010.0)
    far = [near, SourcePlane(distance=2500.0)]

    def call(sources):
        if follow == "born":
            return born(DELTA, PLANES, sources, EVOLVING)
        return ray_trace(DELTA, PLANES, sources, EVOLVING, FOV)

    message = r"sources\[1\] lie behind the last edge .* at 2000 Mpc/h: .* efficiency is up to 0.2,"
    with pytest.warns(UserWarning, match=message) as warned:
        call(far)
    assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call([near])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LensPlanes([0.0]), "two distances"),
        (lambda: LensPlanes([10.0, 5.0]), "increase"),
        (lambda: LensPlanes([0.0, 5.0, 10.0], chi=[5.0]), "2 planes"),
        (lambda: LensPlanes([0.0, 5.0, 10.0], chi=[5.0, 2.0]), "increase"),
        (lambda: LensPlanes([0, 5, 10], chi=[5.1, 7]), "plane 0 is 5.1 Mpc/h: .* from 0 to 5"),
        (lambda: LensPlanes([0, 5, 10], chi=[2, 4.9]), "plane 1 is 4.9 Mpc/h: .* from 5 to 10"),
        (lambda: LensPlanes([0, 5, 10], a=[0.9, -0.1]), "plane 1 is -0.1: must be a scale factor"),
        (lambda: LensPlanes([0, 5, 10], a=[1.1, 0.9]), "plane 0 is 1.1: must be a scale factor"),
        (lambda: born(DELTA[:3], PLANES, BINS, EVOLVING), "3 planes"),
        (lambda: born(DELTA, PLANES, [], EVOLVING), "one source"),
        (lambda: born(DELTA.astype(int), PLANES, BINS, EVOLVING), "floating"),
        (lambda: ray_trace(DELTA[..., 0], PLANES, BINS, EVOLVING, FOV), "plane, x, y"),
        (lambda: ray_trace(DELTA, PLANES, BINS, EVOLVING, 0.0), "field of view"),
        (lambda: ray_trace(DELTA, PLANES, BINS, EVOLVING, FOV, [1.0, 2.0, 3.0]), "positions"),
        (lambda: shear(DELTA.astype(int), FOV), "float32"),
        (lambda: shape_noise((8, 8), FOV, -0.3, 5.0, 1), "sigma_e"),
        (lambda: shape_noise((8, 8), FOV, 0.3, 0.0, 1), "n_eff"),
        (lambda: shape_noise((8,), FOV, 0.3, 1.0, 1), "pixels"),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
