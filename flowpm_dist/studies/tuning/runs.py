"""What a worker of a tuning does: it runs trials, and then repeats of the best on fresh seeds."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import human_size, read_json, remove, write_text
from flowpm_dist.jobs.folder import WorkFolder
from flowpm_dist.jobs.job import Job, job_class
from flowpm_dist.simulation.demand import TooLargeError
from flowpm_dist.studies.process import (
    COMPLETE,
    FAILED,
    LOG,
    NO_MEMORY,
    STOPPED,
    Claim,
    Outcome,
    StopSignals,
    Subject,
    run,
)
from flowpm_dist.studies.tuning.check import PLANNED
from flowpm_dist.studies.tuning.judges import Judge, ValueTable, judge_of
from flowpm_dist.studies.tuning.options import TuneOptions, fresh_seed
from flowpm_dist.studies.tuning.records import COLLAPSED, PRUNED
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.studies.tuning.trials import Trial

COLLAPSE_CHECK = 50
"""Percentage of its length from which on a run that has learnt nothing is stopped."""
RESULT = "result.json"
SHARED_BY = "FLOWPM_TUNE_WORKERS"
"""Environment variable of the further workers of a host: the number of all its workers."""
TABLE_SECONDS = 1.0
"""Time between two looks at a run's table [s]."""
DEFAULTS = "defaults"
"""What the subject's own values are called among those that are repeated."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and its value.

    Attributes:
        state: `COMPLETE`, `FAILED`, `NO_MEMORY`, `STOPPED`, or the verdict that ended it.
        value: its value; None if it has none.
        seconds: its duration since it was begun or resumed [s].
        message: why it is not complete, or an empty text.
    """

    state: str
    value: float | None
    seconds: float
    message: str = ""


class Runner:
    """Runs the subject, watches its table, and judges it.

    Args:
        options: the run file of the tuning.
        judge: how the subject's runs are judged.
        stop: the signals that this process has received.
    """

    def __init__(self, options: TuneOptions, judge: Judge, stop: StopSignals) -> None:
        self._options, self._judge, self._stop = options, judge, stop
        self._subject, self._ranks = Subject(options.tune.subject), options.tune.ranks
        self._workers = int(os.environ.get(SHARED_BY, options.tune.workers))

    def trial(self, trial: Trial) -> RunResult:
        """Run a trial to its end, and write how it ended."""
        settings = {**self._seeds, **self._options.settings(trial.values)}
        result = self._run(settings, trial.folder, trial.claim, trial.falls_behind)
        state = result.state
        facts = {"value": result.value, "seconds": result.seconds, "message": result.message}
        trial.end(state, **facts)
        if state != STOPPED:
            trial.clear()
        return result

    @property
    def _seeds(self) -> dict[str, int]:
        """The seeds of a script's trials, so that a script without them fails in the first one."""
        tune = self._options.tune
        if not (self._subject.is_script and tune.repeats):
            return {}
        return dict.fromkeys(tune.seed_keys or self._judge.seeds, tune.seed)

    def repeat(self, values: Mapping[str, Any], folder: Path, claim: Claim) -> RunResult:
        """Run values at full length, and write how the run ended."""
        result = self._run(values, folder, claim, None)
        if result.state != STOPPED:
            write_text(folder / RESULT, json.dumps(asdict(result), indent=1) + "\n")
        return result

    def _run(
        self,
        values: Mapping[str, Any],
        folder: Path,
        claim: Claim,
        falls_behind: Callable[[int, float], bool] | None,
    ) -> RunResult:
        """Runs the subject in a folder, or resumes the run that is there.

        Args:
            values: values of its keys.
            folder: the folder of the run.
            claim: the claim on it, which this process has, and the run has as well.
            falls_behind: returns whether the run is to be pruned, see `Trial.falls_behind`; None
                for a run that nothing but its end or a signal ends.
        """
        begin = time.monotonic()
        try:
            judge = self.prepared(values, folder)
        except TooLargeError as error:
            return RunResult(NO_MEMORY, None, 0.0, str(error))
        except UserError as error:
            return RunResult(FAILED, None, 0.0, str(error))
        where = folder / "run"
        more = ["--resume"] if self._can_resume(where) else []
        if not more:
            remove(where)
        if self._subject.is_script:
            where.mkdir()
        threads = threads_of_rank(self._ranks, self._workers)
        command, environment = self._subject.command_line(
            values, self._ranks, where, threads=threads, more=more
        )
        watch = _Watch(ValueTable(where, judge), judge, falls_behind, self._stop)
        limit = self._options.tune.limit if falls_behind else None
        outcome = run(
            command,
            folder / LOG,
            environment=environment,
            limit=limit,
            claim=claim,
            asked=watch.is_over,
        )
        seconds = time.monotonic() - begin
        return watch.result(outcome, seconds)

    def prepared(self, values: Mapping[str, Any], folder: Path) -> Judge:
        """Returns how a run is judged, after the checks of its own.

        Raises:
            UserError: it cannot begin.
        """
        job = self._subject.plan(values, self._ranks, folder / PLANNED)
        if job is None:
            return self._judge
        check_memory(job, self._workers)
        own = judge_of(job.options, self._judge.metric, self._options.tune.constant)
        assert own is not None
        return own

    def _can_resume(self, where: Path) -> bool:
        """Returns whether there is a run to resume."""
        if self._subject.is_script:
            return False
        found: Any = job_class(self._subject.command).folder_type(where)
        return isinstance(found, WorkFolder) and found.can_resume()


class _Watch:
    """Looks at the table of a run while it grows, and decides when the run is over."""

    def __init__(
        self,
        table: ValueTable,
        judge: Judge,
        falls_behind: Callable[[int, float], bool] | None,
        stop: StopSignals,
    ) -> None:
        self._table, self._judge, self._behind = table, judge, falls_behind
        self._stop, self._looked = stop, -math.inf
        self._verdict, self._why = "", ""
        self._seen: list[float] = []

    def is_over(self) -> bool:
        """Returns whether the run is to stop."""
        if self._stop and not self._verdict:
            self._verdict = STOPPED
        if not self._verdict and time.monotonic() - self._looked > TABLE_SECONDS:
            self._look(ends=True)
            self._looked = time.monotonic()
        return bool(self._verdict)

    def _look(self, *, ends: bool) -> None:
        """Reports what is new in the table.

        Args:
            ends: whether the run is still going on, and may be ended.
        """
        for place, value in self._table.fresh():
            self._seen.append(value)
            if self._behind is None:
                continue
            finite = math.isfinite(value)
            behind = finite and self._behind(place, value)
            known = self._judge.length is not None
            if not ends or (known and place >= 100):
                continue
            late = known and place >= COLLAPSE_CHECK
            if self._judge.has_collapsed(self._seen) and (late or not finite):
                self._verdict, self._why = COLLAPSED, self._nothing_learnt(self._seen)
            elif behind:
                self._verdict = PRUNED
            if self._verdict:
                return

    def _nothing_learnt(self, values: Sequence[float]) -> str:
        value, constant = self._judge.value(values), self._judge.constant
        if value is None or not math.isfinite(values[-1]):
            return f"{self._judge.metric} is not finite"
        return f"{self._judge.metric} = {value:.4g}: a constant prediction reaches {constant:.4g}"

    def result(self, outcome: Outcome, seconds: float) -> RunResult:
        """Returns how the run ended.

        Args:
            outcome: how its process ended.
            seconds: its duration since it was begun or resumed [s].
        """
        if self._verdict != STOPPED:
            self._look(ends=False)
        values, judge = self._table.values, self._judge
        value = judge.value(values)
        state, message = outcome.status, outcome.message
        if self._verdict:
            state, message = self._verdict, self._why
        elif state == FAILED and values and not math.isfinite(values[-1]):
            state = COLLAPSED
        elif state == COMPLETE and not values:
            state, message = FAILED, f"it left no {judge.metric} in {judge.table}"
        elif state == COMPLETE and judge.has_collapsed(values):
            state, message = COLLAPSED, self._nothing_learnt(values)
        return RunResult(state, value, round(seconds, 3), message)


@dataclass(frozen=True)
class Repeat:
    """Values that are repeated on a fresh seed.

    Attributes:
        name: name of the values, such as "trial 7" or `DEFAULTS`.
        seed: number of the fresh seed, from 0.
        values: the values of all keys, with the seed's.
        folder: the folder of the run.
    """

    name: str
    seed: int
    values: Mapping[str, Any]
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        """How the run ended, see `RunResult`; empty if it has not."""
        return read_json(self.folder / RESULT)


def repeats_of(
    chosen: Mapping[str, Mapping[str, Any]], options: TuneOptions, judge: Judge, folder: Path
) -> list[Repeat]:
    """Returns the runs of chosen values on fresh seeds, the first seed of all of them first.

    Args:
        chosen: values by key, by their name.
        options: the run file of the tuning.
        judge: how runs are judged.
        folder: folder of the repeats.
    """
    keys = options.tune.seed_keys or judge.seeds
    found = []
    for number in range(options.tune.seeds):
        seeds = dict.fromkeys(keys, fresh_seed(options.tune.seed, number))
        for name, values in chosen.items():
            place = folder / name.replace(" ", "-") / f"seed-{number}"
            found.append(Repeat(name, number, {**values, **seeds}, place))
    return found


def repeat_all(
    repeats: Sequence[Repeat],
    runner: Runner,
    stop: StopSignals,
    done: Callable[[int], None],
    wait: float = 1.0,
) -> None:
    """Do those repeats that no other worker does, and wait until all are done, or for a signal.

    Args:
        repeats: all repeats.
        runner: what runs them.
        stop: the signals that this process has received.
        done: shows how many are done.
        wait: time between two looks at what others do [s].
    """
    while not stop:
        left = [each for each in repeats if not each.result]
        done(len(repeats) - len(left))
        if not left:
            return
        for each in left:
            claim = Claim(each.folder)
            if claim.take():
                try:
                    if not each.result:
                        runner.repeat(each.values, each.folder, claim)
                finally:
                    claim.give_up()
                break
        else:
            time.sleep(wait)


def check_memory(job: Job[Any, Any], workers: int) -> None:
    """Check that this host has memory for as many such jobs at once as it has workers.

    Raises:
        TooLargeError: it has not.
    """
    if job.demand is None:
        return
    host, needed = launch.host_memory(), job.estimate.on_host
    job.demand.check(job.estimate, host)
    if needed * workers > host.limit:
        raise TooLargeError(
            f"tune.workers = {workers}: so many runs at once need about "
            f"{human_size(needed * workers)}, and this host has {human_size(host.limit)}; "
            f"{host.limit // needed} would fit"
        )


def threads_of_rank(ranks: int, workers: int) -> int | None:
    """Returns the threads of a rank where workers share the cores of this host.

    None leaves them to the run: it is alone, or the user has set them.
    """
    if workers == 1 or launch.THREADS in os.environ:
        return None
    return max(1, launch.available_cores() // (ranks * workers))
