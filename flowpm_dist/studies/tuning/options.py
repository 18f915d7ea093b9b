"""The run file of `flowpm-dist tune`. Nothing here imports TensorFlow or optuna."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from flowpm_dist.jobs.job import Job
from flowpm_dist.options import (
    A_SEED,
    Names,
    Options,
    Problem,
    Seed,
    as_written,
    constructed,
    count,
)
from flowpm_dist.studies.rows import combinations
from flowpm_dist.studies.subject import SubjectFile, SubjectSection, by_key

PLANNED = "planned"
"""Name of a folder for plans, which is never made."""
SCRIPT_SEEDS = ("seed",)
"""The options of a script that seeds are given to."""
CHOSEN = (str, bool, int, float)
"""Types of the values that a key can be given."""
MOST_LISTED = 16
"""A stepped range of so many values has all of them checked before the work; a longer one has
both ends checked."""


class Range(Options):
    """The numbers that a key may have.

    Attributes:
        low, high: both ends. If they are whole numbers, so are all values.
        log: whether values are even in the logarithm.
        step: the distance between neighbouring values.
    """

    low: int | float = Field(description="a number")
    high: int | float = Field(description="a number")
    log: bool = Field(default=False, description="true or false")
    step: Annotated[int | float, Field(gt=0)] | None = Field(
        default=None, description="a number above 0"
    )

    def problems(self) -> Iterator[Problem]:
        """Yields the mistakes of the ends and of the step."""
        if self.low >= self.high:
            yield self.problem("low", f"must be below high = {self.high}")
        elif self.log and self.low <= 0:
            yield self.problem("low", "must be above 0 with log = true")
        elif self.step is not None and self.log:
            yield self.problem("step", "does not go with log = true: leave one of them out")
        elif self.step is not None and not self._on_grid(self.high):
            span = f"high - low = {self.high - self.low:g}"
            yield self.problem("step", f"{span} must be a whole number of steps")

    def _on_grid(self, value: float) -> bool:
        steps = (value - self.low) / (self.step or 1)
        return abs(steps - round(steps)) < 1e-9 * max(1.0, abs(steps))

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        numbers = (self.low, self.high, 1 if self.step is None else self.step)
        return all(isinstance(number, int) for number in numbers)

    def holds(self, value: Any) -> bool:
        """Returns whether the key may have a value."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_whole and not isinstance(value, int):
            return False
        stepped = self.step is not None and not self._on_grid(value)
        return self.low <= value <= self.high and not stepped

    @property
    def listed(self) -> list[Any]:
        """Both ends, or all values if they are few."""
        step = self.step if self.step is not None else 1 if self.is_whole else None
        if step is None or (self.high - self.low) / step >= MOST_LISTED or self.log:
            return [self.low, self.high]
        return [self.low + n * step for n in range(round((self.high - self.low) / step) + 1)]


Purpose = Literal["choice", "verdict"]
"""What runs on fresh seeds are for: to choose among the best trials, or to judge the choice."""


def fresh_seed(seed: int, number: int, purpose: Purpose) -> int:
    """Returns a seed that no trial had, and no run for another purpose.

    Args:
        seed: the seed of the tuning.
        number: number of the fresh seed, from 0.
        purpose: what the run is for.
    """
    stream = {"choice": 1, "verdict": 2}[purpose]
    return int(np.random.default_rng([seed, number, stream]).integers(2**20, 2**31))


Space = Mapping[str, Range | tuple[Any, ...]]
"""The values that keys may have, by "section.key"; for a script, by the name of its option."""


def _values_of(written: Any) -> Range | tuple[Any, ...]:
    """Returns the values that a key may have.

    Raises:
        TypeError, ValueError: they are not given as they must be.
    """
    if isinstance(written, Range):
        return written
    if isinstance(written, Mapping):
        return constructed(Range, written)
    if not isinstance(written, list | tuple):
        raise ValueError("must be a table with low and high, or a list of choices")
    if len({(type(each), each) for each in written if isinstance(each, CHOSEN)}) != len(written):
        choices = as_written(written)
        raise ValueError(f"= {choices}: choices must be different numbers, texts, true or false")
    if len(written) < 2:
        raise ValueError(f"= {as_written(written)}: there must be at least two choices")
    return tuple(written)


class TuneSection(SubjectSection):
    """The section [tune]: what is tuned, and how.

    Attributes:
        subject: the run file of a training, an emulation or a reconstruction, or a script.
        ranks: the number of ranks of each run.
        trials: the number of trials, shortened and pruned ones included.
        pruning: how trials that fall behind are stopped: by asynchronous successive halving
            (Li and others, arXiv:1810.05934), where they are worse than the median, or never.
        reduction: at each comparison of "asha", one of so many trials continues: the best.
        first: when a trial is first compared with others: a percentage of its length; for a script,
            a `step` of its table. By default 100 / reduction^2, and 1 for a script.
        sampler: how values are chosen: by a tree of Parzen estimators (Bergstra and others 2011),
            or at random.
        startup: the number of trials whose values are random, before "tpe" chooses and "median"
            compares.
        storage: a database for workers on one host, or a journal for workers on several hosts.
        seed: the seed of the choice of values, and of the fresh seeds.
        repeats: how many of the best trials are repeated at full length.
        seeds: the number of fresh seeds on which each of the best trials runs for the choice. As
            many other fresh seeds are used for the verdict, by the chosen values and the defaults.
        worth: the smallest gain over the defaults that matters, in the units of `metric`. Values
            that gain less do not replace the defaults.
        seed_keys: the keys that fresh seeds are given to; by default all seeds of the subject. For
            a script, trials give them `seed`.
        metric: the column of the subject's table that is made small: one of validation.
        constant: the metric of a network that predicts a constant; by default it is known for
            trainings.
        limit: the longest duration of a trial [s].
        workers: the number of processes that take trials at once, on this host.
    """

    ranks: int = count(1)
    trials: int = count(30)
    pruning: Literal["asha", "median", "none"] = Field(
        default="asha", description='"asha", "median" or "none"'
    )
    reduction: int = count(3, least=2)
    first: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    sampler: Literal["tpe", "random"] = Field(default="tpe", description='"tpe" or "random"')
    startup: int = count(8)
    storage: Literal["sqlite", "journal"] = Field(
        default="sqlite", description='"sqlite" or "journal"'
    )
    seed: Seed = Field(default=0, description=A_SEED)
    repeats: int = count(3, least=0)
    seeds: int = count(3, least=2)
    worth: float = Field(default=0.0, ge=0, description="a number of at least 0")
    seed_keys: Names | None = Field(default=None, description="a list of different keys")
    metric: str | None = Field(default=None, min_length=1, description="the name of a column")
    constant: float | None = Field(default=None, description="a number")
    limit: float | None = Field(default=None, gt=0, description="a number of seconds above 0")
    workers: int = count(1)

    def idle(self) -> dict[str, str]:
        """Returns the keys that the chosen pruning does not use."""
        needed = {"first": 'pruning = "asha" or "median"', "reduction": 'pruning = "asha"'}
        return {key: text for key, text in needed.items() if f'"{self.pruning}"' not in text}


class TuneOptions(SubjectFile):
    """The run file of a tuning: the subject, the space of its keys, and what shortens trials."""

    tune: TuneSection
    space: Annotated[Mapping[str, Any], by_key(_values_of)] = Field(
        description='A key for each key of the subject, such as "training.learning_rate": a table '
        "{ low = 1e-5, high = 1e-2, log = true } or { low = 4, high = 16, step = 4 }, or a list of "
        "choices"
    )
    shortened: Annotated[Mapping[str, Any], by_key(lambda value: value)] = Field(
        default={},
        description='Values of keys of the subject, such as "data.simulations", that trials have '
        "in place of its own. Repeats have its own",
    )

    section, mesh_place = "tune", "give mesh.shape in the run file of the subject"
    may_differ = ("tune.workers", "tune.limit")
    may_grow = ("tune.trials", "tune.repeats", "tune.seeds")

    def problems(self) -> Iterator[Problem]:
        """Yields the mistakes between the space, what shortens trials, and the seeds."""
        if not self.space:
            example = '"training.learning_rate" = { low = 1e-5, high = 1e-2, log = true }'
            yield Problem("space", f"is empty: give a key, such as {example}")
        for key in {*self.space} & {*self.shortened}:
            yield Problem(f"shortened.{key}", "is in [space], too: leave it out of one of them")
        for key in self.tune.seed_keys or ():
            if key in self.space or key in self.shortened:
                yield Problem(f"space.{key}", "is a seed, and trials must not be chosen by luck")

    def plan(self, values: Mapping[str, Any], folder: Path) -> Job[Any, Any] | None:
        """Returns the subject's job with some values, after all checks; None for a script.

        Args:
            values: values of its keys.
            folder: a folder on the disk where the job would run.

        Raises:
            UserError: the job cannot begin.
        """
        return self.target.plan(values, self.tune.ranks, folder / PLANNED)

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a trial: what shortens it, and the values that it tries.

        Trials of a script are given its seeds, so that a script without them fails in the first.
        """
        keys = self.tune.seed_keys or SCRIPT_SEEDS
        has_seeds = self.target.is_script and self.tune.repeats
        seeds = dict.fromkeys(keys, self.tune.seed) if has_seeds else {}
        return {**seeds, **self.shortened, **values}

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Returns whether values of all keys are in the space."""
        return {*values} == {*self.space} and all(
            allowed.holds(values[key]) if isinstance(allowed, Range) else values[key] in allowed
            for key, allowed in self.space.items()
        )

    def corners(self, most: int) -> Iterator[dict[str, Any]]:
        """Yields each listed value of each key alone, and then combinations of the ends.

        Args:
            most: the largest number of combinations.
        """
        ends = {}
        for key, values in self.space.items():
            listed = values.listed if isinstance(values, Range) else list(values)
            ends[key] = listed if isinstance(values, tuple) else [listed[0], listed[-1]]
            for value in listed:
                yield {key: value}
        yield from itertools.islice(combinations(ends), most)
