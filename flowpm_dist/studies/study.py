"""The work of `flowpm-dist study`: its folder, and the job.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.errors import UserError, decoration
from flowpm_dist.io.files import write_text
from flowpm_dist.jobs.folder import CHECKSUMS, FIGURES_AND_TABLES, WorkFolder, check_room
from flowpm_dist.jobs.job import Command, Costs, Job, StopError
from flowpm_dist.jobs.locks import Lock
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, write_rows
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulation.demand import OVERRIDE
from flowpm_dist.studies import summary
from flowpm_dist.studies.measures import STEP, measured
from flowpm_dist.studies.options import Point, StudyOptions
from flowpm_dist.studies.process import COMPLETE, FAILED, NO_MEMORY, STOPPED, is_on_one_host
from flowpm_dist.studies.rows import all_planned
from flowpm_dist.studies.subject import RESULT, RUN, read_result, write_result
from flowpm_dist.studies.workers import StopSignals, alone, share
from meshimpl import launch

MARK = "study.json"
GRACE_SECONDS = 20.0
"""Time that a run has to stop; it is made anew later [s]."""
SUMMARY, LARGEST = "summary.csv", "largest.csv"
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, ArithmeticError)
"""Errors of files that a run has left with other contents than it should."""


class StudyFolder(WorkFolder):
    """A folder that the workers of one study own together.

    Attributes:
        runs: the folder of all runs: a folder each, with the results of the subject in it.
    """

    kind = "study"
    contents = (
        MARK, "run.toml", CHECKSUMS, "runs", "points.csv", SUMMARY, "summary.md", LARGEST,
        *summary.FIGURES,
    )  # fmt: skip
    begun = MARK
    inner = RUN
    shared = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.runs = self.path / "runs"

    @override
    def last_checkpoint(self) -> tuple[Path, str] | None:
        count = len(self.ended())
        return (self.runs, f"{count} runs") if count else None

    @override
    def record(self) -> RunRecord | None:
        runs = self.ended()
        return self.recorded(f"{len(runs)} runs" if runs else "")

    def ended(self) -> list[summary.Run]:
        """Returns all runs that have ended, by their numbers.

        Raises:
            UnreadableError: the file of a run has values of other types.
        """
        folders = [path.parent for path in sorted(self.runs.glob(f"*/{RESULT}"))]
        runs = (read_result(folder, summary.Run) for folder in folders)
        return [run for run in runs if run is not None]


class StudyJob(Job[StudyOptions, list[summary.Run]]):
    """A study that was checked and can begin."""

    command = Command(
        "study",
        "Run a job or a script at many points, and measure time, memory, energy and scores.",
        run_file="The subject, and the points at which it is run.",
        example="flowpm-dist study examples/study.toml --output scaling",
        starts_jobs=True,
    )
    options_type, folder_type = StudyOptions, StudyFolder
    _largest: Job[Any, Any] | None = None
    """The job of the point that needs the most memory on this host."""
    _disk = 0

    def check(self) -> None:
        """Checks the folder, the limit of memory, and the job of each point.

        Raises:
            UserError: a run could not begin; the message names its values.
        """
        super().check()
        study, host = self.options.study, launch.host_memory()
        if study.memory is not None:
            if study.memory_bytes > host.limit:
                has = human_size(host.limit)
                raise UserError(f"study.memory = {study.memory:g}: this host has {has}")
            if not is_on_one_host():
                raise UserError("study.memory: is looked at on one host, and this job has several")
        if not self.options.points():
            raise UserError(f"{self.request.run_file}: no mesh.shape in [vary] is of study.ranks")

        def plan(point: Point) -> Job[Any, Any] | None:
            smallest = self.options.with_value(point, study.smallest) if study.largest else point
            output = self.folder.runs / smallest.name / RUN
            return self.options.target.plan(smallest.settings, point.ranks, output)

        points = [point for point in self.options.points() if point.repeat == 0]
        plans = {str(point): partial(plan, point) for point in points}
        jobs = [job for job in all_planned(plans) if job is not None]
        if jobs:
            self._largest = max(jobs, key=lambda job: job.costs.estimate.on_host)
        self._disk = study.repeats * sum(job.costs.disk for job in jobs)
        if not self.request.elsewhere:
            check_room(self.folder.path, self.costs.disk, "the runs need at most")

    @override
    def describe(self) -> str:
        study, count = self.options.study, len(self.options.points())
        on = f"on {', '.join(map(str, study.ranks))} ranks"
        if study.largest:
            fits = f"the largest {study.largest} that fits"
            return f"{study.subject.name}, {count} searches {on}; {fits}"
        return f"{study.subject.name}, {count} runs {on}; {study.repeats} at each point"

    @property
    @override
    def costs(self) -> Costs:
        study, largest = self.options.study, self._largest
        most, threads = max(study.ranks), study.threads or 1
        warnings, cores = [], launch.available_cores()
        if is_on_one_host() and most * threads > cores:
            warnings.append(f"{most * threads} threads of {most} ranks share {cores} cores here")
        # With a limit of memory, or a script, the memory is not known.
        demand = None if largest is None or study.memory is not None else largest.costs.demand
        disk = FIGURES_AND_TABLES + self._disk
        return Costs(demand, disk, ranks=most, warnings=tuple(warnings))

    @property
    @override
    def is_complete(self) -> bool:
        """Whether all runs, repetitions that were added too, have ended and are summarised."""
        searches = self.options.study.largest is not None
        whole = searches or len(self.folder.ended()) >= len(self.options.points())
        return super().is_complete and whole and all(path.exists() for path in self._summaries)

    @property
    def _summaries(self) -> list[Path]:
        names = [SUMMARY] if self.options.study.largest is None else [SUMMARY, LARGEST]
        return [self.folder.path / name for name in names]

    def work(self, progress: Progress) -> list[summary.Run]:
        """Makes the runs that no other worker makes, and summarises all. Returns the runs.

        Raises:
            StopError: a signal stopped it; runs that have ended are kept.
        """
        points = {self.folder.runs / point.name: point for point in self.options.in_random_order()}
        with alone(self.folder.runs):
            write_run_file(self.folder.run_file, self.options.resolved())
            self.folder.keep_checksums(self.options.checksums())

        def show(count: int, folder: Path) -> None:
            progress("run", count, len(points), str(points[folder]))

        with StopSignals(progress.say) as stop:
            pieces = {
                folder: partial(self._do, point, stop, progress) for folder, point in points.items()
            }
            count = share(pieces, stop, show)
        if stop and count < len(points):
            self._write(progress, complete=False)
            raise StopError(stop.name, f"after {count} runs of {len(points)}")
        return self._write(progress, complete=True)

    def _do(self, point: Point, stop: StopSignals, progress: Progress, claim: Lock) -> None:
        """Makes the runs of a point that were not made yet.

        A search doubles the value of `largest` until it does not fit, and bisects then.
        """
        study = self.options.study
        if study.largest is None:
            self._run(point, stop, claim)
            return
        most = study.most // study.smallest
        fits, too_large, trial = 0, most + 1, 1
        while fits + 1 < too_large:
            value = trial * study.smallest
            ended = self._run(self.options.with_value(point, value), stop, claim)
            if ended is not None:
                progress.say(f"{point}: {study.largest} = {value}")
            if ended is None or ended.status not in (COMPLETE, NO_MEMORY):
                return  # another failure says nothing about the memory
            if ended.status == COMPLETE:
                fits = trial
            else:
                too_large = trial
            trial = min(2 * fits, most) if too_large > most else (fits + too_large) // 2

    def _run(self, point: Point, stop: StopSignals, claim: Lock) -> summary.Run | None:
        """Returns a run. Makes it unless it has ended before; None if it was stopped."""
        folder = self.folder.runs / point.name
        if (before := read_result(folder, summary.Run)) is not None:
            return before
        study = self.options.study
        more = [] if study.memory is None else [OVERRIDE]
        more += [] if study.trace is None else ["--trace", str(study.trace)]
        outcome = self.options.target.run(
            folder,
            point.settings,
            point.ranks,
            threads=study.threads,
            more=more,
            memory=study.memory_bytes or None,
            limit=study.limit,
            grace=GRACE_SECONDS,
            claim=claim,
            should_stop=lambda: bool(stop),
        )
        if outcome.status == STOPPED:
            return None
        if outcome.code == launch.HOST_LOST:  # which says nothing about the point
            print(outcome.message, file=sys.stderr, flush=True)
            raise SystemExit(launch.HOST_LOST)
        ended = summary.Run(
            point.number, dict(point.varied), point.ranks, point.repeat,
            outcome.status, outcome.seconds, outcome.message,
        )  # fmt: skip
        if outcome.status == COMPLETE:
            try:
                values = summary.checked(measured(folder / RUN, study.skip))
                ended = replace(ended, measured=values)
            except UNREADABLE as error:
                message = f"{folder / RUN}: its measurements cannot be read: {error}"
                ended = replace(ended, status=FAILED, message=message)
        write_result(folder, ended)
        return ended

    def _write(self, progress: Progress, *, complete: bool) -> list[summary.Run]:
        """Writes tables and figures of the runs so far; the last worker to end writes all."""
        with alone(self.folder.runs):
            runs = self.folder.ended()
            if runs:
                summary.write_runs(self.folder.path / "points.csv", runs)
            if complete:
                for path in self._summaries:  # of fewer runs
                    path.unlink(missing_ok=True)
                self.folder.write_mark(complete=True)
            if runs:
                self._summarise(runs, progress.warn)
        return runs

    def _summarise(self, runs: list[summary.Run], warn: Callable[[str], None]) -> None:
        """Writes what follows from points.csv: the summaries and the figures."""
        path, largest = self.folder.path, self.options.study.largest
        again = "To make it, give --resume."
        with decoration(SUMMARY, warn, again):
            write_rows(path / SUMMARY, summary.summary_rows(summary.groups_of(runs)))
        with decoration("summary.md", warn):
            title = f"{self.options.study.subject.name}: {len(runs)} runs"
            write_text(path / "summary.md", summary.summary_text(summary.groups_of(runs), title))
        if largest:
            with decoration(LARGEST, warn, again):
                write_rows(path / LARGEST, summary.largest_rows(summary.groups_of(runs), largest))
            return
        with decoration("figures", warn):
            from flowpm_dist.studies.figures import figures

            for name, draw in figures(summary.groups_of(runs)).items():
                with drawing(path / name, warn) as save:
                    save(draw())

    @override
    def report(self, result: list[summary.Run]) -> str:
        path, groups = self.folder.path, summary.groups_of(result)
        if key := self.options.study.largest:
            lines, rows = [f"{path}: {LARGEST}"], summary.largest_rows(groups, key)
        else:
            lines = [f"{path}: summary.md, points.csv, pictures; all of them in report.html"]
            columns = (*groups[0].keys, "ranks", STEP, *summary.RATIOS, summary.NOT_COMPLETE)
            rows = [
                {name: row[name] for name in columns if name in row}
                for row in summary.summary_rows(groups)
            ]
        return "\n".join([*lines, *map(summary.line_of, rows)])
