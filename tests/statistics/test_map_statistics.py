"""Maps of the flat sky: angular power of known spectra, peaks, one-point distribution."""

import numpy as np
import pytest
import tensorflow as tf
from derivatives import check_derivative

from flowpm_dist.grid.flat_sky import FlatSky
from flowpm_dist.posteriors import measured
from flowpm_dist.statistics import (
    MAP_STATISTICS,
    angular_power,
    binned_angular_power,
    map_histogram,
    peaks,
    soft_map_histogram,
    theory_in_bins,
)
from flowpm_dist.statistics.noisy_maps import (
    HEIGHTS,
    NoisyMaps,
    map_histograms,
    map_peaks,
    map_power,
)

RNG = np.random.default_rng(11)
FOV = (0.1, 0.05)
SHAPE = (128, 64)


def spectrum(ell):
    return 1e-4 / (1 + ell / 700) ** 2


def gaussian_maps(count, window=None):
    """Periodic Gaussian maps whose power is `spectrum`, smeared by a power of the pixel window."""
    x = np.fft.fftfreq(SHAPE[0], FOV[0] / SHAPE[0])[:, None]
    y = np.fft.rfftfreq(SHAPE[1], FOV[1] / SHAPE[1])[None, :]
    ell = 2 * np.pi * np.hypot(x, y)
    area, pixels = FOV[0] * FOV[1], SHAPE[0] * SHAPE[1]
    white = np.fft.rfft2(RNG.normal(size=(count, *SHAPE)))  # |modes|^2 = pixels
    smear = np.sinc(x * FOV[0] / SHAPE[0]) * np.sinc(y * FOV[1] / SHAPE[1])
    modes = white * np.sqrt(spectrum(ell) * pixels / area) * smear ** (window or 0)
    return np.fft.irfft2(modes, s=SHAPE)


@pytest.mark.parametrize(("bins", "spacing"), [(None, "linear"), (9, "log"), (12, "linear")])
def test_the_power_of_gaussian_maps(bins, spacing):
    maps = gaussian_maps(60)
    found = angular_power(maps, FOV, bins, spacing=spacing)
    assert found.power.shape == (60, found.ell.size) and found.edges.size == found.ell.size + 1
    assert ((found.ell >= found.edges[:-1]) & (found.ell < found.edges[1:])).all()
    # Each mode has a relative variance of 2 / modes; the spectrum is not constant within a bin.
    sigma = np.sqrt(2 / found.modes / 60)
    assert (np.abs(found.power.mean(0) / spectrum(found.ell) - 1) < 4 * sigma + 0.02).all()
    ell, power = angular_power(maps[0].astype(np.float32), FOV, bins, spacing=spacing)
    np.testing.assert_allclose(power, found.power[0], rtol=1e-4)


def test_a_wave_lies_in_its_bin():
    """a cos(l x) has the power a^2 A / 4 in each of two modes."""
    x = (np.arange(SHAPE[0]) + 0.5) / SHAPE[0]
    wave = np.broadcast_to(0.3 * np.cos(2 * np.pi * 5 * x)[:, None], SHAPE)
    found = angular_power(wave, FOV)
    sums = found.power * found.modes
    expected = np.zeros(sums.size)
    expected[4] = 0.3**2 / 4 * FOV[0] * FOV[1] * 2
    np.testing.assert_allclose(sums, expected, atol=1e-18)
    # All modes are counted but those beyond the corners of the last bin.
    edges = [0.0, 1e9]
    assert angular_power(wave, FOV, edges).modes[0] == SHAPE[0] * SHAPE[1] - 1
    variance = angular_power(wave, FOV, edges).power[0] * (wave.size - 1) / (FOV[0] * FOV[1])
    assert variance == pytest.approx(wave.var())


def test_windows_are_divided_out():
    for window, power in (("pixel", 1), ("bilinear", 2)):
        state = RNG.bit_generator.state
        plain = angular_power(gaussian_maps(2), FOV, 8)
        RNG.bit_generator.state = state
        smeared = angular_power(gaussian_maps(2, power), FOV, 8, window=window)
        np.testing.assert_allclose(smeared.power, plain.power, rtol=1e-10)


def test_cross_power_of_all_pairs():
    maps = gaussian_maps(3)
    found = angular_power(maps[:, None], FOV, 6, other=maps, noise=1e-6)
    np.testing.assert_allclose(found.power, np.swapaxes(found.power, 0, 1), rtol=1e-12)
    auto = angular_power(maps, FOV, 6).power
    np.testing.assert_allclose(np.einsum("iil->il", found.power), auto - 1e-6, rtol=1e-12)
    both = angular_power(maps[0] + maps[1], FOV, 6).power
    np.testing.assert_allclose(both, auto[0] + auto[1] + 2 * (found.power[0, 1] + 1e-6), rtol=1e-9)


@pytest.mark.parametrize("other", [False, True])
def test_the_power_is_differentiated(other):
    maps = RNG.normal(size=(2, 7, 8))
    weights = RNG.normal(size=(2, 3))
    partner = RNG.normal(size=(2, 7, 8)) if other else None

    def function(value):
        power = binned_angular_power(value, FOV, 3, other=partner, window="pixel")
        return tf.reduce_sum(power * weights) * 1e4

    check_derivative(function, maps, 1e-3, rtol=1e-9)  # the power is quadratic


def test_peaks_of_a_constructed_map():
    maps = np.zeros((2, 12, 10))
    for x, y, height in ((2, 2, 1.5), (2, 6, 2.5), (7, 7, 2.6), (0, 4, 3.5), (9, 3, -0.5)):
        maps[0, x, y] = height
    maps[0, 8, 8] = 2.6  # a plateau of two is no peak
    maps[0, 5, 6:8] = 1.2, 1.4  # of two neighbours, one is
    maps[0, 9:11, 6] = 1.4, 1.2
    maps[0, 9, 2] = -1.0
    maps[0, 8:11, 2:5] -= 1.0
    maps[0, 9, 3] = -0.5  # above its neighbours, below the mean
    edges = [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    found = peaks(maps, edges)
    np.testing.assert_array_equal(found.counts, [[1, 0, 3, 1, 0], [0] * 5])
    np.testing.assert_array_equal(peaks(maps, edges, periodic=True).counts[0], [1, 0, 3, 1, 1])
    scaled = peaks(tf.constant(maps), [2.0, 4.0, 6.0], sigma=[0.5, 1.0])
    np.testing.assert_array_equal(scaled.counts, [[3, 1], [0, 0]])
    centres, counts = found
    np.testing.assert_allclose(centres, [-0.5, 0.5, 1.5, 2.5, 3.5])
    assert counts.dtype == np.int64


def test_one_point_distribution():
    maps, edges = RNG.normal(size=(3, 16, 8)), np.linspace(-2, 2, 9)
    found = map_histogram(maps, edges)
    np.testing.assert_array_equal(found.counts[1], np.histogram(maps[1], edges)[0])
    centres, pdf = found
    assert found.cells == 128 and pdf.shape == (3, 8)
    value = tf.constant(maps)
    with tf.GradientTape() as tape:
        tape.watch(value)
        counts = soft_map_histogram(value, edges)
        mean = tf.reduce_sum(counts * centres)  # of values between the outer centres
    np.testing.assert_allclose(tf.reduce_sum(counts, 1), 128)
    clipped = np.clip(maps, centres[0], centres[-1])
    assert float(mean) == pytest.approx(clipped.sum())
    np.testing.assert_allclose(tape.gradient(mean, value), clipped == maps, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda m: angular_power(m, -1.0), "field of view"),
        (lambda m: angular_power(m[0], FOV), "x, y"),
        (lambda m: angular_power(m.astype(int), FOV), "float32"),
        (lambda m: angular_power(m, FOV, [3.0, 2.0]), "increasing"),
        (lambda m: angular_power(m, FOV, [100.0, 110.0, 120.0]), "no mode"),
        (lambda m: angular_power(m, FOV, 2.5), "whole number"),
        (lambda m: angular_power(m, FOV, 2, spacing="cubic"), "spacing"),
        (lambda m: angular_power(m, FOV, window="cic"), "window"),
        (lambda m: angular_power(m, FOV, other=m[:4]), "same pixels"),
        (lambda m: peaks(m[:2], [0.0, 1.0]), "3 x 3"),
        (lambda m: peaks(m, [1.0, 0.0]), "increasing"),
        (lambda m: peaks(m, [0.0, 1.0], sigma=0.0), "sigma"),
        (lambda m: soft_map_histogram(m, [0.0, 1.0]), "two bins"),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make(np.ones((8, 8)))


def test_theory_in_bins_is_the_mean_over_their_modes():
    """As a map has it whose modes have exactly that power; for one mode a bin, the value itself."""
    fov, edges = np.deg2rad(8.0), [100.0, 170.0, 300.0, 700.0]

    def power(ell):
        return np.stack([1e-4 * ell**-2.0, 1e-7 * np.exp(-ell / 500)])

    sky = FlatSky((64, 48), (fov, fov))
    x, y = sky.wavenumbers()
    ell = np.sqrt(x**2 + y**2)
    noise = np.fft.rfft2(np.random.default_rng(1).normal(size=sky.pixels))
    ell[0, 0] = 1.0
    spectrum = np.sqrt(power(ell)) * noise / np.abs(noise)
    maps = np.fft.irfft2(spectrum, sky.pixels) * np.sqrt(np.prod(sky.pixels) ** 2 / sky.area)
    found = angular_power(maps, fov, edges)
    expected = theory_in_bins(power, sky.pixels, fov, edges)
    np.testing.assert_allclose(found.power, expected, rtol=1e-4)
    assert (expected[0] > 1.01 * power(found.ell)[0]).all()


def test_summaries_of_white_maps():
    """Noise has the power sigma^2 times a pixel's area; two equal maps have a correlation of 1."""
    fov, sigma = 0.2, 0.01
    kappa = sigma * np.random.default_rng(3).normal(size=(40, 2, 16, 16))
    maps = NoisyMaps(kappa, fov, sigma)
    power = map_power(maps)
    bins = power.shape[1] // 3
    auto = np.exp(power[:, : 2 * bins]).mean(axis=0) / (sigma * fov / 16) ** 2
    edges = 2 * np.pi / fov * np.geomspace(1.0, 8.0, bins + 1)
    modes = np.tile(angular_power(kappa[0, 0], fov, edges).modes, 2)
    # Half of the modes are independent.
    np.testing.assert_array_less(np.abs(auto - 1), 5 * np.sqrt(2 / modes / 40))
    same = NoisyMaps(np.stack([kappa[:, 0], -2 * kappa[:, 0]], axis=1), fov, sigma)
    np.testing.assert_allclose(map_power(same)[:, 2 * bins :], -1, rtol=1e-12)
    coarse = maps.coarser()
    assert (coarse.fov, coarse.sigma) == (fov, sigma / 2)
    assert coarse.kappa.std() == pytest.approx(coarse.sigma, rel=5 / np.sqrt(2 * 40 * 2 * 64))
    shares = map_histograms(maps) ** 2
    np.testing.assert_allclose(shares[:, : shares.shape[1] // 2].sum(axis=1), 2 * 256)
    counts = peaks(kappa, HEIGHTS, sigma=sigma).counts.reshape(40, -1)
    np.testing.assert_allclose(map_peaks(maps)[:, : counts.shape[1]] ** 2, counts, atol=1e-12)


def test_summaries_of_maps_by_name(monkeypatch):
    maps = NoisyMaps(np.random.default_rng(3).normal(size=(3, 1, 8, 8)), 0.2, 1.0)
    found = measured(tuple(MAP_STATISTICS), maps)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 3)
    monkeypatch.setitem(MAP_STATISTICS, "means", lambda m: m.kappa.mean(axis=(1, 2, 3)))
    assert measured(["means"], maps)["means"].shape == (3, 1)
    monkeypatch.setitem(MAP_STATISTICS, "means", lambda m: np.full(3, np.nan))
    with pytest.raises(ValueError, match="means has values that are not finite"):
        measured(["means"], maps)
    with pytest.raises(ValueError, match="statistic of maps"):
        measured(["nothing"], maps)
