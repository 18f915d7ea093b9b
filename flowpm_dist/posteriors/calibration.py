"""Tests of posteriors: their samples and densities compared with the truth.

Samples of equal truth, such as the parts of one simulation, form a group and are not independent.
The number of groups determines errors and bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.options import keep_in_units

LEVELS = (0.683, 0.954)
"""Probabilities of the central intervals whose coverage is measured."""
TOGETHER = "all parameters together"
"""What tables call the mean of the coverage over all parameters."""


@dataclass(frozen=True)
class Answers:
    """The posteriors of n data sets whose truth is known.

    Attributes:
        priors: priors of the p parameters.
        truth: true parameters, [n, p] [physical units].
        samples: samples of each posterior, [n, sample, p] [physical units].
        gain: ln(q / prior) at the truth, [n].
    """

    priors: UniformPriors
    truth: np.ndarray
    samples: np.ndarray
    gain: np.ndarray

    def __post_init__(self) -> None:
        keep_in_units(self, truth="", samples="", gain="")

    @property
    def mean(self) -> np.ndarray:
        """The posterior means, [n, p]."""
        return self.samples.mean(axis=1)


def mixed(answers: Sequence[Answers]) -> Answers:
    """Returns the answers of the mean of several densities, for the same data sets in one order."""
    first, count = answers[0], len(answers)
    stacked = np.stack([answer.samples for answer in answers], axis=2)
    samples = stacked.reshape(len(first.truth), -1, stacked.shape[-1])
    gain = np.logaddexp.reduce([answer.gain for answer in answers], axis=0) - math.log(count)
    return Answers(first.priors, first.truth, samples, gain)


@dataclass(frozen=True)
class Calibration:
    """Scores of posteriors, and tests of whether they are right.

    Attributes:
        names: names of the p parameters.
        count, groups: number of data sets, and number of independent ones.
        gain, gain_error: the mean of ln(q / prior) at the truth [nats], and one standard error.
        rmse: root mean square error of the posterior means, [p] [unit of the parameter].
        width: the mean of the posterior standard deviations, [p].
        coverage: share of the truths within the central interval of each of `LEVELS`,
            [level, p + 1]. The last column is the mean over all parameters.
        coverage_error: one standard error of the coverage of right posteriors, [level, p + 1].
        coverage_p: P-values of the test that the coverage is right, [level, p + 1]: binomial for a
            parameter, normal for the mean over all.
        ranks: share of the samples below the truth, see `shares_below`, [n, p]: uniform if the
            posteriors are right (Talts and others, arXiv:1804.06788).
        ranks_p: P-values of the test that the ranks are uniform, [p].
        tarp: the share of the samples that are nearer to a random point than the truth, [n]:
            uniform as well (Lemos and others, arXiv:2302.03026).
        tarp_p: P-value of the test that these are uniform.
    """

    names: tuple[str, ...]
    count: int
    groups: int
    gain: float
    gain_error: float
    rmse: np.ndarray
    width: np.ndarray
    coverage: np.ndarray
    coverage_error: np.ndarray
    coverage_p: np.ndarray
    ranks: np.ndarray
    ranks_p: np.ndarray
    tarp: np.ndarray
    tarp_p: float

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of the columns of the coverage: each parameter, and all together."""
        return (*self.names, TOGETHER)

    @property
    def tests(self) -> int:
        """The number of P-values."""
        return self.ranks_p.size + self.coverage_p.size + 1

    def too_wide(self, level: int, column: int) -> float:
        """Returns by which share intervals are too wide for their coverage; negative: too narrow.

        Right posteriors that are Gaussians, all widened by this share, would have the coverage
        that was found.

        Args:
            level: number of the level in `LEVELS`.
            column: number of the column of `coverage`.
        """
        half = 0.5 / self.groups  # of a truth, where all or none are covered
        share = np.clip(self.coverage[level, column], half, 1 - half)
        quantile = NormalDist().inv_cdf
        return quantile((1 + float(share)) / 2) / quantile((1 + LEVELS[level]) / 2) - 1

    def as_dict(self) -> dict[str, object]:
        """Returns the numbers for JSON; numbers of a parameter are keyed by its name."""
        by_name = {"rmse": self.rmse, "width": self.width, "ranks_p": self.ranks_p}
        rows = self.coverage, self.coverage_error, self.coverage_p
        for level, *shares in zip(LEVELS, *rows, strict=True):
            endings = ("", "_error", "_p")
            by_name |= {f"coverage_{level}{e}": v for e, v in zip(endings, shares, strict=True)}
        of_each = {
            key: dict(zip(self.columns, v.tolist(), strict=False)) for key, v in by_name.items()
        }
        keys = ("count", "groups", "gain", "gain_error", "tarp_p")
        return {key: getattr(self, key) for key in keys} | of_each


def calibration_of(answers: Answers, groups: np.ndarray, seed: int = 0) -> Calibration:
    """Returns the calibration of posteriors.

    Args:
        answers: answers of the posteriors for data that nothing was fitted to.
        groups: number of the group of each data set, [n], from 0 without gaps.
        seed: seed of the random part of the ranks, and of TARP's points.
    """
    rng, truth, samples = np.random.default_rng(seed), answers.truth, answers.samples
    count, independent = len(truth), int(groups.max()) + 1
    ranks = shares_below(samples, truth[:, np.newaxis], rng)
    # Distances are in units of the prior's width.
    low, width = answers.priors.low, answers.priors.high - answers.priors.low
    points = rng.random(truth.shape)
    near, far = (
        np.sum(((values - low) / width - points[:, np.newaxis]) ** 2, axis=-1)
        for values in (truth[:, np.newaxis], samples)
    )
    tarp = shares_below(far[..., np.newaxis], near[..., np.newaxis], rng)[:, 0]
    coverage, coverage_error, coverage_p = (
        np.array(rows) for rows in zip(*(_coverage(ranks, groups, x) for x in LEVELS), strict=True)
    )
    return Calibration(
        names=answers.priors.names,
        count=count,
        groups=independent,
        gain=float(answers.gain.mean()),
        gain_error=error_of_mean(answers.gain, groups),
        rmse=np.sqrt(np.mean((answers.mean - truth) ** 2, axis=0)),
        width=answers.samples.std(axis=1).mean(axis=0),
        coverage=coverage,
        coverage_error=coverage_error,
        coverage_p=coverage_p,
        ranks=ranks,
        ranks_p=np.array([uniform_p(column, independent) for column in ranks.T]),
        tarp=tarp,
        tarp_p=uniform_p(tarp, independent),
    )


def _coverage(
    ranks: np.ndarray, groups: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the coverage of the central intervals of a level, its error and P, [p + 1] each.

    A width that is wrong by 15 % changes the ranks of many truths only a little, and the test of
    the ranks hardly detects it. With 512 data sets it changes the coverage by 3 standard errors,
    and the mean over all parameters by more.

    Args:
        ranks: [n, p], see `Calibration`.
        groups: number of the group of each data set, [n].
        level: probability of the interval.
    """
    from scipy.stats import binomtest, norm  # takes long to import

    inside, independent = np.abs(2 * ranks - 1) <= level, int(groups.max()) + 1
    shares, all_together = inside.mean(axis=0), inside.mean(axis=1)
    # A group counts as one trial, which succeeds in the share of its data sets that are inside.
    p = [binomtest(round(s * independent), independent, level).pvalue for s in shares]
    alone = math.sqrt(level * (1 - level) / independent)
    # Parameters are covered together more often than independent ones, or less often.
    error = max(error_of_mean(all_together, groups), alone / math.sqrt(len(shares)))
    together = float(all_together.mean())
    p.append(2 * float(norm.sf(abs(together - level) / error)))
    errors = np.array([alone] * len(shares) + [error])
    return np.append(shares, together), errors, np.array(p)


def shares_below(samples: np.ndarray, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the share of the samples [n, sample, p] below the truth [n, 1, p], [n, p].

    A random part of one sample's share is added. The result is continuous, and exactly uniform if
    the truth and the samples are draws from one distribution.
    """
    ranks = np.sum(samples < truth, axis=1)
    return (ranks + rng.random(ranks.shape)) / (samples.shape[1] + 1)


def uniform_p(values: np.ndarray, independent: int) -> float:
    """Returns the p-value of the Kolmogorov-Smirnov test of values [n] that should be uniform.

    Args:
        values: from 0 to 1.
        independent: how many of them are independent.
    """
    from scipy.stats import kstwo  # takes most of a second, which help pages need not

    ordered, count = np.sort(values), len(values)
    steps = np.arange(count + 1) / count
    largest = max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1]))
    return float(kstwo.sf(largest, independent))


def band(independent: int) -> float:
    """Returns the half width of the 95 % band around the diagonal, for a number of values.

    If the values are uniform, their whole curve lies in the band with a probability of 95 %
    (Kolmogorov-Smirnov).
    """
    from scipy.stats import kstwo

    return float(kstwo.ppf(0.95, independent))


def error_of_mean(values: np.ndarray, groups: np.ndarray) -> float:
    """Returns the standard error of the mean of values [n], from the sums over groups [n]."""
    sums = np.bincount(groups, weights=values - values.mean())
    count = len(sums)
    return float(math.sqrt((sums**2).sum() * count / max(1, count - 1)) / len(values))
