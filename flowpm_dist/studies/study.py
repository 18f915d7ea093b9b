"""The work of `flowpm-dist study`: its folder, and the job.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import read_json, write_text
from flowpm_dist.jobs.estimate import OVERRIDE
from flowpm_dist.jobs.folder import WorkFolder, check_room
from flowpm_dist.jobs.job import Job, StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, record_of_work
from flowpm_dist.jobs.run_file import write_run_file
from flowpm_dist.studies.measures import measured
from flowpm_dist.studies.options import Point, StudyOptions
from flowpm_dist.studies.process import (
    COMPLETE,
    FAILED,
    LOG,
    NO_MEMORY,
    STOPPED,
    Claim,
    Outcome,
    StopSignals,
    run,
)
from flowpm_dist.studies.summary import (
    FIGURES,
    Group,
    Run,
    groups_of,
    ranks_of,
    summary_text,
    write_runs,
    write_summary,
)

MARK, RESULT, RUN = "study.json", "result.json", "run"
WAIT_SECONDS = 5.0
"""Time between two looks at the runs of other workers [s]."""
LARGEST = "largest.csv"


class StudyFolder(WorkFolder):
    """A folder that the workers of one study own together.

    Attributes:
        runs: the folder of all runs: a folder each, with the results of the subject in it.
    """

    kind = "study"
    contents = (
        MARK, "run.toml", "runs", "points.csv", "summary.csv", "summary.md", LARGEST, *FIGURES,
    )  # fmt: skip
    begun = MARK
    shared = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.runs = self.path / "runs"

    def ended(self) -> list[Run]:
        """Returns all runs that have ended, by their numbers."""
        paths = sorted(self.runs.glob(f"*/{RESULT}"))
        found = (read_json(path) for path in paths)
        return [Run(**each) for each in found if each]


class StudyJob(Job[StudyOptions, list[Run]]):
    """A study that was checked and can begin."""

    name = "study"
    help = "Run a job or a script at many points, and measure time, memory, energy and scores."
    asks = "The subject, and the points at which it is run."
    example = "flowpm-dist study examples/study.toml --output scaling"
    options_type, folder_type = StudyOptions, StudyFolder
    starts_jobs = True
    cells = 1
    folder: StudyFolder

    def check(self) -> None:
        """See `Job.check`; the job of each point is planned as well.

        Raises:
            UserError: a run could not begin; the message names its values.
        """
        super().check()
        problems: dict[str, str] = {}
        disk = 0
        if not self._points:
            raise UserError(f"{self.run_file}: no mesh.shape in [vary] is of study.ranks")
        for point in self._points:
            if point.repeat == 0 and str(point) not in problems:
                trial = self._with_smallest(point)
                try:
                    job = self._subject.plan(trial.settings, point.ranks, self._output(trial))
                    disk += 0 if job is None else job.disk
                except UserError as error:
                    problems[str(point)] = str(error)
        check_room(self.folder.path, disk * self.options.study.repeats, "the runs need at most")
        if problems:
            shown = [f"{point}: {what}" for point, what in list(problems.items())[:5]]
            more = [f"... and {len(problems) - 5} more points"] if len(problems) > 5 else []
            raise UserError("\n".join([*shown, *more]))

    @property
    def _points(self) -> list[Point]:
        return self.options.points()

    @property
    def _subject(self) -> Any:
        return self.options.study.target

    def _with_smallest(self, point: Point) -> Point:
        study = self.options.study
        return self.options.with_value(point, study.smallest) if study.largest else point

    def _output(self, point: Point) -> Path:
        return self.folder.runs / self._name(point) / RUN

    def _name(self, point: Point) -> str:
        """Returns the name of the folder of a run; a search has one for each value."""
        key = self.options.study.largest
        return point.name if key is None else f"{point.name}-{point.varied.get(key, '')}"

    def describe(self) -> str:
        """Returns a line that says what will be run."""
        study, points = self.options.study, self._points
        ranks = ", ".join(map(str, study.ranks))
        what = f"{study.subject.name}, {len(points)} runs on {ranks} ranks"
        if study.largest:
            return f"{what.replace(' runs', ' searches')}; the largest {study.largest} that fits"
        return f"{what}; {study.repeats} at each point"

    @property
    def demand(self) -> None:
        """See `Job.demand`."""
        return None

    @property
    def most_ranks(self) -> int:
        """See `Job.most_ranks`."""
        return max(self.options.study.ranks)

    @property
    def is_complete(self) -> bool:
        """See `Job.is_complete`; repetitions may have been added."""
        searches = self.options.study.largest is not None
        return super().is_complete and (searches or len(self.folder.ended()) >= len(self._points))

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """See `Job.last_checkpoint`."""
        count = len(self.folder.ended())
        return (self.folder.runs, f"{count} runs") if count else None

    def work(self, progress: Progress) -> list[Run]:
        """See `Job.work`. Returns the runs.

        Raises:
            StopError: a signal stopped it; runs that have ended are kept.
        """
        points = self.options.in_random_order()
        write_run_file(self.folder.run_file, self.resolved)
        signals = StopSignals()
        done = set[int]()
        with signals.heard(progress.say):
            while len(done) < len(points):
                before = len(done)
                for point in points:
                    if point.number in done:
                        continue
                    claim = Claim(self.folder.runs / point.name)
                    if not claim.take():
                        continue
                    try:
                        self._do(point, signals, progress)
                    finally:
                        claim.give_up()
                    if signals:
                        self._write(complete=False)
                        raise StopError(signals.name, f"after {self._count(done)} of {len(points)}")
                    done.add(point.number)
                    progress("run", len(done), len(points), str(point))
                if len(done) == before:  # other workers have the rest
                    time.sleep(WAIT_SECONDS)
                    if signals:
                        raise StopError(signals.name, "while other workers make the last runs")
        return self._write(complete=True)

    def _count(self, done: set[int]) -> str:
        return f"{len(done)} runs"

    def _do(self, point: Point, signals: StopSignals, progress: Progress) -> None:
        """Does a point, or what is left of it."""
        if self.options.study.largest is None:
            self._run(point, signals)
            return
        for value in self._search(point, signals):
            progress.say(f"{point}: {self.options.study.largest} = {value}")

    def _run(self, point: Point, signals: StopSignals) -> Run | None:
        """Returns a run, made unless it has ended before; None if it was stopped."""
        folder = self.folder.runs / self._name(point)
        if found := read_json(folder / RESULT):
            return Run(**found)
        study, output = self.options.study, folder / RUN
        shutil.rmtree(output, ignore_errors=True)  # of a run that was cut short
        folder.mkdir(parents=True, exist_ok=True)
        more = [] if self._subject.is_script else [OVERRIDE] if study.memory else []
        command, environment = self._subject.command_line(
            point.settings, point.ranks, output, threads=study.threads, more=more
        )
        if self._subject.is_script:
            output.mkdir()
        outcome = run(
            command,
            folder / LOG,
            environment=environment,
            memory=None if study.memory is None else round(study.memory * 2**30),
            limit=study.limit,
            asked=lambda: bool(signals),
        )
        if outcome.status == STOPPED:
            return None
        found = self._result(point, output, outcome)
        write_text(folder / RESULT, json.dumps(asdict(found), indent=1) + "\n")
        return found

    def _result(self, point: Point, output: Path, outcome: Outcome) -> Run:
        ended = Run(
            point.number, dict(point.varied), point.ranks, point.repeat,
            outcome.status, outcome.seconds, outcome.message,
        )  # fmt: skip
        if outcome.status != COMPLETE:
            return ended
        try:
            return replace(ended, measured=measured(output, self.options.study.skip))
        except (ValueError, KeyError, TypeError, OSError, ArithmeticError) as error:
            what = f"{output}: its measurements cannot be read: {error}"
            return replace(ended, status=FAILED, message=what)

    def _search(self, point: Point, signals: StopSignals) -> Iterator[int]:
        """Tries values of `largest` until the largest that fits is known; yields those tried."""
        study = self.options.study
        unit = study.smallest
        fits, too_large = 0, study.most // unit + 1
        trial = 1
        while fits + 1 < too_large:
            found = self._run(self.options.with_value(point, trial * unit), signals)
            if found is None:
                return
            yield trial * unit
            if found.status == COMPLETE:
                fits = trial
            elif found.status == NO_MEMORY:
                too_large = trial
            else:
                return  # another failure says nothing about the memory
            unknown = too_large > study.most // unit
            trial = min(2 * fits, study.most // unit) if unknown else (fits + too_large) // 2

    def _write(self, *, complete: bool) -> list[Run]:
        """Writes the tables and the figures; the last worker to end has them all."""
        from flowpm_dist.io.figures import save_figure
        from flowpm_dist.studies.figures import figures

        runs, path = self.folder.ended(), self.folder.path
        if not runs:
            return runs
        groups = groups_of(runs)
        write_runs(path / "points.csv", runs)
        write_summary(path / "summary.csv", groups)
        title = f"{self.options.study.subject.name}: {len(runs)} runs"
        write_text(path / "summary.md", summary_text(groups, title))
        if self.options.study.largest is None:
            for name, figure in figures(groups).items():
                save_figure(figure, path / name)
        else:
            write_text(path / LARGEST, _largest_table(groups, self.options.study.largest))
        if complete:
            self.folder.write_mark(complete=True)
        return runs

    def report(self, result: list[Run]) -> str:
        """Returns where to look, and the points."""
        path, groups = self.folder.path, groups_of(result)
        if key := self.options.study.largest:
            return f"{path}:\n{_largest_table(groups, key)}"
        lines = []
        for group in groups:
            speed = group.speed_up
            step = group.median("seconds a step")
            text = f"{group.label or self.options.study.subject.stem}, {ranks_of(group.ranks)}: "
            text += "no run is complete" if step is None else f"{step:.4g} s a step"
            if speed is not None and group.ideal > 1:
                text += f", speed-up {speed[0]:.2f} of {group.ideal:g}"
            if group.failed:
                text += f"; {len(group.failed)} runs {group.failed[0].status}"
            lines.append(text)
        return "\n".join(
            [f"{path}: summary.md, points.csv, pictures; all of them in report.html", *lines]
        )

    @classmethod
    def record(cls, path: Path) -> RunRecord | None:
        """See `Job.record`."""
        folder = StudyFolder(path)
        runs = folder.ended()
        return record_of_work(folder, f"{len(runs)} runs" if runs else "")


def _largest_table(groups: list[Group], key: str) -> str:
    """Returns the largest value that fits at each point, as a table of comma-separated values."""
    found: dict[str, tuple[Group, list[int], list[int], list[str]]] = {}
    for group in groups:
        others = {name: value for name, value in group.varied.items() if name != key}
        entry = found.setdefault(repr((others, group.ranks)), (group, [], [], []))
        value = cast(int, group.varied[key])
        if group.runs:
            entry[1].append(value)
        elif group.failed[0].status == NO_MEMORY:
            entry[2].append(value)
        else:
            entry[3].append(f"{value}: {group.failed[0].message.splitlines()[-1]}")
    names = [name for name in groups[0].varied if name != key]
    lines = [",".join([*names, "ranks", f"largest {key}", "least without room", "failed"])]
    for group, fits, large, failed in found.values():
        cells = [*(group.varied[name] for name in names), group.ranks, max(fits, default=0)]
        cells += [min(large, default=""), "; ".join(failed)]
        lines.append(",".join(f'"{cell}"' if "," in str(cell) else str(cell) for cell in cells))
    return "\n".join(lines) + "\n"
