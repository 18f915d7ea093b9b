"""Runs of a tuning's subject: trials, and repeats of the best of them on fresh seeds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.locks import Lock
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulation.demand import TooLargeError
from flowpm_dist.studies.process import COMPLETE, FAILED, NO_MEMORY, STOPPED, Outcome
from flowpm_dist.studies.subject import RUN, Values, read_result, write_result
from flowpm_dist.studies.tuning.judges import Judge, judge_of
from flowpm_dist.studies.tuning.options import Purpose, TuneOptions, TuneSection, fresh_seed
from flowpm_dist.studies.tuning.records import COLLAPSED, PRUNED, JudgedRun
from flowpm_dist.studies.workers import StopSignals, share
from meshimpl import launch

COLLAPSE_CHECK = 50
"""Percentage of its length from which on a run that has learnt nothing is stopped."""
SHARED_BY = "FLOWPM_TUNE_WORKERS"
"""Environment variable of the further workers of a host: the number of all its workers."""
TABLE_SECONDS = 1.0
"""Time between two looks at a run's table [s]."""
DEFAULTS = "defaults"
"""The name of the subject's own values among those that are repeated."""
PLACES: Mapping[Purpose, str] = {"choice": "seed", "verdict": "verdict"}
"""Beginnings of the names of the repeats' folders."""


def prepared(options: TuneOptions, values: Mapping[str, Any], folder: Path) -> Judge:
    """Checks that a run can begin, and returns how it is judged.

    Args:
        options: the run file of the tuning.
        values: values of the subject's keys.
        folder: the folder of the run.

    Raises:
        UserError: it cannot begin.
    """
    tune, job = options.tune, options.plan(values, folder)
    check_memory(job, workers_here(tune))
    judge = judge_of(None if job is None else job.options, tune.metric, tune.constant)
    assert judge is not None
    return judge


def judged_run(
    options: TuneOptions,
    values: Mapping[str, Any],
    folder: Path,
    claim: Lock,
    stop: StopSignals,
    falls_behind: Callable[[int, float], bool] | None = None,
) -> JudgedRun:
    """Run the subject in a folder, or resume the run that is there, and judge it by its table.

    Args:
        options: the run file of the tuning.
        values: values of the subject's keys.
        folder: the folder of the run.
        claim: the claim on it, which this process has, and the run has as well.
        stop: the signals that this process has received.
        falls_behind: returns whether the run is to be pruned, see `Trial.falls_behind`; None for a
            run that nothing but its end or a signal ends.
    """
    tune = options.tune
    try:
        judge = prepared(options, values, folder)
    except UserError as error:
        status = NO_MEMORY if isinstance(error, TooLargeError) else FAILED
        return JudgedRun(status, message=str(error))
    watch = Watch(folder / RUN / judge.table, judge, falls_behind, stop)
    outcome = options.target.run(
        folder,
        values,
        tune.ranks,
        threads=threads_of_rank(tune.ranks, workers_here(tune)),
        resume=True,
        limit=tune.limit if falls_behind else None,
        claim=claim,
        should_stop=watch.is_over,
    )
    return watch.judged(outcome)


@dataclass
class Watch:
    """Reads the table of a run while it grows, and decides when the run is over.

    Attributes:
        table: the table.
        judge: how the run is judged.
        falls_behind: returns whether the run is to be pruned; None for a run that is not.
        stop: the signals that this process has received.
    """

    table: Path
    judge: Judge
    falls_behind: Callable[[int, float], bool] | None
    stop: StopSignals
    _looked: float = -math.inf
    _state: str = ""
    _reason: str = ""
    _values: list[float] = field(default_factory=list)

    def is_over(self) -> bool:
        """Returns whether the run is to stop."""
        if self.stop and not self._state:
            self._state = STOPPED
        if not self._state and time.monotonic() - self._looked > TABLE_SECONDS:
            self._look(ends=True)
            self._looked = time.monotonic()
        return bool(self._state)

    def _look(self, *, ends: bool) -> None:
        """Reports the values that were added to the table.

        Args:
            ends: whether the run is still going on, and may be ended.
        """
        for place, value in self.judge.values_in(self.table)[len(self._values) :]:
            self._values.append(value)
            if self.falls_behind is None:
                continue
            finite = math.isfinite(value)
            behind = finite and self.falls_behind(place, value)
            known = self.judge.length is not None
            if not ends or (known and place >= 100):
                continue
            late = known and place >= COLLAPSE_CHECK
            if self.judge.has_collapsed(self._values) and (late or not finite):
                self._state, self._reason = COLLAPSED, self._nothing_learnt()
            elif behind:
                self._state = PRUNED
            if self._state:
                return

    def _nothing_learnt(self) -> str:
        value, constant = self.judge.value(self._values), self.judge.constant
        if value is None or not math.isfinite(self._values[-1]):
            return f"{self.judge.metric} is not finite"
        return f"{self.judge.metric} = {value:.4g}: a constant prediction reaches {constant:.4g}"

    def judged(self, outcome: Outcome) -> JudgedRun:
        """Returns how the run ended, with its value.

        Args:
            outcome: how its process ended.
        """
        if self._state != STOPPED:
            self._look(ends=False)
        values, judge = self._values, self.judge
        state, message = outcome.status, outcome.message
        if self._state:
            state, message = self._state, self._reason
        elif state == FAILED and values and not math.isfinite(values[-1]):
            state = COLLAPSED
        elif state == COMPLETE and not values:
            state, message = FAILED, f"it left no {judge.metric} in {judge.table}"
        elif state == COMPLETE and judge.has_collapsed(values):
            state, message = COLLAPSED, self._nothing_learnt()
        return JudgedRun(state, judge.value(values), round(outcome.seconds, 3), message)


def repeat(
    chosen: Mapping[str, Values],
    purpose: Purpose,
    options: TuneOptions,
    judge: Judge,
    folder: Path,
    stop: StopSignals,
    progress: Progress,
) -> dict[str, list[JudgedRun | None]]:
    """Run chosen values at full length on fresh seeds, shared with other workers.

    Args:
        chosen: values by key, by their name.
        purpose: what the runs are for.
        options: the run file of the tuning.
        judge: how runs are judged.
        folder: folder of the repeats.
        stop: the signals that this process has received.
        progress: shows how many runs have ended.

    Returns:
        How the runs of each name ended [seed]; None for a run that was not made before a signal.
    """
    numbers = range(options.tune.seeds)
    folders = {
        name: [folder / name.replace(" ", "-") / f"{PLACES[purpose]}-{n}" for n in numbers]
        for name in chosen
    }

    def run(name: str, number: int, claim: Lock) -> None:
        place = folders[name][number]
        if read_result(place, JudgedRun) is None:
            seed = fresh_seed(options.tune.seed, number, purpose)
            seeds = dict.fromkeys(options.tune.seed_keys or judge.seeds, seed)
            ended = judged_run(options, {**chosen[name], **seeds}, place, claim, stop)
            if ended.state != STOPPED:
                write_result(place, ended)

    def show(done: int, place: Path) -> None:
        progress(f"repeats on fresh seeds for the {purpose}", done, len(pieces))

    pieces = {folders[name][n]: partial(run, name, n) for n in numbers for name in chosen}
    share(pieces, stop, show)
    return {
        name: [read_result(place, JudgedRun) for place in places]
        for name, places in folders.items()
    }


def check_memory(job: Job[Any, Any] | None, workers: int) -> None:
    """Check that this host has memory for as many such jobs at once as it has workers.

    Raises:
        TooLargeError: it has not. What a script, which is no job, needs is not known.
    """
    if job is None or (demand := job.costs.demand) is None:
        return
    host, estimate = launch.host_memory(), demand.estimate()
    demand.check(estimate, host)
    needed = estimate.on_host
    if needed * workers > host.limit:
        raise TooLargeError(
            f"tune.workers = {workers}: so many runs at once need about "
            f"{human_size(needed * workers)}, and this host has {human_size(host.limit)}; "
            f"{host.limit // needed} would fit"
        )


def workers_here(tune: TuneSection) -> int:
    """Returns the number of workers that share this host."""
    return int(os.environ.get(SHARED_BY, tune.workers))


def threads_of_rank(ranks: int, workers: int) -> int | None:
    """Returns the threads of a rank where workers share the cores of this host.

    None leaves them to the run: it is alone, or the user has set them.
    """
    if workers == 1 or launch.THREADS in os.environ:
        return None
    return max(1, launch.available_cores() // (ranks * workers))
