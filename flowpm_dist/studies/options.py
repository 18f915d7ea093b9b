"""The run file of `flowpm-dist study`: a subject, and the points at which it is run.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.job import job_class
from flowpm_dist.options import A_SEED, OneOrMore, Problem, Seed, count, distinct, listed, nearest
from flowpm_dist.studies.rows import combinations
from flowpm_dist.studies.subject import SubjectFile, SubjectSection, by_key, check_subject

MESH = "mesh.shape"
COMMANDS = ("simulate", "train")
"""Jobs whose results a study reads."""


class ScalingError(UserError):
    """Work cannot be divided among the ranks, or grow with them, without a remainder."""


def _distinct_values(values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("has no list of values")
    if any(values.count(each) > 1 for each in values):
        raise ValueError("has a value twice")
    return tuple(values)


@dataclass(frozen=True)
class Point:
    """A run of a study.

    Attributes:
        number: its number, from 0.
        varied: the values of the study's keys, as the study file has them.
        ranks: the number of ranks.
        repeat: the number of the repetition, from 0.
        settings: the values that the subject is given.
        name: the name of its folder.
    """

    number: int
    varied: Mapping[str, Any]
    ranks: int
    repeat: int
    settings: Mapping[str, Any]
    name: str

    def __str__(self) -> str:
        values = [f"{key} = {value}" for key, value in self.varied.items()]
        return ", ".join([*values, f"{self.ranks} rank{'s' * (self.ranks > 1)}"])


class StudySection(SubjectSection):
    """The section [study]: what is run, and how often.

    Attributes:
        subject: the run file of a simulation or a training, or a Python script.
        ranks: the numbers of ranks.
        threads: the number of threads of each rank; by default the cores of a host, divided by the
            ranks on it. To see how ranks scale, give all of them the same number.
        scaling: "strong": the work of a run is the same on all numbers of ranks. "weak": it grows
            in proportion to them. The box of a simulation grows along x, and the batch of a
            training grows. For a script, whose batch is the batch of a rank, "strong" divides its
            `batch`.
        repeats: the number of runs at each point.
        seeds: keys to which the number of the repetition is added.
        skip: the number of first steps that are left out of the times.
        trace: the number of steps of which each run of a job leaves a trace.
        limit: the longest duration of a run [s].
        memory: the memory at which the processes of a run are killed [GiB].
        largest: a key whose largest value that fits into `memory` is searched for, by doubling and
            bisection, such as "training.batch".
        smallest, most: the first value of that search, and the largest. All values are multiples of
            the first.
        seed: the seed of the order of the runs.
    """

    ranks: OneOrMore[Annotated[int, Field(ge=1)]] = Field(
        default=(1,), description="a list of numbers of ranks"
    )
    threads: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    scaling: Literal["strong", "weak"] | None = Field(
        default=None, description='"strong" or "weak"'
    )
    repeats: int = count(3)
    seeds: Annotated[tuple[str, ...], BeforeValidator(listed), AfterValidator(distinct)] = Field(
        default=(), description="a list of keys"
    )
    skip: int = count(1, 0)
    trace: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    limit: float | None = Field(default=None, gt=0, description="a number of seconds above 0")
    memory: float | None = Field(default=None, gt=0, description="a number of GiB above 0")
    largest: str | None = Field(default=None, description="a key of the subject")
    smallest: int = count(1)
    most: int = count(2**16)
    seed: Seed = Field(default=0, description=A_SEED)

    @property
    def memory_bytes(self) -> int:
        """The limit of memory [bytes]; 0 without one."""
        return round((self.memory or 0) * 2**30)

    def idle(self) -> dict[str, str]:
        """Returns the keys that only a search, or only timed runs, have."""
        if not self.largest:
            return dict.fromkeys(("smallest", "most"), "largest")
        return dict.fromkeys(("repeats", "seeds", "skip"), "timed runs, not with largest")

    def problems(self) -> Iterator[Problem]:
        """Yields the mistakes of the ranks and of a search."""
        if len(set(self.ranks)) < len(self.ranks):
            yield self.problem("ranks", "a number is given twice")
        if self.largest and self.memory is None:
            yield Problem("memory", "is missing: largest needs a limit in GiB")
        if self.largest and self.most < self.smallest:
            yield self.problem("most", f"must be at least smallest, {self.smallest}")


class StudyOptions(SubjectFile):
    """A study file: a subject, and the values of its keys."""

    study: StudySection
    vary: Annotated[dict[str, tuple[Any, ...]], by_key(_distinct_values)] = Field(
        default={},
        description='a list of values for each key of the subject, as "training.batch" = [4, 8]',
    )

    section, mesh_place = "study", "vary mesh.shape in the study file"
    may_grow = ("study.repeats",)

    def problems(self) -> Iterator[Problem]:
        """Yields the mistakes between the keys of the study and the keys of the subject."""
        study = self.study
        try:
            check_subject(self.target)
        except ValueError as error:
            yield Problem("study.subject", str(error))
            return
        script, command = self.target.is_script, self.target.command
        if not script and command not in COMMANDS:
            allowed = " or ".join(COMMANDS)
            message = f"is a run file of {command}: must be of {allowed}, or a script"
            yield Problem("study.subject", message)
            return
        places = [(f"vary.{key}", key) for key in self.vary]
        places += [("study.seeds", key) for key in study.seeds]
        places += [("study.largest", study.largest)] if study.largest else []
        for place, key in places:
            if wrong := self._unknown(key):
                yield Problem(place, wrong)
        for key in {*study.seeds} & {*self.vary}:
            yield Problem(f"vary.{key}", "is one of study.seeds: leave one of them out")
        if study.largest in self.vary:
            yield Problem(f"vary.{study.largest}", "is searched for by study.largest: leave it out")
        if script and study.trace is not None:
            yield self.problem("study.trace", "goes with jobs, not with scripts")
        if wrong := self._misscaled():
            yield self.problem("study.scaling", wrong)

    def _misscaled(self) -> str:
        """Returns why the work cannot be scaled as asked; an empty text if it can."""
        study, script = self.study, self.target.is_script
        if script and study.scaling == "strong" and "batch" not in self.vary:
            return "of a script divides its batch: must have vary.batch"
        if script and study.scaling == "weak":
            return "a script's batch is that of a rank, so that its work grows: leave it out"
        if study.largest and study.scaling:
            return "goes without study.largest"
        try:
            self.points()
        except ScalingError as error:
            return str(error)
        except UserError:  # of the subject; the check of the job reports it
            pass
        return ""

    def _unknown(self, key: str) -> str:
        """Returns why the subject has no such key; an empty text if it has it, or may have it."""
        section, _, name = key.partition(".")
        if self.target.is_script:
            return "" if not name else f"{key!r} has a section: the options of a script have none"
        known = job_class(self.target.command).options_type.model_fields
        if not name:
            return f"{key!r} has no section: must be SECTION.KEY, such as evolution.steps"
        if section not in known:
            return f"{section!r} is no section of the subject{nearest(section, known)}"
        return ""

    def points(self) -> list[Point]:
        """Returns all runs, by their numbers.

        A mesh goes with the number of its ranks alone. The runs of a repetition follow the runs of
        the repetition before, so that repetitions can be added later.
        """
        points: list[Point] = []
        for repeat in range(1 if self.study.largest else self.study.repeats):
            for varied in combinations(self.vary):
                for ranks in self.study.ranks:
                    if _fits_mesh(varied.get(MESH), ranks):
                        settings = self._settings(varied, ranks, repeat)
                        number = len(points)
                        name = f"{number:04d}"
                        points.append(Point(number, varied, ranks, repeat, settings, name))
        return points

    def in_random_order(self) -> list[Point]:
        """Returns all runs in the order in which they are made."""
        points = self.points()
        random.Random(self.study.seed).shuffle(points)
        return points

    def with_value(self, point: Point, value: int) -> Point:
        """Returns a point with a value of the key that is searched for, and a folder for it."""
        at = {self.study.largest or "": value}
        name = f"{point.name}-{value}"
        varied, settings = {**point.varied, **at}, {**point.settings, **at}
        return replace(point, varied=varied, settings=settings, name=name)

    def _settings(self, varied: Mapping[str, Any], ranks: int, repeat: int) -> dict[str, Any]:
        subject, study = self.target, self.study
        settings = dict(varied)
        base = subject.keys(varied) if study.seeds or study.scaling == "weak" else {}
        for key in study.seeds:
            settings[key] = int(varied.get(key, base.get(key, 0))) + repeat
        factor = ranks / min(study.ranks)
        if study.scaling == "strong" and subject.is_script and "batch" in settings:
            settings["batch"] = _whole(settings["batch"] / factor, "batch", ranks)
        if study.scaling == "weak" and not subject.is_script:
            settings |= _grown(base, factor, subject.command, ranks)
        return settings


def _fits_mesh(shape: str | None, ranks: int) -> bool:
    if shape is None:
        return True
    return ranks == math.prod(parse_mesh(shape, batched=True).values())


def _whole(value: float, key: str, ranks: int) -> int:
    """Returns a number as a whole one.

    Raises:
        ScalingError: it is none, or below 1.
    """
    if value < 1 or value != round(value):
        raise ScalingError(f"{key} would be {value:g} on {ranks} ranks: must be a whole number")
    return round(value)


def _grown(base: Mapping[str, Any], factor: float, command: str, ranks: int) -> dict[str, Any]:
    """Returns the values by which a job grows in proportion to its ranks.

    Raises:
        ScalingError: they are no whole numbers.
    """
    if command == "train":
        batch = _whole(base["training.batch"] * factor, "training.batch", ranks)
        return {"training.batch": batch}
    grid, size = base["box.grid"], base["box.size"]
    return {
        "box.grid": [_whole(grid[0] * factor, "box.grid[0]", ranks), *grid[1:]],
        "box.size": [size[0] * factor, *size[1:]],
    }
