"""The report of agreement.py: a comparison of means and widths, and the contours."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import of_mean

GAIN = "ln(q / prior) of test"


def report(folder: Path, names: Sequence[str], sets: Sequence[str], figure: Path | None) -> None:
    """Prints a comparison of means and widths, and draws the contours.

    Args:
        folder: the folder of all answers.
        names: names of the parameters.
        sets: names of the sets of statistics.
        figure: path of the figure of contours; None for no figure.
    """
    rows, samples, gains = [], {}, {}
    path = folder / "draws.csv"
    if path.exists():
        drawn = drawn_of(path, names)
        samples["field, chains"] = drawn.reshape(-1, len(names))
        row = row_of("field, chains", names, samples["field, chains"])
        for name, known in errors_of(drawn, names).items():
            row[name] |= known
        rows.append(row)
    if (folder / "answer").exists():
        samples["network, flow"] = np.load(folder / "answer" / "samples.npz")["samples"]
        scores = json.loads((folder / "network" / "evaluation" / "scores.json").read_text())
        (own,) = (
            one
            for one in scores["posteriors"]["scores"]
            if (one["of"], one["head"]) == ("network", "flow")
        )
        row = row_of("network, flow", names, samples["network, flow"])
        rows.append(row | {GAIN: [own["gain"], own["gain_error"]]})
    for kind in ("flow", "sbi"):
        for number, label in enumerate(sets):
            kept = folder / f"{kind}_{number}.npz"
            if kept.exists():
                found, name = np.load(kept), f"{label}, {kind}"
                samples[name], gains[name] = found["samples"], found["gain"]
                row = row_of(name, names, found["samples"]) | {GAIN: of_mean(found["gain"])}
                rows.append(row)
    print(json.dumps(rows, indent=1, default=float))
    # Of the same universes: much of what scatters is common to both.
    pairs = {
        f"{one} less {other}": of_mean(gains[one] - gains[other])
        for other, one in itertools.combinations(gains, 2)
    }
    print(json.dumps({GAIN: pairs}, indent=1))
    if figure is not None:
        draw(samples, names, figure)


def drawn_of(path: Path, names: Sequence[str]) -> np.ndarray:
    """Returns the draws of chains, [draw, chain, parameter]."""
    from flowpm_dist.jobs.results import read_rows

    rows = [row for row in read_rows(path) if int(row["drawn"])]
    count = sum(name.startswith("loss ") for name in rows[0])
    columns = [[f"{name} {chain}" for name in names] for chain in range(count)]
    return np.array([[[float(row[c]) for c in group] for group in columns] for row in rows])


def row_of(by: str, names: Sequence[str], samples: np.ndarray) -> dict[str, Any]:
    """Returns mean, width and correlation of samples [sample, parameter]."""
    found: dict[str, Any] = {"by": by}
    for name, values in zip(names, samples.T, strict=True):
        found[name] = {"mean": values.mean(), "width": values.std(ddof=1)}
    return found | {"correlation": np.corrcoef(samples.T)[0, 1]}


def errors_of(drawn: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns what draws of chains [draw, chain, parameter] are not known better than.

    A width is known by the effective number of the squares about the mean. Draws that swing from
    one side to the other determine the mean better than independent draws, but not the width. No
    more draws count than there are.
    """
    from flowpm_dist.reconstruction import convergence

    squares = (drawn - drawn.mean(axis=(0, 1))) ** 2
    of_values, of_squares = convergence(drawn), convergence(squares)
    count = drawn.shape[0] * drawn.shape[1]
    width = drawn.std(axis=(0, 1), ddof=1)
    scatter = squares.std(axis=(0, 1), ddof=1) / (2 * width)
    ess = [np.minimum(one.ess, count) for one in (of_values, of_squares)]
    columns = {
        "error of the mean": width / np.sqrt(ess[0]),
        "error of the width": scatter / np.sqrt(ess[1]),
        "ess": of_values.ess,
        "ess of the squares": of_squares.ess,
        "rhat": of_values.rhat,
    }
    return {n: {key: float(x[i]) for key, x in columns.items()} for i, n in enumerate(names)}


def draw(samples: dict[str, np.ndarray], names: Sequence[str], path: Path) -> None:
    """Draws ellipses of 68 and 95 % of a Gaussian of each mean and covariance."""
    import flowpm_dist as fpm
    from flowpm_dist.io.figures import (
        COLOURS,
        MUTED,
        PLAIN_LEGEND,
        new_figure,
        save_figure,
        style_axes,
        symbol,
    )

    figure = new_figure(6.4, 5.2)
    axes = figure.subplots()
    style_axes(axes)
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    unit = np.stack([circle.real, circle.imag])
    for number, (label, values) in enumerate(samples.items()):
        root, mean = np.linalg.cholesky(np.cov(values.T)), values.mean(axis=0)
        colour = COLOURS[number % len(COLOURS)]
        style = {"color": colour, "lw": 2.0 if number == 0 else 1.2}
        style["ls"] = "--" if label.endswith("sbi") else "-"
        for size in (1.515, 2.486):
            x, y = mean[:, np.newaxis] + size * root @ unit
            axes.plot(x, y, label=label if size < 2 else None, **style)
        if number == 0:
            axes.plot(*values.T, ".", ms=2, color=colour, alpha=0.4)
    own = fpm.Cosmology.planck18()
    for name, line in zip(names, (axes.axvline, axes.axhline), strict=True):
        line(getattr(own, name), color=MUTED, lw=1)
    axes.set(xlabel=symbol(names[0]), ylabel=symbol(names[1]))
    figure.legend(loc="outside upper center", ncols=2, **{**PLAIN_LEGEND, "fontsize": 8})
    save_figure(figure, path)
