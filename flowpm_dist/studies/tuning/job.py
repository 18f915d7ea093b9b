"""The work of `flowpm-dist tune`: its folder, and the job, which several processes do together.

Nothing here imports TensorFlow. optuna is imported when the work begins.
"""

from __future__ import annotations

import collections
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.errors import WorkError, decoration
from flowpm_dist.jobs.folder import CHECKSUMS, FIGURES_AND_TABLES, WorkFolder
from flowpm_dist.jobs.job import PROGRAM, Command, Costs, Job, StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, read_rows
from flowpm_dist.jobs.run_file import flat, write_run_file
from flowpm_dist.options import as_written
from flowpm_dist.simulation.demand import TooLargeError
from flowpm_dist.studies.process import COMPLETE, STOPPED, is_on_one_host, run
from flowpm_dist.studies.subject import Values
from flowpm_dist.studies.tuning import check, results
from flowpm_dist.studies.tuning.options import Purpose, TuneOptions
from flowpm_dist.studies.tuning.records import COUNTED, TrialRecord
from flowpm_dist.studies.tuning.results import Candidate, Gain, Verdict
from flowpm_dist.studies.tuning.runs import DEFAULTS, SHARED_BY, check_memory, judged_run, repeat
from flowpm_dist.studies.workers import WAIT_SECONDS, StopSignals, alone
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.studies.tuning.trials import Trials

MARK, TRIALS, BEST = "tune.json", "trials.csv", "best.csv"
FIGURES = ("history.png", "importances.png", "parallel.png")
ENOUGH = ("trials", "repeats", "seeds")
"""Keys of [tune] that a later run may raise; the mark says what is done of them."""


class TuneFolder(WorkFolder):
    """A folder in which the workers of one tuning share its trials.

    Attributes:
        trials, repeats: folders of the trials and of the repeats on fresh seeds.
        storage: folder of optuna's storage.
    """

    kind = "tuning"
    contents = (
        MARK, "run.toml", CHECKSUMS, "storage", "trials", "repeats", "workers", TRIALS, BEST,
        "best.toml", *FIGURES,
    )  # fmt: skip
    begun = MARK
    inner = "run"
    shared = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.trials, self.repeats = self.path / "trials", self.path / "repeats"
        self.storage = self.path / "storage"

    @override
    def saved(self) -> str:
        return f"the trials in {self.path} are kept: go on with --resume"

    @override
    def record(self) -> RunRecord | None:
        mark, rows = self.mark(), read_rows(self.path / TRIALS)
        counted = sum(row["state"] in COUNTED for row in rows)
        best: Any = mark.get("best") or {}
        values = {"best": best["name"], **best["values"]} if best else {}
        if mark.get("beats") is not None:
            values["beats the defaults"] = as_written(mark["beats"])
        return self.recorded(f"{counted} trials" if rows else "", values)


@dataclass(frozen=True)
class TuningResult:
    """The result of a tuning.

    Attributes:
        records: the trials that count.
        choice: what was repeated on fresh seeds to choose the best, the best first.
        gain: what the best gains over the defaults; None if nothing was repeated.
        verdict: which values are the best.
    """

    records: list[TrialRecord]
    choice: list[Candidate]
    gain: Gain | None
    verdict: Verdict


class TuneJob(Job[TuneOptions, TuningResult]):
    """A tuning that was checked and can begin."""

    command = Command(
        "tune",
        "Search for the values of a run file's keys with which a training learns best.",
        run_file="What to tune, and between which values.",
        example="flowpm-dist tune tune.toml --output tuned",
        starts_jobs=True,
    )
    options_type, folder_type = TuneOptions, TuneFolder

    def check(self) -> None:
        """Checks optuna, the subject with each value of the space, and the folder.

        Raises:
            UserError: optuna is not installed, or the subject cannot be tuned.
        """
        check.check_optuna()
        self.judge, self._subject = check.checked_subject(
            self.options, self.request.run_file, self.folder.path
        )
        super().check()

    @override
    def describe(self) -> str:
        tune = self.options.tune
        ranks = f" on {tune.ranks} ranks" if tune.ranks > 1 else ""
        keys = len(self.options.space)
        pruning = "no pruning" if tune.pruning == "none" else tune.pruning
        return (
            f"{tune.trials} trials of {tune.subject.name}{ranks}, {tune.sampler}, {pruning}; "
            f"{keys} key{'s' * (keys > 1)}, {self.judge.metric}; the best {tune.repeats} and the "
            f"defaults on fresh seeds, {tune.seeds} of each"
        )

    @property
    @override
    def costs(self) -> Costs:
        tune, subject = self.options.tune, self._subject
        # An ended trial keeps only tables and pictures.
        choice = tune.repeats if tune.repeats > 1 else 0
        whole = tune.workers + tune.seeds * (choice + 2) * (tune.repeats > 0)
        disk = FIGURES_AND_TABLES + whole * (0 if subject is None else subject.costs.disk)
        ranks, cores, warnings = tune.ranks * tune.workers, launch.available_cores(), []
        if tune.repeats and tune.seeds < results.FEWEST_PAIRS:
            needed = f"a verdict needs at least {results.FEWEST_PAIRS}"
            warnings.append(f"tune.seeds = {tune.seeds}: {needed}")
        if is_on_one_host():
            if ranks > cores:
                share_of = f"tune.ranks = {tune.ranks} and tune.workers = {tune.workers}"
                warnings.append(f"{share_of}: {ranks} ranks share {cores} cores here")
            try:
                check_memory(subject, tune.workers)
            except TooLargeError as error:
                warnings.append(str(error))
        return Costs(None, disk, ranks=ranks, warnings=tuple(warnings))

    @property
    @override
    def is_complete(self) -> bool:
        """Whether there is nothing left to do, also if more trials are asked for than were made."""
        mark = self.folder.mark()
        return super().is_complete and all(
            int(str(mark.get(key, 0))) >= getattr(self.options.tune, key) for key in ENOUGH
        )

    def work(self, progress: Progress) -> TuningResult:
        """Makes the trials and the repeats that no other worker makes, and writes the results.

        Raises:
            StopError: a signal stopped it; trials that were running will be continued.
            WorkError: no trial is complete, or the storage cannot be written.
        """
        from flowpm_dist.studies.tuning.storage import storage_errors

        with storage_errors(self.folder.storage):
            return self._work(progress)

    def _work(self, progress: Progress) -> TuningResult:
        from flowpm_dist.studies.tuning.trials import Trials

        options, folder, tune = self.options, self.folder, self.options.tune
        with alone(folder.repeats):
            write_run_file(folder.run_file, options.resolved())
            folder.keep_checksums(options.checksums())
            if folder.is_complete:  # more trials or seeds are asked for
                folder.write_mark(complete=False)
        trials = Trials(
            folder.storage,
            folder.trials,
            tune,
            options.space,
            first=self._first_place,
            begin_with=self._defaults if options.holds(self._defaults) else None,
        )
        with StopSignals(progress.say) as stop, self._other_workers(stop, progress):
            self._make_trials(trials, stop, progress)
            choice, gain = self._make_repeats(trials, stop, progress)
        if stop:
            place = f"after {len(trials.counted)} of {tune.trials} trials"
            raise StopError(stop.name, place)
        verdict = results.verdict_of(gain, trials.best, tune.worth)
        result = TuningResult(trials.counted, choice, gain, verdict)
        with alone(folder.repeats):  # each worker writes the same
            self._write(result, trials)
            self._draw(result, trials, progress.warn)
        if not trials.best:
            first_trial = result.records[0]
            message = f"trial {first_trial.number} is {first_trial.state}: {first_trial.message}"
            raise WorkError(f"{verdict.sentence} {message}")
        return result

    @property
    def _defaults(self) -> dict[str, Any]:
        """The subject's own value of each key of the space; nothing for a script."""
        known = {} if self._subject is None else flat(self._subject.options.to_table())
        return {key: known[key] for key in self.options.space if key in known}

    @property
    def _first_place(self) -> int:
        """The percentage, or the place of a script, at which trials are first compared."""
        tune = self.options.tune
        if tune.first is not None:
            return tune.first
        return 1 if self.judge.length is None else max(1, round(100 / tune.reduction**2))

    @contextmanager
    def _other_workers(self, stop: StopSignals, progress: Progress) -> Iterator[None]:
        """A context in which the other workers of this host run, each as a process of its own."""
        tune, folder = self.options.tune, self.folder
        name = f"{socket.gethostname()}-{os.getpid()}"
        failed = threading.Event()
        words = [self.command.name, str(folder.run_file), "--output", str(folder.path), "--resume"]
        command = [*PROGRAM, *words, "--set", "tune.workers=1"]
        logs = folder.path / "workers"

        def watch(number: int) -> None:
            outcome = run(
                command,
                logs / f"{name}-{number}.txt",
                environment={**os.environ, SHARED_BY: str(tune.workers)},
                should_stop=lambda: bool(stop) or failed.is_set(),
            )
            if outcome.status not in (COMPLETE, STOPPED):
                progress.warn(f"worker {number} has ended: {outcome.message}")

        threads = [threading.Thread(target=watch, args=(n,)) for n in range(1, tune.workers)]
        if threads:
            logs.mkdir(exist_ok=True)
        for thread in threads:
            thread.start()
        try:
            yield
        except BaseException:
            failed.set()
            raise
        finally:
            for thread in threads:
                thread.join()

    def _make_trials(self, trials: Trials, stop: StopSignals, progress: Progress) -> None:
        """Makes trials until all have ended, or until a signal comes."""
        options, total = self.options, self.options.tune.trials
        while not stop and not trials.are_done:
            best = trials.best
            state = f"best {best[0].value:.4g}" if best else ""
            progress("trials", len(trials.counted), total, state)
            if (trial := trials.next()) is None:
                time.sleep(WAIT_SECONDS)
                continue
            settings, claim = options.settings(trial.values), trial.claim
            ended = judged_run(options, settings, trial.folder, claim, stop, trial.falls_behind)
            trials.end(trial, ended)
            with alone(self.folder.storage):
                self._write_trials(trials)
            if ended.state == STOPPED:
                break
            value = "" if ended.value is None else f", {self.judge.metric} {ended.value:.4g}"
            summary = f"trial {trial.number}: {ended.state}{value}, {ended.seconds:.0f} s"
            progress.say(f"{summary}; {_shown(trial.values)}")
        progress("trials", len(trials.counted), total)

    def _write_trials(self, trials: Trials) -> None:
        path = self.folder.path / TRIALS
        results.write_trials(path, trials.records, [*self.options.space])

    def _make_repeats(
        self, trials: Trials, stop: StopSignals, progress: Progress
    ) -> tuple[list[Candidate], Gain | None]:
        """Makes the runs on fresh seeds: first those that choose, then those that judge the choice.

        Returns:
            What was repeated for the choice, the best first, and the gain of the best; nothing if
            no trial has other values than the defaults, or a signal came.
        """
        defaults, count = self._defaults, self.options.tune.repeats
        others = [record for record in trials.best if {**record.values} != defaults][:count]
        if stop or not others:
            return [], None
        chosen = {f"trial {record.number}": record.values for record in others}

        def repeated(chosen: Mapping[str, Values], purpose: Purpose) -> list[Candidate]:
            place, judge = self.folder.repeats, self.judge
            runs = repeat(chosen, purpose, self.options, judge, place, stop, progress)
            return [Candidate(name, chosen[name], runs[name]) for name in chosen]

        choice = results.ranked(repeated(chosen, "choice")) if len(chosen) > 1 else []
        name = choice[0].name if choice else [*chosen][0]
        known = defaults if {*defaults} == {*self.options.space} else {}
        pair = repeated({name: chosen[name], DEFAULTS: known}, "verdict")
        return choice, Gain(*pair)

    def _write(self, result: TuningResult, trials: Trials) -> None:
        """Writes the results."""
        options, path, verdict = self.options, self.folder.path, result.verdict
        self._write_trials(trials)
        if result.gain is not None:
            keys, seeds = [*options.space], options.tune.seeds
            results.write_best(path / BEST, result.choice, result.gain, keys, seeds)
        results.write_run_file(path / "best.toml", options, verdict)
        self.folder.write_mark(
            complete=bool(trials.best),
            **{key: getattr(options.tune, key) for key in ENOUGH},
            best={"name": verdict.name, "values": dict(verdict.values)},
            metric=self.judge.metric,
            verdict=verdict.sentence,
            beats=verdict.beats,
            states=_count(result.records),
        )

    def _draw(self, result: TuningResult, trials: Trials, warn: Callable[[str], None]) -> None:
        """Draws the results, which are complete."""
        with decoration("figures", warn):
            from flowpm_dist.studies.tuning.figures import figures

            space, metric = self.options.space, self.judge.metric
            drawings = figures(result.records, trials.importances, space, metric)
            for name, draw in drawings.items():
                with drawing(self.folder.path / name, warn) as save:
                    save(draw())

    @override
    def report(self, result: TuningResult) -> str:
        path, verdict, metric = self.folder.path, result.verdict, self.judge.metric
        lines = [_scores(each) for each in result.choice]
        repeated = [f"\n{metric} on fresh seeds, at full length:", *lines] if lines else []
        if (gain := result.gain) is not None:
            repeated += [f"\n{metric} on {'other ' * bool(lines)}fresh seeds, for the verdict:"]
            repeated += [_scores(gain.winner), _scores(gain.defaults)]
        counts = ", ".join(f"{number} {state}" for state, number in _count(result.records).items())
        return f"""
Tuning in {path}: {len(result.records)} trials, {counts}
  best.toml           the run file with the best values
  trials.csv          each trial; best.csv: what was repeated on fresh seeds
  history.png         the trials in their order
  importances.png     how much each key explains; parallel.png: all values together
{chr(10).join(repeated)}
Best: {verdict.name}, {_shown(verdict.values)}
{verdict.sentence}"""


def _scores(candidate: Candidate) -> str:
    scores = f"{candidate.mean:.4g} +- {candidate.spread:.2g}"
    return f"  {candidate.name}: {scores}; {_shown(candidate.values)}"


def _shown(values: Mapping[str, Any]) -> str:
    texts = [
        f"{key} = {f'{value:.4g}' if isinstance(value, float) else as_written(value)}"
        for key, value in values.items()
    ]
    return ", ".join(texts) or "the subject's own values"


def _count(records: list[TrialRecord]) -> dict[str, int]:
    counter = collections.Counter(record.state for record in records)
    return {state: counter[state] for state in COUNTED if counter[state]}
