"""Heads of posteriors against exact ones, and calibration of right and of wrong posteriors.

The exact model is linear and Gaussian in z, in which uniform priors are unit normals: features are
z H + noise, so that the posterior of z is Gaussian with a known mean and covariance.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from matplotlib import pyplot
from scipy.stats import multivariate_normal, norm

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.posteriors import figures, measured
from flowpm_dist.posteriors.calibration import Answers, calibration_of, error_of_mean, mixed
from flowpm_dist.posteriors.heads import (
    Posterior,
    Summaries,
    bounded,
    fit_posterior,
    head_of,
    unbounded,
)
from flowpm_dist.posteriors.novelty import FeatureDensity
from flowpm_dist.posteriors.options import HEADS, HeadOptions
from flowpm_dist.posteriors.transforms import (
    Gaussian,
    SplineFlow,
    inverse_spline,
    parameters_of_spline,
    spline,
)
from flowpm_dist.statistics import STATISTICS, Bins, bispectrum, power_spectrum
from flowpm_dist.statistics.histogram import SCALES, CellValues
from meshimpl.process_mesh import ProcessMesh

PRIORS = UniformPriors({"Omega_m": (0.25, 0.35), "sigma8": (0.78, 0.95), "n_s": (0.9, 1.0)})
SLOPES = np.array([[1.0, 0.5, 0.0, 0.2], [-0.8, 1.0, 0.3, 0.0], [0.1, 0.0, 0.4, 0.3]])
NOISE = np.array([0.5, 0.7, 1.0, 0.6])
PRECISION = np.eye(3) + SLOPES / NOISE**2 @ SLOPES.T
COVARIANCE = np.linalg.inv(PRECISION)
QUICK = HeadOptions(hidden=16, members=2, penalties=(3.0,), batch=200, epochs=10)


def exact_mean(features):
    return features / NOISE**2 @ SLOPES.T @ COVARIANCE


@functools.cache
def drawn(count: int, seed: int) -> Summaries:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((count, 3))
    features = z @ SLOPES + NOISE * rng.standard_normal((count, 4))
    return Summaries(features, bounded(PRIORS, z))


@functools.cache
def fitted(head: str) -> Posterior:
    return fit_posterior(head, PRIORS, drawn(2000, 1), drawn(400, 2), QUICK)


def exact_gain(data: Summaries) -> np.ndarray:
    z = unbounded(PRIORS, data.truth)
    posterior = multivariate_normal(np.zeros(3), COVARIANCE).logpdf(z - exact_mean(data.features))
    return posterior - norm.logpdf(z).sum(axis=1)


def test_the_map_of_priors_and_its_jacobian():
    points = np.random.default_rng(0).uniform(PRIORS.low, PRIORS.high, (50, 3))
    z = unbounded(PRIORS, points)
    np.testing.assert_allclose(bounded(PRIORS, z), points, rtol=1e-12)
    step = 1e-7 * (PRIORS.high - PRIORS.low)
    slopes = (unbounded(PRIORS, points + step) - unbounded(PRIORS, points - step)) / (2 * step)
    # The prior is a unit normal.
    uniform = norm.logpdf(z).sum(axis=1) + np.log(slopes).sum(axis=1)
    np.testing.assert_allclose(uniform, -np.log(PRIORS.high - PRIORS.low).sum(), atol=1e-5)
    assert np.isfinite(unbounded(PRIORS, np.float32([PRIORS.low, PRIORS.high]))).all()
    with pytest.raises(ValueError, match=r"sigma8 = 1 is outside its prior, 0\.78 to 0\.95"):
        unbounded(PRIORS, np.array([[0.3, 1.0, 0.95]]))


def test_a_spline_is_undone_and_has_its_slope():
    rng = np.random.default_rng(1)
    knots = parameters_of_spline(tf.constant(3 * rng.standard_normal((200, 23))), 8)
    values = tf.constant(rng.uniform(-6, 6, 200))
    with tf.GradientTape() as tape:
        tape.watch(values)
        found, log_slope = spline(values, knots)
    np.testing.assert_allclose(inverse_spline(found, knots), values, atol=1e-9)
    np.testing.assert_allclose(tf.exp(log_slope), tape.gradient(found, values), rtol=1e-9)
    same = parameters_of_spline(tf.zeros([200, 23], tf.float64), 8)
    np.testing.assert_allclose(spline(values, same)[0], values, atol=1e-12)


def strange(transform, by=0.3):
    """Weights far from those that a fit begins with."""
    rng = np.random.default_rng(3)

    def none(inputs, parameters):
        count = len(parameters)
        return np.zeros((inputs, count)), np.zeros(count), rng.standard_normal((50, count))

    weights = transform.initial(rng, 2, none)
    return [tf.constant(w + by * rng.standard_normal(w.shape)) for w in weights]


@pytest.mark.parametrize("head", HEADS)
def test_noise_is_undone_and_its_volume_is_that_of_the_jacobian(head):
    transform = head_of(head)(4, 3, 8)
    weights, rng = strange(transform), np.random.default_rng(4)
    z, x = (tf.constant(rng.standard_normal((2, 5, n))) for n in (3, 4))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(z)
        noise, log_volume = transform.noise(weights, z, x)
        parts = [tf.reduce_sum(noise[..., i]) for i in range(3)]
    rows = np.stack([tape.gradient(part, z).numpy() for part in parts], axis=-2)
    np.testing.assert_allclose(log_volume, np.log(np.linalg.det(rows)), atol=1e-9)
    np.testing.assert_allclose(transform.inverse(weights, noise, x), z, atol=1e-8)


@pytest.mark.parametrize("transform", [Gaussian(4, 2, 8), SplineFlow(4, 2, 8, bins=4)])
def test_a_density_integrates_to_one(transform):
    axis, step = np.linspace(-12, 12, 361, retstep=True)
    z = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(1, -1, 2)
    x = np.broadcast_to([0.3, -1.0, 0.5, 0.0], (2, z.shape[1], 4))
    noise, log_volume = transform.noise(
        strange(transform, by=0.15), tf.tile(tf.constant(z), [2, 1, 1]), tf.constant(x)
    )
    density = np.exp(norm.logpdf(noise).sum(axis=-1) + log_volume.numpy())
    assert density.std() > 0
    # A spline is smooth but for its curvature: the sum converges as the square of the step or so.
    np.testing.assert_allclose(density.sum(axis=1) * step**2, 1, atol=2e-3)


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_heads_recover_an_exact_posterior(head):
    """Within what the fit to n samples allows: a fit of k weights is worse by k / 2n on average."""
    found, test = fitted(head), drawn(1000, 3)
    gain, exact = found.gain(test.truth, test.features), exact_gain(test)
    # The linear Gaussian has 21 numbers, k / 2n = 0.005; what is not linear is stopped early.
    assert np.mean(exact - gain) == pytest.approx(0.01, abs=0.02)
    z = unbounded(
        PRIORS, np.clip(found.sample(test.features[:20], 2000, seed=1), PRIORS.low, PRIORS.high)
    )
    sigma = np.sqrt(np.diag(COVARIANCE))
    offset = (z.mean(axis=1) - exact_mean(test.features[:20])) / sigma
    assert np.sqrt(np.mean(offset**2)) < 0.12
    residual = z - z.mean(axis=1, keepdims=True)
    covariance = np.einsum("nsi,nsj->ij", residual, residual) / (20 * 2000)
    np.testing.assert_allclose(covariance, COVARIANCE, atol=0.06 * sigma.max() ** 2)


def test_a_diagonal_gaussian_has_no_correlations_and_loses_what_they_tell():
    found, test = fitted("independent"), drawn(1000, 3)
    z = unbounded(PRIORS, found.sample(test.features[:1], 40_000, seed=1))[0]
    assert np.abs(np.corrcoef(z.T) - np.eye(3)).max() < 0.05
    # The likeliest Gaussian without correlations has the variances of the marginals.
    lost = 0.5 * (np.log(np.diag(COVARIANCE)).sum() - np.linalg.slogdet(COVARIANCE)[1])
    difference = exact_gain(test) - found.gain(test.truth, test.features)
    assert difference.mean() == pytest.approx(lost, abs=0.03 + 4 * difference.std() / np.sqrt(1000))
    assert lost > 0.09


def test_a_flow_bends_where_a_gaussian_cannot_and_integrates_to_one_within_the_prior():
    """Two peaks: the feature is |z| with little noise."""
    one = UniformPriors({"sigma8": (0.6, 1.0)})
    rng = np.random.default_rng(0)
    z = rng.standard_normal((1400, 1))
    features, truth = np.abs(z) + 0.1 * rng.standard_normal(z.shape), bounded(one, z)
    sets = [Summaries(features[s], truth[s]) for s in (slice(1000), slice(1000, 1400))]
    options = HeadOptions(hidden=32, members=1, penalties=(0.1,), batch=200, epochs=60)
    flow, gaussian = (fit_posterior(head, one, *sets, options) for head in ("flow", "gaussian"))
    assert flow.loss < gaussian.loss - 0.5
    samples = unbounded(one, flow.sample(np.array([[1.5]]), 2000))[0, :, 0]
    assert 0.3 < np.mean(samples > 0) < 0.7 and np.mean(np.abs(np.abs(samples) - 1.5) < 0.4) > 0.85
    middles = 0.6 + 0.4 * (np.arange(4000) + 0.5) / 4000
    over_prior = np.exp(flow.gain(middles[:, np.newaxis], np.full((4000, 1), 1.5)))
    assert over_prior.mean() == pytest.approx(1, abs=2e-3)
    with pytest.raises(ValueError, match=r"shape \(1,\): must be \[data sets, 1\]"):
        flow.sample(np.array([1.5]), 10)
    with pytest.raises(ValueError, match="feature 0 of data set 1 is nan"):
        flow.sample(np.array([[1.5], [np.nan]]), 10)


def test_a_posterior_is_repeatable_and_the_same_when_read_again(tmp_path):
    found, test = fitted("gaussian"), drawn(1000, 3)
    again = fit_posterior("gaussian", PRIORS, drawn(2000, 1), drawn(400, 2), QUICK)
    for one, other in zip(found.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    replace(found, about={"step": 3}).save(tmp_path / "a" / "gaussian.npz")
    read = Posterior.load(tmp_path / "a" / "gaussian.npz")
    np.testing.assert_array_equal(
        read.sample(test.features[:3], 7, seed=5), found.sample(test.features[:3], 7, seed=5)
    )
    assert read.loss == found.loss and read.priors == found.priors and read.about == {"step": 3}
    axes = read.plot(test.features[0], 7, seed=5, truth=test.truth[0])
    (samples,) = read.sample(test.features[:1], 7, 5)
    assert axes.shape == (PRIORS.low.size,) * 2 and axes[0, 0].figure.number in pyplot.get_fignums()
    marks = [line.get_xdata()[0] for line in axes[-1, -1].lines if len(line.get_xdata()) == 2]
    assert marks == [test.truth[0, -1], np.median(samples[:, -1])]
    pyplot.close("all")


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="no head 'flwo'; did you mean flow"):
        head_of("flwo")
    with pytest.raises(ValueError, match="no head 'no.such:thing'"):
        head_of("no.such:thing")
    assert head_of("flowpm_dist.posteriors.transforms:SplineFlow") is SplineFlow
    with pytest.raises(ValueError, match="not finite"):
        Summaries(np.full((3, 2), np.nan), np.ones((3, 1)))
    with pytest.raises(ValueError, match="features has shape"):
        Summaries(np.ones((3, 2)), np.ones((4, 1)))


def answers(count=400, widen=1.0, shift=0.0, draws=300) -> Answers:
    """Exact posteriors of the linear model; or such as are too wide or shifted, in sigmas."""
    test, rng = drawn(count, 7), np.random.default_rng(8)
    sigma = np.sqrt(np.diag(COVARIANCE))
    noise = rng.standard_normal((count, draws, 3)) @ np.linalg.cholesky(COVARIANCE).T
    z = (exact_mean(test.features) + shift * sigma)[:, np.newaxis] + widen * noise
    return Answers(PRIORS, test.truth, bounded(PRIORS, z), exact_gain(test))


def test_exact_posteriors_are_calibrated():
    found = calibration_of(answers(), np.arange(400))
    wanted = np.sqrt([0.683 * 0.317 / 400, 0.954 * 0.046 / 400])
    np.testing.assert_allclose(found.coverage_error[:, :3].T, [wanted] * 3)
    assert found.ranks_p.min() > 0.02 and found.tarp_p > 0.02 and found.coverage_p.min() > 0.01
    assert (np.abs(found.coverage - [[0.683], [0.954]]) < 4 * found.coverage_error).all()
    assert found.gain_error == pytest.approx(exact_gain(drawn(400, 7)).std() / 20, rel=0.01)
    np.testing.assert_allclose(found.rmse, found.width, rtol=0.15)
    for drawn_figure in (
        figures.rank_figure({"exact": found}),
        figures.tarp_figure({"exact": found}),
    ):
        assert drawn_figure.axes
    names = [f"network, 2048 simulations, mean of {number} densities, flow" for number in range(8)]
    several = figures.tarp_figure(dict.fromkeys(names, found))
    several.canvas.draw()
    legend = several.legends[0].get_window_extent()
    assert several.bbox.x0 < legend.x0 and legend.x1 < several.bbox.x1, "it is not cut off"


@pytest.mark.parametrize("wrong", [{"widen": 0.6}, {"widen": 1.7}, {"shift": 0.4}])
def test_posteriors_that_are_too_narrow_too_wide_or_shifted_are_found_out(wrong):
    found = calibration_of(answers(**wrong), np.arange(400))
    assert found.ranks_p.max() < 1e-3
    assert "shift" in wrong or found.tarp_p < 1e-3


def test_tarp_sees_a_correlation_that_ranks_do_not():
    """Marginals are right, the correlation has the wrong sign."""
    rng = np.random.default_rng(1)
    flat = UniformPriors({"a": (0.0, 1.0), "b": (0.0, 1.0)})
    correlated = np.linalg.cholesky([[1, 0.95], [0.95, 1]])
    middle = 0.5 + 0.05 * rng.standard_normal((600, 2))
    truth = middle + 0.02 * rng.standard_normal((600, 2)) @ correlated.T
    noise = 0.02 * rng.standard_normal((600, 200, 2)) @ correlated.T * [1, -1]
    found = calibration_of(
        Answers(flat, truth, middle[:, np.newaxis] + noise, np.zeros(600)), np.arange(600)
    )
    assert found.ranks_p.min() > 0.01 and found.tarp_p < 0.01


def test_the_mean_of_densities():
    one, other = answers(50), answers(50, widen=2.0)
    both = mixed([one, Answers(other.priors, other.truth, other.samples, other.gain - 1)])
    np.testing.assert_allclose(both.gain, one.gain + np.log((1 + np.exp(-1)) / 2))
    assert both.samples.shape == (50, 600, 3)
    np.testing.assert_allclose(both.mean, (one.mean + other.mean) / 2)


def test_errors_are_those_of_independent_groups():
    values = np.random.default_rng(0).standard_normal(100)
    alone = error_of_mean(values, np.arange(100))
    assert alone == pytest.approx(values.std(ddof=1) / 10)
    assert error_of_mean(np.repeat(values, 8), np.repeat(np.arange(100), 8)) == pytest.approx(alone)


def test_unusual_data_are_told(tmp_path):
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((3, 40))

    def like(count):
        return rng.standard_normal((count, 3)) @ mixing + 0.05 * rng.standard_normal((count, 40))

    density = FeatureDensity.of(like(400), like(300))
    usual = density.quantiles(like(2000))
    # Uniform, but for the 300 samples that quantiles are taken from.
    assert np.abs(usual.mean(axis=0) - 0.5).max() < 0.06
    message = [density.warning(x) for x in like(300)]
    assert np.mean([bool(t) for t in message]) < 0.06
    far, off = 8 * mixing[0], 2 * rng.standard_normal(40)
    density.save(tmp_path / "features.npz")
    assert "does not resemble the training set" in FeatureDensity.load(
        tmp_path / "features.npz"
    ).warning(far)
    assert density.quantiles(off[np.newaxis])[0, 1] == 1


def test_how_often_ordinary_data_are_called_unusual():
    """In as many dimensions as there are components nothing lies off their plane."""
    rng = np.random.default_rng(0)
    density = FeatureDensity.of(rng.standard_normal((400, 3)), rng.standard_normal((100, 3)))
    assert density.whole and not density.distances(rng.standard_normal((50, 3)))[:, 1].any()
    message = [density.warning(x) for x in rng.standard_normal((1000, 3))]
    assert np.mean([bool(t) for t in message]) < 0.03
    assert "99% quantile of 100 held-out samples" in density.warning(np.full(3, 9.0))
    assert "About 1% of ordinary samples get this warning" in density.warning(np.full(3, 9.0))
    more = replace(density, known=np.concatenate([density.known, density.known[:1]]))
    assert "About 2% of ordinary samples get this" in more.warning(np.full(3, 9.0))
    few = replace(density, known=density.known[:4])
    assert "About 20% of ordinary samples get this" in few.warning(np.full(3, 9.0))


def test_statistics_by_name():
    """Of two universes: histograms against numpy's of a smoothed density, Q against its parts."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.standard_normal((2, 12, 12, 12)))
    box = Box((12, 12, 12), (24.0, 24.0, 24.0), ProcessMesh("row:1,col:1"), tf.float64, batch=2)
    field = Field(tf.constant(values), box)
    names = [*STATISTICS, "tests.posteriors.test_posteriors:total"]
    found = measured(names, field)
    assert list(found) == names and all(len(of) == 2 for of in found.values())
    np.testing.assert_allclose(found["power"], np.log(power_spectrum(field, window="cic").power))
    k = 2 * np.pi / 24 * np.fft.fftfreq(12, 1 / 12)
    k2 = k[:, None, None] ** 2 + k[:, None] ** 2 + k**2
    shares = []
    for radius, edges in SCALES:
        modes = np.fft.fftn(values, axes=(1, 2, 3)) * np.exp(-0.5 * (2 * radius) ** 2 * k2)
        smooth = np.log(np.fft.ifftn(modes, axes=(1, 2, 3)).real)
        shares.append([np.sqrt(np.histogram(one, edges)[0] / 12**3) for one in smooth])
    np.testing.assert_allclose(found["histograms"], np.concatenate(shares, axis=1), atol=1e-12)
    shells = Bins(6, k_min=2 * np.pi / 24, k_max=2 / 3 * np.pi / 2)
    triple = bispectrum(field, bins=shells, window="cic")
    p = power_spectrum(field, bins=shells, window="cic").power[:, triple.shells]
    cyclic = p[..., 0] * p[..., 1] + p[..., 1] * p[..., 2] + p[..., 2] * p[..., 0]
    np.testing.assert_allclose(found["bispectrum"], triple.bispectrum / cyclic, rtol=1e-9)
    np.testing.assert_allclose(
        found["tests.posteriors.test_posteriors:total"][:, 0], values.sum(axis=(1, 2, 3))
    )
    counts = CellValues(mean_count=2.0)
    names = ["histograms", "tests.posteriors.test_posteriors:mean_contrast"]
    found_of_counts = measured(names, field, counts)
    np.testing.assert_allclose(
        found_of_counts["tests.posteriors.test_posteriors:mean_contrast"][:, 0],
        values.mean((1, 2, 3)) / 2 - 1,
    )
    edges = counts.bins(SCALES[0][1])
    shares = [np.histogram(one, edges)[0] / 12**3 for one in values]
    of_histograms = found_of_counts["histograms"][:, : len(edges) - 1]
    np.testing.assert_allclose(of_histograms, np.sqrt(shares), atol=1e-12)
    with pytest.raises(ValueError, match="no statistic 'powr'; did you mean power"):
        measured(["powr"], field)
    with pytest.raises(
        ValueError, match="tests.posteriors.test_posteriors:nothing returned an array of shape .0,."
    ):
        measured(["tests.posteriors.test_posteriors:nothing"], field)


def test_histograms_have_every_cell():
    """Every cell is in a bin, with strong noise, and for few and for many counts."""
    rng = np.random.default_rng(1)
    box = Box((12, 12, 12), (24.0, 24.0, 24.0), ProcessMesh("row:1,col:1"), tf.float64, batch=2)
    density = np.exp(rng.standard_normal((2, 12, 12, 12)) - 0.5)
    noisy = [(density + s * rng.standard_normal(density.shape), None) for s in (0.3, 3.0, 100.0)]
    counted = [(rng.poisson(mean * density).astype(float), mean) for mean in (0.05, 3.0, 500.0)]
    for seen, mean_count in (*noisy, *counted):
        values = CellValues(mean_count is not None, mean_count)
        field = Field(tf.constant(seen), box)
        found = measured(["histograms"], field, values)["histograms"]
        shares = found.reshape(2, len(SCALES), -1) ** 2
        np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-13)
        assert ((shares > 0).sum(axis=-1)[:, :2] > 2).all(), "bins are too wide"


def mean_contrast(density, values):
    return density.numpy().mean(axis=(1, 2, 3)) / values.mean_count - 1


def total(density):
    return density.numpy().sum(axis=(1, 2, 3))


def nothing(density):
    return np.empty(0)
