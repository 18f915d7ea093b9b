"""Statistics that are compressed to predictions of the parameters before a head is fitted."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from flowpm_dist.cosmoflow.evaluation.posterior_fits import compressed_sets
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.posteriors.compression import FEWEST, compressed
from flowpm_dist.posteriors.heads import Summaries, bounded, fit_posterior, unbounded
from tests.posteriors.test_posteriors import PRIORS, QUICK

COUNT, FEATURES = 500, 50
SLOPES = np.array([[1.5], [3.0], [0.75]]) / np.sqrt(FEATURES)
SLOPES = SLOPES * np.random.default_rng(0).standard_normal((3, FEATURES))
COVARIANCE = np.linalg.inv(np.eye(3) + SLOPES @ SLOPES.T)


def drawn(count: int, seed: int) -> Summaries:
    """Many features, each of which tells a little: z SLOPES + unit noise."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((count, 3))
    return Summaries(z @ SLOPES + rng.standard_normal((count, FEATURES)), bounded(PRIORS, z))


def few(sets: list[Summaries]) -> list[Summaries]:
    found = compressed(PRIORS, sets[0], [one.features for one in sets[1:]])
    return [Summaries(x, one.truth) for x, one in zip(found, sets, strict=True)]


def sufficient(sets: list[Summaries]) -> list[Summaries]:
    """The exact mean, and as many numbers again that tell nothing."""
    noise = np.random.default_rng(9)
    means = [one.features @ SLOPES.T @ COVARIANCE for one in sets]
    return [
        Summaries(np.concatenate([mean, noise.standard_normal(mean.shape)], 1), one.truth)
        for mean, one in zip(means, sets, strict=True)
    ]


@pytest.mark.long
def test_what_many_features_cost_and_that_compressing_them_does_not_cost_more():
    """k slopes of each of p parameters, from n data sets, cost p k / 2n, compressed or not."""
    sets = [drawn(COUNT, 1), drawn(200, 2), drawn(2000, 3)]
    test = sets[2]
    z, mean = unbounded(PRIORS, test.truth), test.features @ SLOPES.T @ COVARIANCE
    exact = multivariate_normal(np.zeros(3), COVARIANCE).logpdf(z - mean)
    exact -= norm.logpdf(z).sum(axis=1)
    lost = {}
    kinds = {"raw": sets, "compressed": few(sets), "six": sufficient(sets)}
    for kind, (train, validation, requested) in kinds.items():
        posterior = fit_posterior("gaussian", PRIORS, train, validation, QUICK)
        lost[kind] = exact - posterior.gain(requested.truth, requested.features)
    assert np.mean(lost["six"]) < 0.05
    price = 3 * (FEATURES - 6) / (2 * COUNT)
    above = lost["raw"] - lost["six"]
    assert np.mean(above) == pytest.approx(price, abs=0.35 * price + 3 * error(above))
    better = lost["raw"] - lost["compressed"]
    assert np.mean(better) > -3 * error(better) - 0.01


def error(values: np.ndarray) -> float:
    return float(values.std() / np.sqrt(len(values)))


def test_the_training_set_is_compressed_as_other_data_are():
    """Regressions see their own data better than others: 1 - k / n against 1 + k / n.

    With two parts of each universe, of which one would give the other away.
    """
    train, test = drawn(300, 1), drawn(2000, 3)
    again = Summaries(np.repeat(train.features, 2, 0), np.repeat(train.truth, 2, 0))
    found = compressed(PRIORS, again, [test.features])
    residuals = [
        np.mean((unbounded(PRIORS, one.truth) - x[:, :3]) ** 2) / np.trace(COVARIANCE / 3)
        for x, one in zip(found, (again, test), strict=True)
    ]
    # The mean of 900 squares; and test data have the mean of eight regressions.
    assert residuals[0] / residuals[1] == pytest.approx(1, abs=3 * np.sqrt(2 / 900) + 0.03)
    assert residuals[1] > 1.03, "in-sample the ratio would be about 5 / 7"


def test_the_perceptron_sees_what_no_regression_does():
    """The parameter is the product of two features."""
    one = UniformPriors({"sigma8": (0.6, 1.0)})
    rng = np.random.default_rng(0)
    z, sign = rng.standard_normal((400, 1)), rng.choice([-1.0, 1.0], (400, 1))
    data = Summaries(np.concatenate([sign, sign * z], axis=1), bounded(one, z))
    of_train, of_others = compressed(one, data, [data.features[:50]])
    assert of_train.shape == (400, 2) and of_others.shape == (50, 2)
    assert np.mean((z[:, 0] - of_train[:, 0]) ** 2) > 0.9
    assert np.mean((z[:, 0] - of_train.sum(axis=1)) ** 2) < 0.2
    again, _ = compressed(one, data, [data.features[:50]])
    np.testing.assert_array_equal(again, of_train)


def test_few_universes_are_not_compressed():
    enough, small = drawn(FEWEST, 1), drawn(FEWEST - 1, 1)
    assert compressed_sets(PRIORS, (small, small, small)) == (small, small, small)
    found = compressed_sets(PRIORS, (enough, small, small))
    assert [one.features.shape for one in found] == [(FEWEST, 6), *2 * [(127, 6)]]
    np.testing.assert_array_equal(found[0].truth, enough.truth)
    with pytest.raises(ValueError, match="127 data sets cannot be compressed: at least 128"):
        compressed(PRIORS, small, [])
