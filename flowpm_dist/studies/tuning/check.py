"""Checks of a tuning before its work: every value of its space must be one that the subject takes.

Nothing here imports TensorFlow or optuna.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.options import Problem, as_written
from flowpm_dist.studies.subject import check_subject
from flowpm_dist.studies.tuning.judges import Judge, judge_of
from flowpm_dist.studies.tuning.options import TuneOptions, fresh_seed

MOST_CORNERS = 64
"""Combinations of the ends of all keys that are tried."""


def check_optuna() -> None:
    """Check that optuna is installed.

    Raises:
        UserError: it is not.
    """
    if find_spec("optuna") is None:
        raise UserError("tune needs the package optuna: pip install optuna")


def checked_subject(
    options: TuneOptions, source: Path, output: Path
) -> tuple[Judge, Job[Any, Any] | None]:
    """Returns how trials are judged, and the subject's own job, after the checks of its space.

    Args:
        options: the run file of the tuning.
        source: its path, for messages.
        output: folder of the tuning.

    Raises:
        UserError: the subject cannot be tuned.
        ConfigError: the run file does not fit the subject; the error has all problems.
    """
    check_subject(options.target)
    job = options.plan({}, output)
    judge = judge_of(
        None if job is None else job.options, options.tune.metric, options.tune.constant
    )
    if judge is None:
        subjects = "a training, an emulation, a reconstruction or a script"
        wrong = options.problem("tune.subject", f"measures no validation: give {subjects}")
        raise ConfigError(source, [wrong])
    problems = [*_fixed(options, judge)] or [*_misfits(options, judge, output)]
    if problems := problems or [*_without_looks(options, output)]:
        raise ConfigError(source, problems)
    return judge, job


def _fixed(options: TuneOptions, judge: Judge) -> Iterator[Problem]:
    """Yields the keys that may not be tuned or shortened, and a metric that does not validate."""
    if judge.columns and judge.metric not in judge.columns:
        allowed = " or ".join(f'"{name}"' for name in judge.columns)
        yield options.problem("tune.metric", f"must be {allowed}")
    for key in options.space:
        if why := judge.why_fixed(key):
            yield Problem(f"space.{key}", why)
    for key in options.tune.seed_keys or ():
        if key in judge.fixed:
            yield Problem("tune.seed_keys", f"has {key}, which {judge.fixed[key]}")
    for key in options.shortened:
        if key == "data.validation":
            continue  # the same in all trials
        if judge.only and not key.startswith(judge.only):
            yield Problem(f"shortened.{key}", judge.why_fixed(key))


def _misfits(options: TuneOptions, judge: Judge, output: Path) -> Iterator[Problem]:
    """Yields the keys and values that the subject does not take."""

    def wrong(values: Mapping[str, Any]) -> str:
        try:
            options.plan(values, output)
        except ConfigError as error:
            return "; ".join(map(str, error.problems))
        except UserError as error:
            return str(error)
        return ""

    if options.target.is_script:
        return
    if wrong(options.shortened):  # otherwise each fits with the others
        for key, value in options.shortened.items():
            if why := wrong({key: value}):
                yield Problem(f"shortened.{key}", f"= {as_written(value)}: {why}")
    for key in options.tune.seed_keys or judge.seeds:
        if why := wrong({key: fresh_seed(options.tune.seed, 0, "choice")}):
            yield Problem("tune.seed_keys", f"has {key}: {why}")
    refused = set[str]()
    for values in options.corners(MOST_CORNERS):
        if refused & {*values}:
            continue
        if why := wrong(options.settings(values)) or wrong(values):
            refused |= {*values}
            shown = ", ".join(f"{key} = {as_written(value)}" for key, value in values.items())
            yield Problem(", ".join(f"space.{key}" for key in values), f"allows {shown}: {why}")


def _without_looks(options: TuneOptions, output: Path) -> Iterator[Problem]:
    """Yields the problem of pruning trials that are validated only at their end."""
    job = options.plan(options.shortened, output)
    judge = judge_of(None if job is None else job.options, options.tune.metric)
    looks = None if judge is None else judge.looks
    if options.tune.pruning != "none" and looks is not None and looks < 2:
        remedy = 'validate more often, or give "none"'
        message = f"a trial is validated only at its end: {remedy}"
        yield options.problem("tune.pruning", message)
