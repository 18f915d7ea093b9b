"""Differences between two methods on the same samples, with the error of the difference.

Errors of two methods on the same volumes are alike, because the same volumes are hard. The error of
their difference is then much smaller than those of their scores suggest: every resample draws the
same volumes for both, those of a universe together (paired bootstrap, Efron and Tibshirani 1993).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowpm_dist.cosmoflow.scores.judging import (
    Predictions,
    resampled_scores,
    resamples,
    universes,
)


@dataclass(frozen=True)
class Difference:
    """How much better one method predicts a parameter than another on the same samples.

    Attributes:
        r2: R^2 of the first minus that of the second.
        rmse: RMSE of the second minus that of the first, so that it is positive as well where the
            first is better [unit of the parameter].
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
            f"{parameter}: R² of {first} minus that of {second}: {self.r2:+.3f} ± "
            f"{self.r2_error:.3f}; smaller RMSE in {100 * self.better:.0f} % of the resamples."
        )


def difference(first: Predictions, second: Predictions, seed: int = 0) -> dict[str, Difference]:
    """Returns the difference of two methods for each parameter, by name.

    Args:
        first, second: predictions for the same samples in the same order.
        seed: the seed of the bootstrap. With that of `score`, the resamples are the same.

    Raises:
        ValueError: if the parameters differ, or the truth by more than float32 rounds it.
    """
    if first.names != second.names or not _same(first, second):
        raise ValueError("only predictions for the same samples can be compared in pairs")
    found, groups = {}, universes(first.truth)
    for i, name in enumerate(first.names):
        scores = [resampled_scores(method, i, seed, groups) for method in (first, second)]
        (rmse, r2), (other_rmse, other_r2) = (whole for whole, _ in scores)
        (rmses, r2s), (other_rmses, other_r2s) = (resampled for _, resampled in scores)
        found[name] = Difference(
            r2=float(r2 - other_r2),
            r2_error=float(np.nanstd(r2s - other_r2s)),
            rmse=float(other_rmse - rmse),
            rmse_error=float(np.std(other_rmses - rmses)),
            better=float(np.mean(rmses < other_rmses)),
        )
    return found


@dataclass(frozen=True)
class MeanDifference:
    """How much larger the mean of one method's numbers is than that of another's.

    Attributes:
        value, error: the difference of the means, and one standard error by the paired bootstrap.
        larger: the share of the resamples in which the first is larger.
    """

    value: float
    error: float
    larger: float


def mean_difference(
    first: np.ndarray, second: np.ndarray, groups: np.ndarray, seed: int = 0
) -> MeanDifference:
    """Returns the difference of the means of numbers of the same samples.

    Args:
        first, second: [n].
        groups: of the samples, which are drawn together, see `universes`.
        seed: of the bootstrap.
    """
    difference = first - second
    weights = resamples(groups, np.random.default_rng(seed))
    means = weights @ difference / weights.sum(axis=1)
    return MeanDifference(float(difference.mean()), float(means.std()), float((means > 0).mean()))


def _same(first: Predictions, second: Predictions) -> bool:
    same_shape = first.truth.shape == second.truth.shape
    return same_shape and np.allclose(first.truth, second.truth, rtol=1e-6, atol=1e-9)


Differences = Mapping[str, Mapping[str, Difference]]
"""[other method][parameter]."""


def differences_from(main: str, predictions: Mapping[str, Predictions]) -> Differences:
    """Returns the differences of one method from the others, by their names.

    Args:
        main: name of the method.
        predictions: of all methods; those for other samples are left out.
    """
    first = predictions[main]
    others = {name: p for name, p in predictions.items() if name != main and _same(first, p)}
    return {name: difference(first, p) for name, p in others.items()}


def markdown_of_differences(main: str, differences: Differences) -> str:
    """Returns a table in Markdown: the first method less each of the others."""
    heading = f"{main} beside"
    rows = [
        ["parameter", heading, "R² higher by", "RMSE lower by", "smaller RMSE in"],
        ["---", "---", "---:", "---:", "---:"],
    ]
    names = dict.fromkeys(name for of_method in differences.values() for name in of_method)
    for name in names:
        for method, of_method in differences.items():
            d = of_method[name]
            gain, gain_error = f"{d.r2:z.3f}", f"{d.r2_error:.3f}"
            cells = [f"{gain}±{gain_error}", f"{d.rmse:.2g}±{d.rmse_error:.1g}"]
            rows.append([name, method, *cells, f"{100 * d.better:.0f} %"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def as_numbers(differences: Differences) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the differences as plain numbers, for JSON: [other method][parameter][attribute]."""
    return {
        method: {name: dataclasses.asdict(found) for name, found in of_method.items()}
        for method, of_method in differences.items()
    }
