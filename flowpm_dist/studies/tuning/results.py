"""The results of a tuning: its tables, the best run file, and whether the best beats the defaults.

Nothing here imports TensorFlow or optuna.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from flowpm_dist.io.files import write_text
from flowpm_dist.options import as_written
from flowpm_dist.studies.process import COMPLETE
from flowpm_dist.studies.tables import write_rows
from flowpm_dist.studies.tuning.options import TuneOptions
from flowpm_dist.studies.tuning.records import COLLAPSED, TrialRecord
from flowpm_dist.studies.tuning.runs import DEFAULTS, Repeat


@dataclass(frozen=True)
class Candidate:
    """Values that were repeated on fresh seeds.

    Attributes:
        name: name of the values.
        values: the values by key.
        scores: the value on each seed; NaN where a run has none [seed].
        differences: `scores` minus the defaults' scores on the same seeds [seed].
        collapsed: number of the runs that have collapsed.
    """

    name: str
    values: Mapping[str, Any]
    scores: np.ndarray
    differences: np.ndarray
    collapsed: int = 0

    @property
    def mean(self) -> float:
        """Mean of the scores."""
        return _mean(self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return _deviation(self.scores)

    @property
    def difference(self) -> float:
        """Mean difference to the defaults, paired by seed; below 0 if this is better."""
        return _mean(self.differences)

    @property
    def error(self) -> float:
        """Standard error of `difference`."""
        return _deviation(self.differences) / np.sqrt(max(1, np.isfinite(self.differences).sum()))

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


def candidates_of(
    repeats: Sequence[Repeat], chosen: Mapping[str, Mapping[str, Any]], seeds: int
) -> list[Candidate]:
    """Returns what was repeated, the lowest mean first.

    Args:
        repeats: the runs, of which all have ended.
        chosen: the values by name, `DEFAULTS` among them.
        seeds: the number of seeds.
    """
    scores = {name: np.full(seeds, np.nan) for name in chosen}
    collapsed = dict.fromkeys(chosen, 0)
    for each in repeats:
        result = each.result
        if result.get("state") in (COMPLETE, COLLAPSED) and result.get("value") is not None:
            scores[each.name][each.seed] = result["value"]
        collapsed[each.name] += result.get("state") == COLLAPSED
    reference = scores[DEFAULTS]
    candidates = [
        Candidate(name, chosen[name], scores[name], scores[name] - reference, collapsed[name])
        for name in chosen
    ]
    return sorted(candidates, key=lambda c: (c.failed, np.nan_to_num(c.mean, nan=np.inf)))


@dataclass(frozen=True)
class Verdict:
    """Which values are the best, and whether that is skill.

    Attributes:
        name: name of the best values.
        values: the best values by key; empty if they are the subject's own.
        beats: whether they beat the defaults by more than the spread; None if nothing was repeated.
        sentence: the same in words.
    """

    name: str
    values: Mapping[str, Any]
    beats: bool | None
    sentence: str


def verdict_of(candidates: Sequence[Candidate], best: Sequence[TrialRecord]) -> Verdict:
    """Returns which values are the best.

    Values beat the defaults if their mean is lower by more than the larger of both spreads. If they
    do not, the defaults are the best values.

    Args:
        candidates: what was repeated, see `candidates_of`.
        best: the complete trials, the best first.
    """
    if not best:
        return Verdict(DEFAULTS, {}, None, "No trial is complete: the defaults stand.")
    if not candidates:
        sentence = "It was not repeated: whether it beats the defaults is not known."
        return Verdict(f"trial {best[0].number}", best[0].values, None, sentence)
    first, others = candidates[0], len(candidates) - 1
    defaults = next(each for each in candidates if each.name == DEFAULTS)
    stand = partial(Verdict, DEFAULTS, defaults.values)
    if np.isnan(first.mean):
        return stand(None, "No run on fresh seeds has a value: the defaults stand.")
    if first is defaults:
        sentence = "On fresh seeds no trial is better than the defaults: the defaults stand."
        return stand(False, sentence)
    if np.isnan(first.difference):
        sentence = "The defaults have no value on fresh seeds to compare with."
        return Verdict(first.name, first.values, None, sentence)
    spread = float(np.nanmax([first.spread, defaults.spread, 0.0]))
    gain = f"{-first.difference:.4g} +- {first.error:.2g}"
    which = f"{first.name}, the best of {others} on these seeds," if others > 1 else first.name
    if -first.difference > spread:
        beats = f"On fresh seeds {which} beats the defaults by {gain}, more than the spread over "
        return Verdict(first.name, first.values, True, f"{beats}seeds, {spread:.2g}.")
    return stand(
        False,
        f"On fresh seeds {which} is better than the defaults by {gain}: that is no more than the "
        f"spread over seeds, {spread:.2g}, so the defaults stand.",
    )


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


def write_best(path: Path, candidates: Sequence[Candidate], keys: Sequence[str]) -> None:
    """Write a row for each of the values that were repeated."""
    facts = ("name", "mean", "spread", "difference", "error", "collapsed", "failed")
    seeds = [f"seed {number}" for number in range(len(candidates[0].scores))]
    rows = [
        {
            **{fact: getattr(each, fact) for fact in facts},
            **dict(zip(seeds, each.scores.tolist(), strict=True)),
            **each.values,
        }
        for each in candidates
    ]
    _write(path, (*facts, *seeds, *keys), rows)


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
