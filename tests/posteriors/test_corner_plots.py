"""Corner plots: samples are counted in the contours that are drawn."""

import functools
import logging

import numpy as np
import pytest
from scipy.stats import kstwo

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.figures import save_figure
from flowpm_dist.posteriors.figures import corner_figure

PRIORS = UniformPriors({"Omega_m": (0.1, 0.5), "sigma8": (0.6, 1.0)})
SAMPLES = 4000
"""The number of samples that `predict` draws."""
DENSITY_ERROR = 0.02
"""What the estimate of a density adds to the share of samples between two places on a curve."""


def within_priors(draws):
    """The first samples of `draws(rng, count)` that lie within the priors, [sample, 2]."""
    found = draws(np.random.default_rng(3), 20 * SAMPLES)
    inside = ((found > PRIORS.low) & (found < PRIORS.high)).all(axis=1)
    assert inside.sum() >= SAMPLES
    return found[inside][:SAMPLES]


def gaussian(deviation, centre=(0.3, 0.8), correlation=-0.7):
    covariance = np.array([[1, correlation], [correlation, 1]])
    return lambda rng, count: (
        centre + deviation * rng.multivariate_normal([0, 0], covariance, count)
    )


def skewed(rng, count):
    """A log-normal in both parameters."""
    return PRIORS.low + 0.05 * np.exp(0.7 * gaussian(1.0, (0, 0), 0.5)(rng, count))


def curved(rng, count):
    """A thin curve: sigma8 Omega_m^0.5 is known to a hundredth, Omega_m hardly."""
    matter = rng.normal(0.3, 0.05, count)
    return np.stack([matter, 0.8 * (0.3 / matter) ** 0.5 + rng.normal(0, 0.004, count)], axis=1)


def two_modes(rng, count):
    """Two narrow modes far from each other."""
    which = rng.random((count, 1)) < 0.4
    return np.where(which, (0.2, 0.7), (0.4, 0.9)) + rng.normal(0, 0.008, (count, 2))


DRAWS = {
    **{f"a deviation of {s}": gaussian(s) for s in (0.006, 0.010, 0.026, 0.055)},
    "the prior": lambda rng, count: rng.uniform(PRIORS.low, PRIORS.high, (count, 2)),
    "narrow in one parameter": gaussian(np.array([0.01, 1.0]), correlation=0.0),
    "skewed": skewed,
    "at an edge": gaussian(0.05, (0.1, 0.8)),
    "in a corner": gaussian(0.05, (0.5, 1.0), 0.5),
    "on a line": gaussian(0.03, correlation=-0.9999),
    "curved": curved,
    "two modes": two_modes,
}


@functools.cache
def corner_of(kind):
    samples = within_priors(DRAWS[kind])
    return samples, corner_figure(samples, PRIORS)


def contours_of(axes):
    """Whether points [point, 2] lie within the drawn 68.3 % and 95.4 % contours, [2, point]."""
    (drawn,) = axes.collections
    outer, inner = drawn.get_paths()  # of filled contours: the outer one lacks the inner one

    def inside(points):
        most = inner.contains_points(points)
        return np.array([most, most | outer.contains_points(points)])

    return inside


@pytest.mark.parametrize("kind", DRAWS)
def test_contours_hold_the_shares_of_samples_that_they_state(kind):
    samples, figure = corner_of(kind)
    (_, hidden, panel, _) = figure.axes
    assert not hidden.get_visible()
    found = contours_of(panel)(samples).mean(axis=1)
    stated = np.array([0.683, 0.954])
    # Levels are quantiles at these samples. Contours are drawn by straight pieces between cells.
    assert (np.abs(found - stated) < 0.01).all(), found


@pytest.mark.parametrize("kind", DRAWS)
def test_a_corner_plot_shows_the_samples_and_their_intervals(kind):
    samples, figure = corner_of(kind)
    panel, deviations = figure.axes[2], samples.std(axis=0)
    limits = np.array([panel.get_xlim(), panel.get_ylim()])
    assert (limits[:, 0] >= PRIORS.low).all() and (limits[:, 1] <= PRIORS.high).all()
    within = (samples > limits[:, 0]) & (samples < limits[:, 1])
    assert (within.mean(axis=0) > 0.995).all(), "the axes cut off no more than far tails"
    assert (np.diff(limits)[:, 0] < 10 * deviations).all(), "the axes show the samples"
    for axes, values in zip((figure.axes[0], figure.axes[3]), samples.T, strict=True):
        (curve,) = (line for line in axes.lines if len(line.get_xdata()) > 2)
        x, density = curve.get_data()
        share = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x)))
        share = np.interp(np.sort(values), x, share / share[-1])
        apart = np.abs(share - (np.arange(SAMPLES) + 0.5) / SAMPLES).max()
        assert apart < kstwo.ppf(0.997, SAMPLES) + DENSITY_ERROR, "the curve is the density"
        assert density.max() < axes.get_ylim()[1]
        (span,) = axes.patches
        low, high = span.get_x(), span.get_x() + span.get_width()
        below, above = (values < low).mean(), (values > high).mean()
        assert abs(below - 0.1585) < 2 / SAMPLES and abs(above - 0.1585) < 2 / SAMPLES
        (middle,) = (line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":")
        title = axes.get_title()
        digits = len(title.partition("= ")[2].partition("$")[0].partition(".")[2])
        assert f"= {middle:.{digits}f}$^{{+{high - middle:.{digits}f}}}" in title
        assert np.median(values) == middle and 10.0**-digits < high - low


def test_a_truth_outside_of_the_samples_is_visible():
    (samples, alone), truth = corner_of("a deviation of 0.006"), np.array([0.31, 0.99])
    figure = corner_figure(samples, PRIORS, truth=truth)
    first, _, panel, second = figure.axes
    assert all(low < x < high for x, (low, high) in zip(truth, limits_of(panel), strict=True))
    assert limits_of(panel)[0] == limits_of(alone.axes[2])[0], "it was visible before"
    lines = [np.array(line.get_data()) for line in panel.lines]
    assert {*lines[0][0]} == {0.31} and {*lines[1][1]} == {0.99}
    for axes, value in ((first, 0.31), (second, 0.99)):
        assert any({*line.get_xdata()} == {value} for line in axes.lines)


def limits_of(axes):
    return axes.get_xlim(), axes.get_ylim()


def test_nothing_is_reported_of_a_flat_density(capfd, caplog):
    corner_figure(within_priors(DRAWS["the prior"])[:500], PRIORS)
    assert not capfd.readouterr().out and not caplog.records


def test_samples_without_a_density_are_drawn_as_points(tmp_path, caplog):
    samples = within_priors(DRAWS["at an edge"])
    samples[:, 1] = 0.7
    for some in (samples, samples[:2] + [[0, 0], [0, 0.01]]):
        figure = corner_figure(some, PRIORS)
        (points,) = figure.axes[2].lines
        np.testing.assert_array_equal(points.get_xydata(), some)
        save_figure(figure, tmp_path / "corner.png")
    assert not caplog.records and logging.root.isEnabledFor(logging.WARNING)
