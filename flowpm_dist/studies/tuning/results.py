"""The results of a tuning: its tables, the best run file, and whether the best beats the defaults.

Nothing here imports TensorFlow or optuna.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from flowpm_dist.io.files import write_text
from flowpm_dist.jobs.results import write_rows
from flowpm_dist.options import as_written
from flowpm_dist.studies.process import COMPLETE
from flowpm_dist.studies.subject import Values
from flowpm_dist.studies.tuning.options import TuneOptions
from flowpm_dist.studies.tuning.records import COLLAPSED, JudgedRun, TrialRecord
from flowpm_dist.studies.tuning.runs import DEFAULTS

LEVEL = 0.05
"""The largest probability of calling values better than the defaults when they are not."""
FEWEST_PAIRS = 3
"""The fewest pairs of runs for a verdict."""


@dataclass(frozen=True)
class Candidate:
    """Values that were repeated on fresh seeds.

    Attributes:
        name: name of the values.
        values: the values by key.
        runs: how the runs ended; None for one that was not made [seed].
    """

    name: str
    values: Values
    runs: Sequence[JudgedRun | None]

    @property
    def scores(self) -> np.ndarray:
        """The value on each seed; NaN where a run has none, or failed [seed]."""
        states = (COMPLETE, COLLAPSED)
        values = [run.value if run and run.state in states else None for run in self.runs]
        return np.array(values, float)

    @property
    def collapsed(self) -> int:
        """Number of the runs that have collapsed."""
        return sum(run is not None and run.state == COLLAPSED for run in self.runs)

    @property
    def mean(self) -> float:
        """Mean of the scores."""
        return _mean(self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return _deviation(self.scores)

    @property
    def failed(self) -> int:
        """Number of the runs without a value."""
        return int((~np.isfinite(self.scores)).sum())


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _deviation(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if known.size > 1 else float("nan")


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns candidates, the best first: the fewest failures, then the lowest mean."""
    return sorted(candidates, key=lambda c: (c.failed, np.nan_to_num(c.mean, nan=np.inf)))


@dataclass(frozen=True)
class Gain:
    """How much better values are than the defaults, by a paired t-test on the same seeds.

    Attributes:
        winner, defaults: both on the same seeds, which guided no choice.
    """

    winner: Candidate
    defaults: Candidate

    @property
    def _pairs(self) -> np.ndarray:
        """The gain on each seed on which both have a value."""
        gains = self.defaults.scores - self.winner.scores
        return gains[np.isfinite(gains)]

    @property
    def pairs(self) -> int:
        """Number of seeds on which both have a value."""
        return self._pairs.size

    @property
    def mean(self) -> float:
        """Mean gain; above 0 if the winner is better."""
        return _mean(self._pairs)

    @property
    def error(self) -> float:
        """Standard error of `mean`."""
        return _deviation(self._pairs) / np.sqrt(max(1, self.pairs))

    @property
    def limits(self) -> tuple[float, float]:
        """The lower and the upper limit of the true gain, each with the error rate `LEVEL`."""
        from scipy.special import stdtrit  # commands that read records need it not

        width = stdtrit(max(1, self.pairs - 1), 1 - LEVEL) * self.error
        return self.mean - width, self.mean + width

    @property
    def can_decide(self) -> bool:
        """Whether there are enough pairs, and the winner has a value wherever the defaults have."""
        lost = np.isfinite(self.defaults.scores) & ~np.isfinite(self.winner.scores)
        return self.pairs >= FEWEST_PAIRS and not lost.any()


@dataclass(frozen=True)
class Verdict:
    """Which values are the best, and whether they beat the defaults.

    Attributes:
        name: name of the best values.
        values: the best values by key; empty if they are the subject's own.
        beats: whether they beat the defaults; None if that is not decided.
        sentence: the same in words.
    """

    name: str
    values: Values
    beats: bool | None
    sentence: str


def verdict_of(gain: Gain | None, best: Sequence[TrialRecord], worth: float = 0.0) -> Verdict:
    """Returns which values are the best; the defaults, unless others are shown to beat them.

    Args:
        gain: the gain of the best values that were repeated; None if none were.
        best: the complete trials, the best first.
        worth: the smallest gain that matters.
    """
    if not best:
        return Verdict(DEFAULTS, {}, None, "No trial is complete: the defaults stand.")
    if gain is None:
        sentence = "It was not repeated: whether it beats the defaults is not known."
        return Verdict(f"trial {best[0].number}", best[0].values, None, sentence)
    winner, defaults = gain.winner, gain.defaults
    stand = partial(Verdict, DEFAULTS, defaults.values)
    if np.isnan(winner.mean) and np.isnan(defaults.mean):
        return stand(None, "No run on fresh seeds has a value: the defaults stand.")
    if np.isnan(defaults.mean):
        sentence = "The defaults have no value on fresh seeds to compare with."
        return Verdict(winner.name, winner.values, None, sentence)
    low, high = gain.limits
    gains = f"gains {gain.mean:.3g} +- {gain.error:.2g} over the defaults"
    text = f"On {gain.pairs} fresh seeds {winner.name} {gains}"
    if not gain.can_decide:
        needed = f"a verdict needs at least {FEWEST_PAIRS} seeds, and a value on each"
        return stand(None, f"Not decided: {needed}. The defaults are kept.")
    limits = f"{1 - LEVEL:.0%} limits {low:.3g} and {high:.3g}"
    if low > 0 and gain.mean >= worth:
        beats = f"On fresh seeds {winner.name} beats the defaults by {gain.mean:.4g} +- "
        return Verdict(winner.name, winner.values, True, f"{beats}{gain.error:.2g} ({limits}).")
    if low > 0:
        return stand(False, f"{text}, less than tune.worth = {worth:g}: the defaults stand.")
    if high <= worth:
        return stand(False, f"{text} ({limits}): the defaults stand.")
    more = "The defaults are kept; more seeds may decide."
    return stand(None, f"Not decided: {text[0].lower()}{text[1:]} ({limits}). {more}")


def _cell(value: Any) -> Any:
    if isinstance(value, float) and np.isnan(value):
        return None
    return as_written(value) if isinstance(value, bool) else value


def _write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [{name: _cell(value) for name, value in row.items()} for row in rows]
    write_rows(path, cells, columns, digits=9)


def write_trials(path: Path, records: Sequence[TrialRecord], keys: Sequence[str]) -> None:
    """Write a row for each trial that has ended."""
    facts = ("number", "state", "value", "seconds", "folder")
    rows = [
        {
            **{fact: getattr(record, fact) for fact in facts},
            **record.values,
            "message": " ".join(record.message.split()),
        }
        for record in records
    ]
    _write(path, (*facts, *keys, "message"), rows)


def write_best(
    path: Path, choice: Sequence[Candidate], gain: Gain, keys: Sequence[str], seeds: int
) -> None:
    """Write a row for each of the values that were repeated: for the verdict, and for the choice.

    Args:
        path: path of the file.
        choice: what was repeated to choose the best.
        gain: what was repeated for the verdict.
        keys: the keys of the space.
        seeds: the number of seeds.
    """
    columns = ("name", "mean", "spread", "difference", "error", "collapsed", "failed", "purpose")
    scores = [f"seed {number}" for number in range(seeds)]
    pair = [(each, "verdict") for each in (gain.winner, gain.defaults)]
    differences = {gain.winner.name: (-gain.mean, gain.error), DEFAULTS: (0.0, 0.0)}
    rows = []
    for each, purpose in [*pair, *((each, "choice") for each in choice)]:
        row = {name: getattr(each, name, None) for name in columns} | {"purpose": purpose}
        if purpose == "verdict":
            row["difference"], row["error"] = differences[each.name]
        values = zip(scores, each.scores.tolist(), strict=True)
        rows.append({**row, **dict(values), **each.values})
    _write(path, (*columns, *scores, *keys), rows)


def write_run_file(path: Path, options: TuneOptions, verdict: Verdict) -> None:
    """Write the subject's run file with the best values; for a script, the values alone.

    Raises:
        WriteError: it cannot be written.
    """
    job = options.plan(verdict.values, path.parent)
    if job is None:
        text = tomli_w.dumps(dict(verdict.values))
    else:
        text = job.options.with_mesh(None).resolved()
    head = f"# {options.tune.subject.name} with the values of {verdict.name}.\n"
    write_text(path, f"{head}# {verdict.sentence}\n{text}")
