"""The results of judging posteriors, and the posterior of a volume; without TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from flowpm_dist.cosmoflow.evaluation.trainings import PosteriorError
from flowpm_dist.cosmoflow.scores.judging import Difference, MeanDifference
from flowpm_dist.cosmoflow.training.saved import SavedTraining
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.errors import decoration
from flowpm_dist.io.files import GENERATOR, UnreadableError, read_arrays, save_arrays, write_text
from flowpm_dist.io.labelled import Labelled, LabelledArray
from flowpm_dist.jobs.folder import OutputError, check_foreign, check_ground
from flowpm_dist.posteriors.calibration import LEVELS, TOGETHER, Calibration
from flowpm_dist.posteriors.options import HEADS

FILES = ("posteriors.md", "posterior_samples.npz", "ranks.png", "tarp.png")
SUSPICIOUS = 0.01
"""The probability of reporting a posterior as not right although all are right. Each of its
P-values is compared with this probability divided by their number (Bonferroni).
"""

Key = tuple[str, str]
"""The name of the features, and the name of the head."""


@dataclass(frozen=True)
class PosteriorResults:
    """How good posteriors are.

    Attributes:
        main: the network's posterior with the head that was requested last.
        calibrations: the calibration of each posterior.
        rmse_error: one standard error of each RMSE, [p].
        differences: how much `main` differs from each other posterior: in ln(q / prior), and in
            the mean of each parameter.
        chosen: the features that each posterior of a network uses.
        arrays: truth, samples and ln(q / prior) of `main`, for the results.
        judged_by: the split whose volumes posteriors are judged on.
    """

    main: Key
    calibrations: Mapping[Key, Calibration]
    rmse_error: Mapping[Key, np.ndarray]
    differences: Mapping[Key, tuple[MeanDifference, Mapping[str, Difference]]]
    chosen: Mapping[str, str]
    arrays: Mapping[str, np.ndarray]
    judged_by: str = "test"

    @property
    def tested(self) -> bool:
        """Whether P-values are valid: not on the validation set, which heads are chosen by."""
        return self.judged_by != "validation"

    def _p(self, value: float) -> str:
        return f"{value:.2g}" if self.tested else "-"

    def _coverage(self, one: Calibration, column: int) -> list[str]:
        """Returns the cells of a column of the coverage: share and P of each level."""
        cells = []
        for numbers in zip(one.coverage, one.coverage_error, one.coverage_p, strict=True):
            share, error, p = (row[column] for row in numbers)
            cells += [_with_error(share, error), self._p(p)]
        return cells

    def table(self) -> Table:
        """Returns a table for a terminal; it shows the smallest of several P-values."""
        drawn = Table(box=SIMPLE)
        tests = "coverage", "ranks", "TARP"
        for heading in ("posterior of", "head", "ln(q / prior)", *(f"P of {t}" for t in tests)):
            is_text = heading in ("posterior of", "head")
            drawn.add_column(heading, justify="left" if is_text else "right")
        for (name, head), one in self.calibrations.items():
            least = one.coverage_p.min(), one.ranks_p.min(), one.tarp_p
            values = map(self._p, least)
            drawn.add_row(name, head, _with_error(one.gain, one.gain_error), *values)
        return drawn

    def sentences(self) -> list[str]:
        """Returns sentences on what the table does not show."""
        sentences = []
        for (name, head), one in self.calibrations.items() if self.tested else ():
            limit = SUSPICIOUS / one.tests
            reason = f"is below {SUSPICIOUS:g} / {one.tests}, the number of its tests"
            of_ranks = dict(zip(one.names, one.ranks_p.tolist(), strict=True))
            of_tarp = {TOGETHER: one.tarp_p}
            for kind, values in (("ranks", of_ranks), ("tarp", of_tarp)):
                wrong = {n: p for n, p in values.items() if p < limit}
                drawn = f"{kind}.png" if head == self.main[1] else FILES[0]
                if wrong:
                    sentences.append(
                        f"Posteriors of {name} ({head}) are not right for {', '.join(wrong)}: P = "
                        f"{min(wrong.values()):.1g} {reason}; see {drawn}."
                    )
            for row, i in np.argwhere(one.coverage_p < limit):
                wide = one.too_wide(row, i)
                share = _with_error(one.coverage[row, i], one.coverage_error[row, i])
                sentences.append(
                    f"Posteriors of {name} ({head}) are about {abs(wide):.0%} too "
                    f"{'wide' if wide > 0 else 'narrow'} for {one.columns[i]}: {share} of the "
                    f"truths are in the central {LEVELS[row]:.1%}, and P = "
                    f"{one.coverage_p[row, i]:.1g} {reason}."
                )
        for (name, head), (gain, _) in self.differences.items():
            sentences.append(
                f"ln(q / prior) of {self.main[0]} ({self.main[1]}) minus ln(q / prior) of {name} "
                f"({head}): {gain.value:+.3f} ± {gain.error:.3f}."
            )
        return sentences

    def markdown(self) -> str:
        """Returns the tables in Markdown."""
        main = self.calibrations[self.main]
        shares = [text for level in LEVELS for text in (f"in {level:.1%}", "P")]
        rows = [["posterior of", "head", "ln(q / prior)", "TARP P", *shares]]
        for name in main.names:
            rows[0] += [f"{name} RMSE", "width", *shares, "ranks P"]
        for (name, head), one in self.calibrations.items():
            row = [name, head, _with_error(one.gain, one.gain_error), self._p(one.tarp_p)]
            row += self._coverage(one, -1)
            for i, of_rmse in enumerate(self.rmse_error[name, head]):
                row += [f"{one.rmse[i]:.3g}±{of_rmse:.1g}", f"{one.width[i]:.3g}"]
                row += [*self._coverage(one, i), self._p(one.ranks_p[i])]
            rows.append(row)
        pairs = [["posterior of", "head", "ln(q / prior) higher by", "in"]]
        pairs[0] += [f"{name} RMSE lower by" for name in main.names]
        for (name, head), (gain, each) in self.differences.items():
            row = [name, head, _with_error(gain.value, gain.error), f"{gain.larger:.0%}"]
            row += [f"{each[n].rmse:.2g}±{each[n].rmse_error:.1g}" for n in main.names]
            pairs.append(row)
        used = "".join(f"- {name} uses the {part}.\n" for name, part in self.chosen.items())
        return (
            f"On {main.count} volumes of {main.groups} universes; shares beside TARP's P are means "
            f"over all parameters:\n\n{markdown_table(rows)}\n"
            f"{self.main[0]} ({self.main[1]}) compared with the others, by a paired bootstrap:\n\n"
            f"{markdown_table(pairs)}\n{used}"
        )

    def numbers(self) -> dict[str, Any]:
        """Returns all numbers by name."""
        scores = []
        for (name, head), one in self.calibrations.items():
            errors = dict(zip(one.names, self.rmse_error[name, head].tolist(), strict=True))
            numbers = one.as_dict() | {"rmse_error": errors}
            valid = {k: v for k, v in numbers.items() if self.tested or not k.endswith("_p")}
            scores.append({"of": name, "head": head, **valid})
        return {
            "main": list(self.main),
            "scores": scores,
            "differences": [
                {"from": name, "head": head, "gain": gain, **each}
                for (name, head), (gain, each) in self.differences.items()
            ],
            "features": dict(self.chosen),
        }

    def write_into(self, folder: Path) -> None:
        """Writes the samples into a folder."""
        np.savez(folder / FILES[1], **self.arrays)  # type: ignore[arg-type]

    def decorate(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Writes the tables in Markdown and draws the figures into a folder of complete results.

        Args:
            folder: the folder.
            warn: shows a warning, about a file that cannot be made.
        """
        shown = {key: one for key, one in self.calibrations.items() if key[1] == self.main[1]}
        with decoration(FILES[0], warn):
            write_text(folder / FILES[0], self.markdown())
        with drawing(folder / FILES[2], warn) as save:
            from flowpm_dist.posteriors.figures import rank_figure

            named = {f"{name}\n{head}": one for (name, head), one in shown.items()}
            save(rank_figure(named, tested=self.tested))
        with drawing(folder / FILES[3], warn) as save:
            from flowpm_dist.posteriors.figures import tarp_figure

            named = {f"{name}, {head}": one for (name, head), one in shown.items()}
            save(tarp_figure(named, tested=self.tested))


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f}±{error:.3f}"


def markdown_table(rows: list[list[str]]) -> str:
    """Returns a table in Markdown, a heading first; the first two columns are text."""
    ruled = [rows[0], ["---", "---", *["---:"] * (len(rows[0]) - 2)], *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in ruled)


PREFERRED = tuple(HEADS)[::-1]
SAMPLES = 4000
"""Number of samples of a volume's posterior."""
ANSWER_FILES = SAMPLES_FILE, CORNER = "samples.npz", "corner.png"
INTERVALS = (0.683, 0.954)


@dataclass(frozen=True)
class Question:
    """A volume, and the training whose network predicts its parameters.

    Attributes:
        volume, training: absolute paths.
    """

    volume: str
    training: str

    @classmethod
    def of(cls, volume: str | Path, training: SavedTraining) -> Question:
        """Returns the question about a volume, such as "file.h5:a/density"."""
        return cls(str(Path(volume).resolve()), str(training.folder.path.resolve()))


@dataclass(frozen=True)
class VolumePosterior(Labelled):
    """The posterior of a volume.

    Attributes:
        head: name of the head.
        priors: priors of the p parameters.
        samples: [sample, p] [physical units].
        question: the volume and the training.
        step: number of steps that the network was trained for.
    """

    head: str
    priors: UniformPriors
    samples: np.ndarray
    question: Question
    step: int

    def labelled(self) -> dict[str, LabelledArray]:
        """Returns the samples of each parameter, by its name."""
        return {
            name: LabelledArray(values, ("sample",), "", f"samples of {name}")
            for name, values in zip(self.priors.names, self.samples.T, strict=True)
        }

    def sentences(self) -> list[str]:
        """Returns the central intervals of each parameter in words."""
        sentences = []
        for name, of in zip(self.priors.names, self.samples.T, strict=True):
            ends = [np.quantile(of, [(1 - level) / 2, (1 + level) / 2]) for level in INTERVALS]
            intervals = ", ".join(
                f"{level:.1%} from {low:.4g} to {high:.4g}"
                for level, (low, high) in zip(INTERVALS, ends, strict=True)
            )
            sentences.append(f"{name}: {intervals}")
        return sentences

    def write(self, folder: Path, warn: Callable[[str], object] = warnings.warn) -> None:
        """Writes the samples, as `Samples.load` reads them, their origin, and a corner plot.

        Args:
            folder: the folder.
            warn: shows a warning, about a corner plot that cannot be drawn.

        Raises:
            OutputError: see `check_prediction_folder`.
            WriteError: the samples cannot be written.
        """
        check_prediction_folder(folder, self.question)
        ranges = np.array([*self.priors.ranges.values()], np.float64)
        arrays = {"names": np.array(self.priors.names), "samples": self.samples, "ranges": ranges}
        about = {"head": self.head, "generator": GENERATOR, "step": self.step}
        about |= {"volume": self.question.volume, "training": self.question.training}
        save_arrays(folder / SAMPLES_FILE, arrays | {k: np.array(v) for k, v in about.items()})
        with drawing(folder / CORNER, warn) as save:
            from flowpm_dist.posteriors.figures import corner_figure

            save(corner_figure(self.samples, self.priors))


def check_prediction_folder(folder: Path, question: Question) -> None:
    """Checks that a posterior can be written to a folder, without changing anything.

    Raises:
        OutputError: the path is no folder or cannot be written to, or the folder holds other files
            with these names, or the posterior of another volume or training.
    """
    check_ground(folder)
    try:
        held = read_arrays(folder / SAMPLES_FILE)
        ours = str(held["generator"]) == GENERATOR
        there = Question(str(held["volume"]), str(held["training"]))
    except (UnreadableError, KeyError):
        ours = False
    if not ours:
        check_foreign(folder, ANSWER_FILES)
    elif there != question:
        raise OutputError(
            f"{folder} holds the posterior of {there.volume} from {there.training}: give another "
            "--output"
        )


def fitted_heads(training: SavedTraining, head: str | None) -> list[str]:
    """Returns the heads whose posteriors were fitted, the preferred first.

    Args:
        training: its folder holds the posteriors.
        head: the requested head; by default all of `PREFERRED`.

    Raises:
        PosteriorError: no posterior of the requested head was fitted.
    """
    fitted = [name for name in PREFERRED if training.folder.posterior(name).exists()]
    if head is None or training.folder.posterior(head).exists():
        return fitted if head is None else [head]
    raise PosteriorError(
        f"{training.folder.posterior(head).parent} has no posterior of the head {head!r}"
        + (f", but of {', '.join(fitted)}" if fitted else "")
        + f": flowpm-dist evaluate {training.folder.path} --posteriors fits them"
    )


def posterior_of_volume(
    training: SavedTraining,
    volume: str | Path,
    features: Mapping[str, np.ndarray],
    step: int,
    head: str | None,
    *,
    needed: bool = False,
) -> tuple[VolumePosterior | None, list[str]]:
    """Returns the posterior of a volume, and sentences that the user should read with it.

    The posterior is None if none was requested and none was fitted to these weights. By default the
    first fitted head of `PREFERRED` is used. Every rank has the same samples.

    Args:
        training: its folder holds the posterior.
        volume: its path.
        features: features [n, value] by name; the first row is the volume's.
        step: number of steps that the network was trained for.
        head: see `fitted_heads`.
        needed: whether a missing posterior is an error; it always is if a head is requested.

    Raises:
        PosteriorError: no posterior of that head was fitted to these weights, or its file is
            damaged.
    """
    from flowpm_dist.cosmoflow.evaluation.summaries import HIDDEN, OUTPUTS
    from flowpm_dist.posteriors.heads import Posterior
    from flowpm_dist.posteriors.novelty import FeatureDensity

    others = []
    for name in fitted_heads(training, head):
        path = training.folder.posterior(name)
        try:
            posterior = Posterior.load(path)
            fitted = posterior.about["step"]
            if fitted == step:
                density = FeatureDensity.load(training.folder.feature_density(step))
                of_volume = features[posterior.about["part"]][:1]
                break
            others.append(
                f"The posterior ({name}) was fitted to weights of step {fitted}, and these are of "
                f"step {step}: fit it again with flowpm-dist evaluate --posteriors"
            )
        except (ValueError, KeyError, TypeError) as error:
            others.append(
                f"{path} or the density of its features cannot be read ({error}): fit them "
                "again with flowpm-dist evaluate --posteriors"
            )
    else:
        if others and (needed or head is not None):
            raise PosteriorError(others[0])
        return None, [f"{one}." for one in others]
    warning = density.warning(features.get(HIDDEN, features[OUTPUTS])[0])
    samples, question = posterior.sample(of_volume, SAMPLES)[0], Question.of(volume, training)
    answer = VolumePosterior(name, posterior.priors, samples, question, step)
    return answer, [warning] if warning else []
