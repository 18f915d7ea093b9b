"""Scores of predicted parameters, compared with predicting the mean of the training set.

Samples of equal truth, such as the parts of one simulation, are not independent: the errors of
scores are those of as many samples as there are different truths.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flowpm_dist.posteriors.calibration import error_of_mean

RESAMPLES = 400
NARROW = 0.1
NO_BETTER = 0.05

Cell = str | int | float | None


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
class Score:
    """The scores of the predictions of one parameter, in its own units unless stated otherwise.

    Errors are predicted - true. An attribute named ..._error is one standard error of the
    attribute before it. That of the bias comes from the spread of the errors, the others from a
    bootstrap.

    Attributes:
        count: the number of samples.
        rmse: the root of the mean squared error.
        r2: 1 - (sum of squared errors) / (sum of squares of the truth about its mean). 1 is
            perfect; 0 is the mean; below 0 is worse than the mean.
        bias: the mean error.
        mae: the mean absolute error.
        mae_over_mean, rmse_over_mean: the ratio to the score of the mean of the training targets.
        spread: the standard deviation of the predictions over that of the truth.
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


def score(predictions: Predictions, train_mean: np.ndarray, seed: int = 0) -> dict[str, Score]:
    """Returns the score of each parameter, by name.

    Args:
        predictions: predictions for samples that the method was not fitted to in any way.
        train_mean: the mean of the training targets, [p]: the prediction of the mean predictor.
        seed: the seed of the bootstrap.

    Raises:
        ValueError: if `train_mean` has another length, or a parameter is the same in all samples.
    """
    train_mean = np.asarray(train_mean, dtype=np.float64)
    if train_mean.shape != (len(predictions.names),):
        raise ValueError(
            f"train_mean has shape {train_mean.shape}; must be one number for each of "
            f"{', '.join(predictions.names)}"
        )
    return {
        name: _score(predictions, i, float(train_mean[i]), seed)
        for i, name in enumerate(predictions.names)
    }


def _score(predictions: Predictions, place: int, train_mean: float, seed: int) -> Score:
    truth, mean = predictions.truth[:, place], predictions.mean[:, place]
    sigma = None if predictions.sigma is None else predictions.sigma[:, place]
    if np.ptp(truth) == 0:
        name = predictions.names[place]
        raise ValueError(f"{name} is {truth[0]:g} in all samples: it must vary to be judged")
    error, naive = mean - truth, train_mean - truth
    groups = universes(predictions.truth)
    (rmse, r2), resampled = resampled_scores(predictions, place, seed, groups)
    rmse_error, r2_error = (float(np.nanstd(values)) for values in resampled)
    bars = {}
    if sigma is not None:
        pull = error / sigma
        bars = {
            "coverage_1": float((np.abs(pull) <= 1).mean()),
            "coverage_2": float((np.abs(pull) <= 2).mean()),
            "chi2": float((pull**2).mean()),
            "mean_sigma": float(sigma.mean()),
            "nll": float((pull**2 / 2 + np.log(sigma)).mean() + math.log(2 * math.pi) / 2),
        }
    return Score(
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


def resampled_scores(
    predictions: Predictions, place: int, seed: int, groups: np.ndarray
) -> tuple[tuple[float, float], tuple[np.ndarray, np.ndarray]]:
    """Returns RMSE and R^2 of a parameter, of the samples and of bootstrap resamples of them.

    Args:
        predictions: for the samples.
        place: of the parameter.
        seed: of the resamples, which are the same for all methods.
        groups: of the samples, which are drawn together, see `universes`.

    Returns:
        (RMSE, R^2), and the same [resample] each.
    """
    truth = predictions.truth[:, place]
    error = predictions.mean[:, place] - truth
    rmse, r2 = _rmse_and_r2(np.ones((1, len(truth))), truth, error)
    weights = resamples(groups, np.random.default_rng([seed, place]))
    return (float(rmse[0]), float(r2[0])), _rmse_and_r2(weights, truth, error)


def universes(truth: np.ndarray) -> np.ndarray:
    """Returns the number of the universe of each sample: those of equal truth [n, p] share one.

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


def collapsed(predictions: Predictions, train_mean: np.ndarray) -> list[str]:
    """Returns the names of the parameters that are predicted no better than by their mean.

    These are the parameters whose predictions spread less than `NARROW` = 10 % of the truth, and
    those whose R^2 does not exceed `NO_BETTER` = 0.05 by more than its standard error. The
    predictions of an optimal regressor that explains a share R^2 of the variance spread by
    sqrt(R^2): 10 % corresponds to R^2 = 0.01.
    """
    scores = score(predictions, train_mean)
    return [name for name, found in scores.items() if _is_collapsed(found)]


def _is_narrow(found: Score) -> bool:
    return found.spread < NARROW


def _is_collapsed(found: Score) -> bool:
    return _is_narrow(found) or found.r2 - found.r2_error <= NO_BETTER


def describe_collapse(predictions: Predictions, train_mean: np.ndarray) -> str:
    """Returns a sentence on the parameters that `collapsed` names.

    A parameter that leaves no trace in the volumes is predicted near its mean by an optimal
    regressor, too. So the network is said to have collapsed only if all parameters are.
    """
    scores = score(predictions, train_mean)
    found = {name: value for name, value in scores.items() if _is_collapsed(value)}
    details = ", ".join(
        f"{name} (R^2 = {value.r2:z.2f} ± {value.r2_error:.2f}, "
        f"spread {100 * value.spread:.0f} % of the truth's)"
        for name, value in found.items()
    )
    if not found:
        return "All parameters are predicted better than by the mean predictor."
    if len(found) < len(scores):
        return f"No better than the mean predictor: {details}. The others are better."
    if all(_is_narrow(value) for value in found.values()):
        return f"All parameters: the network has collapsed to the mean: {details}."
    return f"No parameter is predicted better than by the mean predictor: {details}."


def table(scores: Mapping[str, Scores]) -> list[dict[str, Cell]]:
    """Returns one row for each parameter and method, with the methods of a parameter together.

    Args:
        scores: the scores by method and parameter.

    Returns:
        Rows with the keys "parameter", "method" and the attributes of `Score`.
    """
    names = dict.fromkeys(name for of_method in scores.values() for name in of_method)
    return [
        {"parameter": name, "method": method, **dataclasses.asdict(of_method[name])}
        for name in names
        for method, of_method in scores.items()
        if name in of_method
    ]


def as_dict(scores: Mapping[str, Scores]) -> dict[str, dict[str, dict[str, Cell]]]:
    """Returns the scores as plain numbers, for JSON: [method][parameter][attribute]."""
    return {
        method: {name: dataclasses.asdict(value) for name, value in of_method.items()}
        for method, of_method in scores.items()
    }


HEADINGS = {
    "parameter": "parameter",
    "method": "method",
    "rmse": "RMSE",
    "rmse_over_mean": "RMSE / mean's",
    "mae_over_mean": "MAE / mean's",
    "r2": "R²",
    "bias": "bias",
    "coverage_1": "in 1σ",
    "coverage_2": "in 2σ",
    "chi2": "χ²/n",
}
IN_TERMINAL = ("parameter", "method", "rmse", "rmse_over_mean", "r2", "bias")


def _text(row: Mapping[str, Cell], key: str) -> str:
    """Returns the text of a cell, with its standard error if the row has one."""
    value, error = row[key], row.get(f"{key}_error")
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if not isinstance(error, float):
        return f"{value:.3f}"
    if not 0 < error < math.inf:
        return f"{value:.3g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:z.{places}f}±{error:.{places}f}"


def markdown(scores: Mapping[str, Scores]) -> str:
    """Returns the table in Markdown.

    "mean's" in its headings is the score of the mean of the training targets.
    """
    rows = [
        list(HEADINGS.values()),
        ["---", "---", *["---:"] * (len(HEADINGS) - 2)],
        *([_text(row, key) for key in HEADINGS] for row in table(scores)),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


FEWEST = 4
"""Columns that are shown however narrow the terminal is."""


def rich_table(scores: Mapping[str, Scores], width: int) -> Table:
    """Returns as many of the columns `IN_TERMINAL` as fit into a terminal.

    A line separates the parameters. Names of methods are wrapped only where `FEWEST` columns are
    too wide.

    Args:
        scores: of each method.
        width: of the terminal [characters].
    """
    for count in range(len(IN_TERMINAL), FEWEST - 1, -1):
        drawn = _rich_table(scores, IN_TERMINAL[:count])
        if Console(width=10 * width).measure(drawn).maximum <= width:
            break
    return drawn


def _rich_table(scores: Mapping[str, Scores], keys: Sequence[str]) -> Table:
    drawn = Table(box=SIMPLE)
    for key in keys:
        is_text = key in ("parameter", "method")
        drawn.add_column(
            HEADINGS[key].replace(" / ", " /\n"),
            justify="left" if is_text else "right",
            no_wrap=key != "method",
        )
    before = None
    for row in table(scores):
        if before not in (None, row["parameter"]):
            drawn.add_section()
        drawn.add_row(*(_text(row, key) for key in keys))
        before = row["parameter"]
    return drawn


def write_csv(scores: Mapping[str, Scores], path: Path) -> None:
    """Writes all numbers of the table, unrounded, as comma-separated values.

    A cell without a value is empty.
    """
    columns = ["parameter", "method", *(field.name for field in dataclasses.fields(Score))]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table(scores))


@dataclass(frozen=True)
class LearningCurve:
    """The error of a method against the number of simulations it was trained on.

    Attributes:
        sizes: the numbers of simulations, [s].
        errors: the RMSE over that of the mean predictor, by parameter, [s] or [s, seeds]; NaN where
            there is no result.
    """

    sizes: np.ndarray
    errors: Mapping[str, np.ndarray]
