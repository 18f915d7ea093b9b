"""Figures of a network: its predictions, its training, and the time of each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy.stats import norm

from flowpm_dist.cosmoflow.scores.judging import LearningCurve, Predictions, score
from flowpm_dist.io.figures import (
    COLOURS,
    MEASURED,
    MUTED,
    PLAIN_LEGEND,
    THEORY,
    new_figure,
    plain_log_ticks,
    style_axes,
    symbol,
)

LIGHTER = "#e3a0a9"
MOST_BARS = 60
"""At most so many samples, chosen at random, get an error bar."""


def _panels(count: int, height: float, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    """Returns a figure with one panel for each parameter, side by side."""
    figure = new_figure(3.5 * count + 0.6, height)
    panels = list(figure.subplots(1, count, squeeze=False, sharey=sharey)[0])
    for axes in panels:
        style_axes(axes)
    return figure, panels


def _legend_above(figure: Figure, panels: Sequence[Axes]) -> None:
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(3, len(panels))  # as many as the width of the figure holds
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, **PLAIN_LEGEND)


def predicted_figure(predictions: Mapping[str, Predictions], train_mean: np.ndarray) -> Figure:
    """Returns a figure of predicted against true values, with a panel for each parameter.

    Args:
        predictions: predictions for one test set by method, the network first. The other
            method with the best mean R^2 is drawn below the network, in a lighter colour.
        train_mean: the mean of the training targets, [p].
    """
    scores = {method: score(of_method, train_mean) for method, of_method in predictions.items()}
    network, *others = predictions
    others.sort(key=lambda m: -np.mean([one.r2 for one in scores[m].values()]))
    shown = [network, *others[:1]]
    names = predictions[network].names
    figure, panels = _panels(len(names), 4.1, sharey=False)
    for i, (axes, name) in enumerate(zip(panels, names, strict=True)):
        for method, colour, order in zip(shown, (MEASURED, LIGHTER), (3, 2), strict=False):
            points = predictions[method]
            size = float(np.clip(60 / np.sqrt(len(points.truth)), 1.5, 4))
            axes.plot(points.truth[:, i], points.mean[:, i], "o", ms=size, color=colour, mew=0,
                      alpha=0.8, label=method, zorder=order)  # fmt: skip
        truth, mean = predictions[network].truth[:, i], predictions[network].mean[:, i]
        sigma = predictions[network].sigma
        if sigma is not None:
            some = np.random.default_rng(0).permutation(len(truth))[:MOST_BARS]
            axes.errorbar(truth[some], mean[some], sigma[some, i], fmt="none", ecolor=MEASURED,
                          elinewidth=0.6, alpha=0.5, zorder=3)  # fmt: skip
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.2 * (high - low))  # room for two lines of text
        axes.axline((truth[0], truth[0]), slope=1, color=MUTED, lw=1, zorder=1)
        axes.axhline(train_mean[i], color=MUTED, lw=1, ls=":", label="mean of the training set")
        for line, method in enumerate(shown):
            one = scores[method][name]
            grade = f"$R^2$ = {one.r2:.3f},  RMSE = {one.rmse:#.2g}"
            _write(axes, grade, 0.96 - 0.075 * line, (MEASURED, THEORY)[line])
        axes.set(xlabel=f"true {symbol(name)}", ylabel=f"predicted {symbol(name)}")
        axes.xaxis.set_major_locator(MaxNLocator(5))
    _legend_above(figure, panels)
    return figure


def _write(axes: Axes, text: str, height: float, colour: str) -> None:
    """Writes text at the left of a panel, its top at `height` as a share of the panel's height."""
    axes.text(0.04, height, text, color=colour, transform=axes.transAxes, va="top", fontsize=8.5)


def learning_curve_figure(curves: Mapping[str, LearningCurve]) -> Figure:
    """Returns a figure of learning curves, with a panel for each parameter.

    The error is divided by the mean predictor's, which is the dotted line.

    Args:
        curves: the curves by method, the network first. Seeds are drawn as points, their mean as a
            line.
    """
    names = list(next(iter(curves.values())).errors)
    figure, panels = _panels(len(names), 4.0, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        for i, (method, curve) in enumerate(curves.items()):
            errors = np.asarray(curve.errors[name], dtype=float).reshape(len(curve.sizes), -1)
            colour, order = COLOURS[i % len(COLOURS)], 20 - i
            for seed in errors.T:
                axes.plot(curve.sizes, seed, "o", ms=3.5, mew=0, alpha=0.6, color=colour,
                          zorder=order)  # fmt: skip
            means = np.ma.masked_invalid(errors).mean(axis=1)
            axes.plot(curve.sizes, means, lw=2.0 if i == 0 else 1.3, color=colour, zorder=order,
                      label=method)  # fmt: skip
        axes.axhline(1, color=MUTED, lw=1, ls=":", label="mean predictor")
        axes.set(xscale="log", yscale="log", title=symbol(name), xlabel="simulations")
        plain_log_ticks(axes.xaxis)
        axes.tick_params(axis="x", which="minor", bottom=False, top=False)
    plain_log_ticks(panels[0].yaxis)
    panels[0].set_ylabel("RMSE / RMSE of the mean predictor")
    _legend_above(figure, panels)
    return figure


def training_figure(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Returns a figure of the loss against the step, with the learning rate below.

    Args:
        rows: rows of metrics.csv, at least one: step, loss, rate and, after some steps,
            validation_loss. The running mean of the loss is drawn over it.
    """
    columns = ("step", "loss", "rate")
    steps, loss, rate = np.array([[float(row[key]) for key in columns] for row in rows]).T
    held = [(int(r["step"]), float(r["validation_loss"])) for r in rows if r["validation_loss"]]
    validation = np.array([value for _, value in held])
    figure = new_figure(6.8, 5.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    width = max(1, len(loss) // 50)
    top.plot(steps, loss, color=MEASURED, lw=0.6, alpha=0.3)
    smooth = np.convolve(loss, np.full(width, 1 / width), mode="valid")
    top.plot(steps[width - 1 :], smooth, color=MEASURED, lw=1.6, label="training")
    if held:
        at = [step for step, _ in held]
        top.plot(at, validation, "o-", ms=3.5, lw=1.2, color=THEORY, label="validation")
        best = held[int(np.nanargmin(validation))]
        top.plot(*best, "o", ms=9, mfc="none", mec=THEORY,
                 label=f"best: {best[1]:.4g} after step {best[0] + 1}")  # fmt: skip
    if np.nanmin([*loss, *validation]) > 0:
        top.set_yscale("log")
        plain_log_ticks(top.yaxis)
    top.set_ylabel("loss")
    top.legend(**PLAIN_LEGEND)
    below.plot(steps, rate, color=MUTED, lw=1.4)
    below.set_ylabel("learning rate")
    below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    for axes in (top, below):
        style_axes(axes)
    return figure


def calibration_figure(predictions: Predictions) -> Figure:
    """Returns a figure of the histograms of (predicted - true) / sigma, with a unit normal.

    Each parameter has a panel. Values beyond 5 sigma are counted in the outermost bins.

    Args:
        predictions: predictions with a sigma.
    """
    assert predictions.sigma is not None
    figure, panels = _panels(len(predictions.names), 3.6, sharey=True)
    fine = np.linspace(-5, 5, 301)
    bins = np.linspace(-5, 5, int(np.clip(np.sqrt(len(predictions.truth)) * 2, 10, 50)) + 1)
    pulls = (predictions.mean - predictions.truth) / predictions.sigma
    for axes, name, pull in zip(panels, predictions.names, pulls.T, strict=True):
        shown = np.clip(pull, -4.999, 4.999)
        axes.hist(shown, list(bins), density=True, color=MEASURED, alpha=0.75, label="predictions")
        axes.plot(fine, norm.pdf(fine), color=THEORY, lw=1.6, label="unit normal")
        lines = [f"within {n}$\\sigma$: {100 * np.mean(np.abs(pull) <= n):.0f} %" for n in (1, 2)]
        lines.append(f"$\\chi^2/n$ = {np.mean(pull**2):.3g}")
        _write(axes, "\n".join(lines), 0.96, "black")
        axes.set(xlim=(-5, 5), xlabel=r"(predicted $-$ true) / $\sigma$", title=symbol(name))
    panels[0].set_ylim(top=1.25 * panels[0].get_ylim()[1])
    panels[0].set_ylabel("density")
    _legend_above(figure, panels)
    return figure


def phases_figure(phases: Mapping[str, float]) -> Figure:
    """Returns a figure of the share of a step that each phase takes.

    Args:
        phases: the time of each phase, in any common unit; not all zero.
    """
    times = np.array(list(phases.values()), dtype=float)
    shares = times / times.sum()
    figure = new_figure(6.8, 0.8 + 0.36 * len(times))
    axes = figure.add_subplot()
    bars = axes.barh(list(phases), shares, color=MEASURED, height=0.65)
    axes.bar_label(bars, [f"{100 * share:.1f} %" for share in shares], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.14 * shares.max()), xlabel="share of the step")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol=" %"))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
