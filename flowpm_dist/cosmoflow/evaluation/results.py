"""The results of an evaluation, with their tables and figures."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flowpm_dist.cosmoflow.evaluation.posteriors import FILES as OF_POSTERIORS
from flowpm_dist.cosmoflow.evaluation.posteriors import PosteriorResults, markdown_table
from flowpm_dist.cosmoflow.evaluation.trainings import WRITES_THERE
from flowpm_dist.cosmoflow.planning.folder import SCORES, record_of_evaluation
from flowpm_dist.cosmoflow.scores.judging import (
    Differences,
    LearningCurve,
    Predictions,
    Scores,
)
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.errors import decoration
from flowpm_dist.io.files import (
    GENERATOR,
    UnreadableError,
    WriteError,
    read_arrays,
    read_json,
    remove,
    remove_unfinished,
    write_text,
)
from flowpm_dist.jobs.folder import OF_EVERY_JOB, OutputError, check_foreign, check_ground
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import write_rows

FILES = (
    "table.md", "table.csv", "predictions.npz", "predicted.png", "calibration.png",
    "learning_curve.png", *OF_POSTERIORS, SCORES,
)  # fmt: skip
PARTIAL = ".partial-evaluation"
Cell = str | int | float | None

SAVED_APART = 5.0
"""Seconds between the files of one save, at most."""


@dataclass(frozen=True)
class Evaluation:
    """The results of networks on the test set, compared with other methods.

    Attributes:
        main: the name of the method in the figures, a network or the mean of several.
        split: the volumes that all methods are judged on: "test", "validation" or a fresh set.
        predictions: the predictions for these volumes by method: `main` first, then networks, then
            baselines.
        scores: the scores of the same methods.
        differences: `main` compared with each other method, in pairs on the same volumes.
        train_mean: the mean of the training targets, [p].
        seeds: mean and standard deviation over runs that differ in their seed alone:
            [method][parameter][attribute of `OF_SEEDS`] = (mean, standard deviation).
        curves: the error against the number of simulations, networks first.
        collapse: a sentence for each network on whether it has learnt anything.
        notes: sentences on the evaluation that a reader should know.
        trainings: the folder, step, steps, complete, seed, samples and run file of each training,
            and when its weights were saved.
        folder: the folder that the results are written to by default.
        mesh: shape of the mesh of ranks.
        progress: the display of the evaluation, which knows its warnings.
        posteriors: the posteriors of the fitted heads, if any were requested.
    """

    main: str
    split: str
    predictions: Mapping[str, Predictions]
    scores: Mapping[str, Scores]
    differences: Differences
    train_mean: np.ndarray
    seeds: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]
    curves: Mapping[str, LearningCurve]
    collapse: Mapping[str, str]
    notes: tuple[str, ...]
    trainings: tuple[Mapping[str, Any], ...]
    folder: Path
    mesh: str
    progress: Progress
    posteriors: PosteriorResults | None = None

    def sentences(self) -> list[str]:
        """Returns sentences about results that the table does not show."""
        many = len(self.collapse) > 1
        sentences = [f"{name}: {text}" if many else text for name, text in self.collapse.items()]
        over = [
            f"{method}, over the seeds: RMSE of {name} {of['rmse'][0]:.4g} ± {of['rmse'][1]:.2g}, "
            f"{of['rmse_over_mean'][0]:.3f} ± {of['rmse_over_mean'][1]:.3f} of the mean's."
            for method, names in self.seeds.items()
            for name, of in names.items()
        ]
        # How `main` compares with the best method of another kind for each parameter.
        others = [name for name in self.differences if name not in {*self.collapse, self.main}]
        for name in self.predictions[self.main].names if others else ():
            best = min(others, key=lambda method: self.scores[method][name].rmse)
            over.append(self.differences[best][name].sentence(name, self.main, best))
        of_posteriors = self.posteriors.sentences() if self.posteriors else []
        return [*sentences, *over, *of_posteriors, *self.notes]

    def markdown(self) -> str:
        """Returns the tables and the sentences in Markdown."""
        count = len(self.predictions[self.main].truth)
        sentences = "".join(f"- {sentence}\n" for sentence in self.sentences())
        pairs = ""
        if self.differences:
            table = markdown_of_differences(self.main, self.differences)
            pairs = f"Differences, by a paired bootstrap:\n\n{table}\n"
        return f"On {count} {self.split} volumes:\n\n{markdown(self.scores)}\n{pairs}{sentences}"

    def write(self, folder: Path | None = None, usage: Mapping[str, Any] | None = None) -> Path:
        """Writes tables, numbers, figures and a report in place of an older evaluation.

        The older evaluation's posteriors are kept if this one has none, and weights and volumes
        are the same. The results are first written to another place. scores.json is moved last: it
        shows that the evaluation is complete. Tables in Markdown, figures and the report follow; if
        one cannot be made, that is a warning.

        Args:
            folder: created if it is missing; by default a folder of the training.
            usage: energy and memory for the report, see `Usage.of_job`.

        Returns:
            The folder.

        Raises:
            OutputError: see `check_evaluation_folder`.
            WriteError: a file cannot be written.
        """
        from flowpm_dist.jobs.report import leave_report

        check_evaluation_folder(folder or self.folder, own=folder is None)
        folder = Path(folder or self.folder)
        aside = folder / PARTIAL
        try:
            remove(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            if (folder / SCORES).exists():  # ours, as was checked
                remove_unfinished(folder)
            older = self._older_posteriors(folder / SCORES)
            self._write_into(aside, older)
            for name in (SCORES, *OF_EVERY_JOB):
                (folder / name).unlink(missing_ok=True)
            for name in FILES if older is None else [n for n in FILES if n not in OF_POSTERIORS]:
                (folder / name).unlink(missing_ok=True)
                if (aside / name).exists():
                    (aside / name).replace(folder / name)
            aside.rmdir()
        except OSError as error:
            raise WriteError.of(Path(error.filename or folder), error) from error
        self._decorate(folder)
        read = functools.partial(record_of_evaluation, folder)
        leave_report(folder, "evaluate", self.mesh, self.progress, read, usage or {})
        return folder

    def _older_posteriors(self, path: Path) -> Any:
        """Returns the numbers of the posteriors of an older evaluation if they stay, else None."""
        older = read_json(path)
        before, now = older.get("trainings", ()), self.trainings
        same = older.get("split") == self.split and len(before) == len(now)
        same = same and all(map(_same_weights, before, now))
        if not same or self.posteriors is not None:
            return None
        try:
            truth = read_arrays(path.parent / "predictions.npz")["truth"]
        except (UnreadableError, KeyError):
            return None
        same_volumes = np.array_equal(truth, self.predictions[self.main].truth)
        return older.get("posteriors") if same_volumes else None

    def _write_into(self, folder: Path, posteriors: Any) -> None:
        write_csv(self.scores, folder / "table.csv")
        main = self.predictions[self.main]
        arrays: dict[str, Any] = {"names": np.array(main.names), "truth": main.truth}
        arrays |= {"mean": main.mean} | ({} if main.sigma is None else {"sigma": main.sigma})
        np.savez(folder / "predictions.npz", **arrays)
        if self.posteriors is not None:
            self.posteriors.write_into(folder)
            posteriors = self.posteriors.numbers()
        numbers = {
            "generator": GENERATOR,
            "main": self.main,
            "split": self.split,
            "samples": len(main.truth),
            "train_mean": dict(zip(main.names, self.train_mean.tolist(), strict=True)),
            "scores": self.scores,
            "differences": self.differences,
            "seeds": self.seeds,
            "learning_curves": {
                method: {"sizes": curve.sizes, "rmse_over_mean": dict(curve.errors)}
                for method, curve in self.curves.items()
            },
            "collapse": self.collapse,
            "notes": self.notes,
            "trainings": self.trainings,
            **({} if posteriors is None else {"posteriors": posteriors}),
        }
        text = json.dumps(plain(numbers), indent=1, allow_nan=False)
        (folder / SCORES).write_text(text + "\n", encoding="utf-8")

    def _decorate(self, folder: Path) -> None:
        """Writes the tables in Markdown and draws the figures. The results are complete."""
        warn, main = self.progress.warn, self.predictions[self.main]
        with decoration("table.md", warn):
            write_text(folder / "table.md", self.markdown())
        with drawing(folder / "predicted.png", warn) as save:
            from flowpm_dist.cosmoflow.scores.figures import predicted_figure

            networks = set(self.collapse) | {self.main}
            others = {name: p for name, p in self.predictions.items() if name not in networks}
            save(predicted_figure({self.main: main, **others}, self.train_mean))
        with drawing(folder / "calibration.png", warn) as save:
            from flowpm_dist.cosmoflow.scores.figures import calibration_figure

            if main.sigma is not None:
                save(calibration_figure(main))
        with drawing(folder / "learning_curve.png", warn) as save:
            from flowpm_dist.cosmoflow.scores.figures import learning_curve_figure

            save(learning_curve_figure(self.curves))
        if self.posteriors is not None:
            self.posteriors.decorate(folder, warn)


def _same_weights(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two trainings have the same weights.

    Their times are compared to some seconds: earlier versions took the time of another file.
    """
    here, there = one.get("saved"), other.get("saved")
    close = here == there
    if isinstance(here, int | float) and isinstance(there, int | float):
        close = abs(here - there) < SAVED_APART
    return close and all(one.get(key) == other.get(key) for key in ("seed", "step"))


def check_evaluation_folder(folder: Path, *, own: bool = False) -> None:
    """Checks that an evaluation can be written to a folder, without changing anything.

    Args:
        folder: the folder; it may be missing.
        own: whether it is the training's own, which may be no symbolic link.

    Raises:
        OutputError: the path is no folder or cannot be written to, or the folder holds other files
            with these names.
    """
    if own and folder.is_symlink():
        raise OutputError(
            f"{folder} is a symbolic link, and {WRITES_THERE}: put what it points to in its place, "
            "or give another --output"
        )
    check_ground(folder)
    ours = read_json(folder / SCORES).get("generator") == GENERATOR
    if not ours and not (folder / PARTIAL).is_dir():
        check_foreign(folder, (*FILES, *OF_EVERY_JOB))


def plain(value: Any) -> Any:
    """Returns values as JSON takes them; numbers that are not finite become null."""
    return to_jsonable_python(value, fallback=lambda array: array.tolist(), inf_nan_mode="null")


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
    rows = [[_text(row, key) for key in HEADINGS] for row in table(scores)]
    return markdown_table([list(HEADINGS.values()), *rows])


FEWEST = 4
"""Columns that a terminal always shows, even a narrow one."""


def rich_table(scores: Mapping[str, Scores], width: int) -> Table:
    """Returns as many of the columns `IN_TERMINAL` as fit into a terminal.

    A line separates the parameters. Names of methods are wrapped only where `FEWEST` columns are
    too wide.

    Args:
        scores: the scores of each method.
        width: width of the terminal [characters].
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
    write_rows(path, table(scores), digits=None)


def markdown_of_differences(main: str, differences: Differences) -> str:
    """Returns a table in Markdown of the first method minus each of the others."""
    rows = [
        ["parameter", f"{main} compared with", "R² higher by", "RMSE lower by", "smaller RMSE in"]
    ]
    names = dict.fromkeys(name for of_method in differences.values() for name in of_method)
    for name in names:
        for method, of_method in differences.items():
            d = of_method[name]
            cells = [f"{d.r2:z.3f}±{d.r2_error:.3f}", f"{d.rmse:.2g}±{d.rmse_error:.1g}"]
            rows.append([name, method, *cells, f"{100 * d.better:.0f} %"])
    return markdown_table(rows)
