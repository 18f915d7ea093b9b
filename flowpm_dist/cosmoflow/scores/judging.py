"""Scores of predicted parameters, relative to the mean of the training set and in pairs.

Samples of equal truth, such as the parts of one simulation, are not independent. So the errors of
scores count them as one sample.

The errors of two methods are correlated, because the same volumes are hard for both. The error of
their difference is then much smaller than the errors of their scores suggest. So every resample
draws the same universes for both methods, each with all its volumes (paired bootstrap, Efron and
Tibshirani 1993).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowpm_dist.posteriors.calibration import error_of_mean

RESAMPLES = 400
NARROW = 0.1
NO_BETTER = 0.05


@dataclass(frozen=True)
class Predictions:
    """A method's predictions for n samples, and the truth, in physical units, kept as float64.

    Attributes:
        names: the names of the p parameters.
        truth, mean: the true and the predicted values, [n, p].
        sigma: the predicted standard deviations, [n, p]; None for a method without error bars.

    Raises:
        ValueError: if shapes disagree, there are fewer than two samples, a value is not finite, or
            a sigma is not positive.
    """

    names: tuple[str, ...]
    truth: np.ndarray
    mean: np.ndarray
    sigma: np.ndarray | None = None

    def __post_init__(self) -> None:
        for field in ("truth", "mean", "sigma"):
            if getattr(self, field) is not None:
                values = np.asarray(getattr(self, field), dtype=np.float64)
                object.__setattr__(self, field, values)
                self._check(field, values)
        if self.sigma is not None and not (self.sigma > 0).all():
            raise ValueError(f"{(self.sigma <= 0).sum()} values of sigma are not positive")

    def _check(self, field: str, values: np.ndarray) -> None:
        wanted = (len(self.truth), len(self.names))
        if values.shape != wanted:
            raise ValueError(f"{field} has shape {values.shape}; must be [n, p] = {wanted}")
        if len(values) < 2:
            raise ValueError("one sample cannot be judged: at least two are needed")
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            raise ValueError(f"{field} is not finite in {bad.sum()} of {len(values)} samples")


@dataclass(frozen=True)
class Features:
    """Summary statistics of n volumes, and their true parameters.

    Attributes:
        names: names of the p parameters.
        log_power: log10 of P(k) [(Mpc/h)^3], or of C_l of maps [sr], [n, bins].
        histogram: histogram of the density, or of the convergence, [n, bins].
        truth: [n, p], physical units.

    Raises:
        ValueError: shapes that disagree, no samples, or values that are not finite.
    """

    names: tuple[str, ...]
    log_power: np.ndarray
    histogram: np.ndarray
    truth: np.ndarray

    def __post_init__(self) -> None:
        for field in ("log_power", "histogram", "truth"):
            values = getattr(self, field)
            if values.ndim != 2 or len(values) != len(self.truth) or not len(values):
                raise ValueError(
                    f"{field} has shape {values.shape}; must have two axes, the first of "
                    f"{max(len(self.truth), 1)} samples as truth has"
                )
            if not np.isfinite(values).all():
                raise ValueError(f"{field} has values that are not finite")
        if self.truth.shape[1] != len(self.names):
            raise ValueError(f"truth has shape {self.truth.shape} for {len(self.names)} parameters")

    def first(self, count: int) -> Features:
        """Returns the first `count` samples."""
        parts = self.log_power, self.histogram, self.truth
        return Features(self.names, *(values[:count] for values in parts))


@dataclass(frozen=True)
class Score:
    """The scores of the predictions of one parameter, in its own units unless stated otherwise.

    Errors are predicted - true. An attribute named ..._error is one standard error of the
    attribute before it. The error of the bias comes from the spread of the errors, the others from
    a bootstrap.

    Attributes:
        count: the number of samples.
        rmse: the root of the mean squared error.
        r2: 1 - (sum of squared errors) / (sum of squares of the truth about its mean). 1 is
            perfect; 0 is the mean; below 0 is worse than the mean.
        bias: the mean error.
        mae: the mean absolute error.
        mae_over_mean, rmse_over_mean: the ratio to the score of the mean of the training targets.
        spread: the standard deviation of the predictions divided by the truth's.
        coverage_1, coverage_2: the share of errors within 1 and 2 sigma; 0.683 and 0.954 for a
            Gaussian.
        chi2: the reduced chi^2, the mean of (error / sigma)^2.
        mean_sigma: the mean of the predicted sigma.
        nll: the mean of -ln of the predicted Gaussian density at the truth. This and the four
            before it are None without error bars.
    """

    count: int
    rmse: float
    rmse_error: float
    r2: float
    r2_error: float
    bias: float
    bias_error: float
    mae: float
    mae_over_mean: float
    rmse_over_mean: float
    spread: float
    coverage_1: float | None = None
    coverage_2: float | None = None
    chi2: float | None = None
    mean_sigma: float | None = None
    nll: float | None = None


Scores = Mapping[str, Score]


def score(predictions: Predictions, train_mean: np.ndarray) -> dict[str, Score]:
    """Returns the score of each parameter, by name.

    Args:
        predictions: predictions for samples that the method was not fitted to in any way.
        train_mean: the mean of the training targets, [p]: the prediction of the mean predictor.

    Raises:
        ValueError: if a parameter is the same in all samples.
    """
    groups, scores = universes(predictions.truth), {}
    for place, name in enumerate(predictions.names):
        truth, mean = predictions.truth[:, place], predictions.mean[:, place]
        if np.ptp(truth) == 0:
            raise ValueError(f"{name} is {truth[0]:g} in all samples: it must vary to be judged")
        error, naive = mean - truth, float(train_mean[place]) - truth
        (rmse, r2), resampled = resampled_scores(predictions, place, groups)
        rmse_error, r2_error = (float(np.nanstd(values)) for values in resampled)
        bars = {}
        if predictions.sigma is not None:
            sigma = predictions.sigma[:, place]
            pull = error / sigma
            bars = {
                "coverage_1": float((np.abs(pull) <= 1).mean()),
                "coverage_2": float((np.abs(pull) <= 2).mean()),
                "chi2": float((pull**2).mean()),
                "mean_sigma": float(sigma.mean()),
                "nll": float((pull**2 / 2 + np.log(sigma)).mean() + math.log(2 * math.pi) / 2),
            }
        scores[name] = Score(
            count=len(truth),
            rmse=rmse,
            rmse_error=rmse_error,
            r2=r2,
            r2_error=r2_error,
            bias=float(error.mean()),
            bias_error=error_of_mean(error, groups),
            mae=float(np.abs(error).mean()),
            mae_over_mean=float(np.abs(error).mean() / np.abs(naive).mean()),
            rmse_over_mean=float(rmse / math.sqrt((naive**2).mean())),
            spread=float(mean.std() / truth.std()),
            **bars,
        )
    return scores


def resampled_scores(
    predictions: Predictions, place: int, groups: np.ndarray
) -> tuple[tuple[float, float], tuple[np.ndarray, np.ndarray]]:
    """Returns RMSE and R^2 of a parameter, for the samples and for bootstrap resamples.

    Args:
        predictions: predictions for the samples.
        place: number of the parameter.
        groups: group of each sample; groups are drawn as a whole, see `universes`. The resamples
            are the same for all methods.

    Returns:
        (RMSE, R^2) of the samples, and (RMSE, R^2) of the resamples, each [resample].
    """
    truth = predictions.truth[:, place]
    error = predictions.mean[:, place] - truth
    rmse, r2 = _rmse_and_r2(np.ones((1, len(truth))), truth, error)
    weights = resamples(groups, np.random.default_rng([0, place]))
    return (float(rmse[0]), float(r2[0])), _rmse_and_r2(weights, truth, error)


def universes(truth: np.ndarray) -> np.ndarray:
    """Returns the number of the universe of each sample; samples of equal truth [n, p] share one.

    Universes are numbered in the order of their first samples.
    """
    rows = truth.astype(np.float32)  # which is what files hold
    _, first, groups = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[groups.ravel()]


def resamples(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns how often each sample is drawn in each resampling of groups, [resample, sample]."""
    count = int(groups.max()) + 1
    draws = (rng.integers(count, size=count) for _ in range(RESAMPLES))
    return np.stack([np.bincount(drawn, minlength=count)[groups] for drawn in draws])


def _rmse_and_r2(
    weights: np.ndarray, truth: np.ndarray, error: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns RMSE and R^2 [resample] for each row of the weights [resample, sample].

    R^2 is NaN where all drawn truths are equal.
    """
    offset = truth - truth.mean()
    sums = weights @ np.stack([error**2, offset, offset**2], axis=1)
    squares, first, second = (sums / weights.sum(axis=1, keepdims=True)).T
    variance = second - first**2
    variance = np.where(variance > 1e-12 * offset.var(), variance, np.nan)
    return np.sqrt(squares), 1 - squares / variance


def describe_collapse(predictions: Predictions, train_mean: np.ndarray) -> str:
    """Returns a sentence on the parameters that are predicted no better than by their mean.

    Such predictions spread less than `NARROW` = 10 % of the truth, or their R^2 does not exceed
    `NO_BETTER` = 0.05 by more than its standard error. The predictions of an optimal regressor that
    explains a share R^2 of the variance spread by sqrt(R^2): 10 % corresponds to R^2 = 0.01. For a
    parameter that leaves no trace in the volumes, even an optimal regressor predicts values near
    the mean. So the network is said to have collapsed only if this holds for all parameters.
    """
    scores = score(predictions, train_mean)
    poor = {
        name: value
        for name, value in scores.items()
        if value.spread < NARROW or value.r2 - value.r2_error <= NO_BETTER
    }
    details = ", ".join(
        f"{name} (R^2 = {value.r2:z.2f} ± {value.r2_error:.2f}, "
        f"spread {100 * value.spread:.0f} % of the truth's)"
        for name, value in poor.items()
    )
    if not poor:
        return "All parameters are predicted better than by the mean predictor."
    if len(poor) < len(scores):
        return f"No better than the mean predictor: {details}. The others are better."
    if all(value.spread < NARROW for value in poor.values()):
        return f"All parameters: the network has collapsed to the mean: {details}."
    return f"No parameter is predicted better than by the mean predictor: {details}."


@dataclass(frozen=True)
class LearningCurve:
    """The error of a method as a function of the number of simulations it was trained on.

    Attributes:
        sizes: the numbers of simulations, [s].
        errors: by parameter, the RMSE divided by the mean predictor's RMSE, [s] or [s, seeds]; NaN
            if there is no result.
    """

    sizes: np.ndarray
    errors: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Difference:
    """How much better one method predicts a parameter than another on the same samples.

    Attributes:
        r2: the first method's R^2 minus the second's.
        rmse: the second method's RMSE minus the first's, which is also positive if the first
            method is better [unit of the parameter].
        r2_error, rmse_error: one standard error of each, by the paired bootstrap.
        better: the share of the resamples in which the first has the smaller RMSE.
    """

    r2: float
    r2_error: float
    rmse: float
    rmse_error: float
    better: float

    def sentence(self, parameter: str, first: str, second: str) -> str:
        """Returns the difference in words."""
        return (
            f"{parameter}: R² of {first} minus R² of {second}: {self.r2:+.3f} ± "
            f"{self.r2_error:.3f}; smaller RMSE in {100 * self.better:.0f} % of the resamples."
        )


def difference(first: Predictions, second: Predictions) -> dict[str, Difference]:
    """Returns the difference of two methods for each parameter, by name.

    Args:
        first, second: predictions for the same samples in the same order. The resamples are those
            of `score`.

    Raises:
        ValueError: the parameters differ, or the truth by more than the rounding of float32.
    """
    if first.names != second.names or not _same(first, second):
        raise ValueError("only predictions for the same samples can be compared in pairs")
    differences, groups = {}, universes(first.truth)
    for i, name in enumerate(first.names):
        scores = [resampled_scores(method, i, groups) for method in (first, second)]
        (rmse, r2), (other_rmse, other_r2) = (whole for whole, _ in scores)
        (rmses, r2s), (other_rmses, other_r2s) = (resampled for _, resampled in scores)
        differences[name] = Difference(
            r2=float(r2 - other_r2),
            r2_error=float(np.nanstd(r2s - other_r2s)),
            rmse=float(other_rmse - rmse),
            rmse_error=float(np.std(other_rmses - rmses)),
            better=float(np.mean(rmses < other_rmses)),
        )
    return differences


@dataclass(frozen=True)
class MeanDifference:
    """How much larger the mean of one method's numbers is than another's.

    Attributes:
        value, error: the difference of the means, and one standard error by the paired bootstrap.
        larger: the share of the resamples in which the first is larger.
    """

    value: float
    error: float
    larger: float


def mean_difference(first: np.ndarray, second: np.ndarray, groups: np.ndarray) -> MeanDifference:
    """Returns the difference of the means of numbers of the same samples.

    Args:
        first, second: [n].
        groups: group of each sample; groups are drawn as a whole, see `universes`.
    """
    difference = first - second
    weights = resamples(groups, np.random.default_rng(0))
    means = weights @ difference / weights.sum(axis=1)
    return MeanDifference(float(difference.mean()), float(means.std()), float((means > 0).mean()))


def _same(first: Predictions, second: Predictions) -> bool:
    same_shape = first.truth.shape == second.truth.shape
    return same_shape and np.allclose(first.truth, second.truth, rtol=1e-6, atol=1e-9)


Differences = Mapping[str, Mapping[str, Difference]]
"""[other method][parameter]."""


def differences_from(main: str, predictions: Mapping[str, Predictions]) -> Differences:
    """Returns the differences between one method and each of the others, by name.

    Args:
        main: name of the method.
        predictions: the predictions of all methods; methods for other samples are left out.
    """
    first = predictions[main]
    others = {name: p for name, p in predictions.items() if name != main and _same(first, p)}
    return {name: difference(first, p) for name, p in others.items()}
