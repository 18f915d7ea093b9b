"""The tables of a study: a row for each run, and a summary of each point's repetitions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from flowpm_dist.jobs.results import write_rows
from flowpm_dist.studies.measures import (
    ENERGY,
    EPOCH,
    FEATURE,
    MEMORY,
    PHASE,
    POWER,
    STEP,
    THROUGHPUT,
    TRAINED,
    VALIDATED,
)
from flowpm_dist.studies.options import MESH
from flowpm_dist.studies.process import COMPLETE, NO_MEMORY

SUMMARISED = (STEP, EPOCH, THROUGHPUT, *TRAINED, *VALIDATED, MEMORY, ENERGY, POWER)
RATIOS = SPEED_UP, EFFICIENCY = "speed-up", "efficiency"
"""Columns computed from the throughput of a group and the throughput on the fewest ranks."""
NOT_COMPLETE = "not complete"
"""The column that says how incomplete runs ended."""
SCALING, PHASES, KEYS, ENERGIES = "scaling.png", "phases.png", "keys.png", "energy.png"
FIGURES = (SCALING, PHASES, KEYS, ENERGIES)
"""The files of the figures, see `studies.figures`."""
NO_COUNTER = "Energy: no counter could be read on these hosts."
TEXTS = ("energy of", "host", "versions")
"""The measured columns that hold texts; all others hold numbers."""


def checked(measured: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what was measured of a run, after a check of its types.

    Raises:
        ValueError: a value is no number, or no text in `TEXTS`.
    """
    for name, value in measured.items():
        word, kinds = ("text", str) if name in TEXTS else ("number", (int, float))
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is {value!r}; must be a {word}")
    return measured


@dataclass(frozen=True)
class Run:
    """A run of a study that has ended.

    Attributes:
        number: its number.
        varied: the values of the study's keys.
        ranks, repeat: see `Point`.
        status: how it ended, see `Outcome`.
        seconds: its duration, its start included [s].
        message: why it did not complete.
        measured: what was measured, by the name of a column.
    """

    number: int
    varied: Mapping[str, Any]
    ranks: int
    repeat: int
    status: str
    seconds: float
    message: str = ""
    measured: Annotated[Mapping[str, Any], AfterValidator(checked)] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The runs at one point.

    Attributes:
        varied, ranks: see `Point`.
        keys: the keys that have several values in the study.
        runs: those that are complete.
        failed: those that are not.
        first: the group with the same values, but for the mesh, on the fewest ranks; None where
            that has no times.
    """

    varied: Mapping[str, Any]
    ranks: int
    keys: Sequence[str]
    runs: Sequence[Run]
    failed: Sequence[Run]
    first: Group | None = None

    def values(self, name: str) -> list[float]:
        """Returns the values of a column, of those runs that have it."""
        return [run.measured[name] for run in self.runs if name in run.measured]

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """Returns the median of a column over the repetitions, the least and the greatest value.

        Args:
            name: a column, `SPEED_UP` or `EFFICIENCY`.

        Returns:
            None if it is not known.
        """
        if name == SPEED_UP:
            return self._speed_up
        if name == EFFICIENCY:
            speed = self._speed_up
            return speed and (speed[0] / self.ideal, speed[1] / self.ideal, speed[2] / self.ideal)
        values = self.values(name)
        return (statistics.median(values), min(values), max(values)) if values else None

    @property
    def _speed_up(self) -> tuple[float, float, float] | None:
        """The throughput divided by the one on the fewest ranks: of medians, least and greatest.

        The least compares the slowest run with the fastest run of the fewest ranks. For a
        constant amount of work this is the speed-up; for work in proportion to the ranks, the
        scaled speed-up.
        """
        first = self.first
        if first is None:
            return None
        here, base = self.spread(THROUGHPUT), first.spread(THROUGHPUT)
        if here is None or base is None:
            return None
        if (first.varied, first.ranks) == (self.varied, self.ranks):
            return 1.0, 1.0, 1.0
        return here[0] / base[0], here[1] / base[2], here[2] / base[1]

    @property
    def ideal(self) -> float:
        """The ideal speed-up."""
        return 1.0 if self.first is None else self.ranks / self.first.ranks

    @property
    def label(self) -> str:
        """The values of `keys`, for the legend of a figure."""
        return label_of({key: value for key, value in self.varied.items() if key in self.keys})


def label_of(values: Mapping[str, Any]) -> str:
    """Returns values as a text such as "batch 8, learning_rate 0.001".

    Keys with the same last word are whole.
    """
    last = [key.rpartition(".")[2] for key in values]
    names = (name if last.count(name) == 1 else key for key, name in zip(values, last, strict=True))
    return line_of(dict(zip(names, values.values(), strict=True)))


def line_of(row: Mapping[str, Any]) -> str:
    """Returns a row of a table as a text; cells without a value are left out."""
    return ", ".join(f"{name} {_short(value)}" for name, value in row.items() if value != "")


def ranks_of(count: int) -> str:
    """Returns a number of ranks as a text."""
    return f"{count} rank{'s' * (count > 1)}"


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Returns the runs of each point together, by values and then by ranks."""
    points: dict[tuple[str, int], list[Run]] = {}
    order = {repr(run.varied): n for n, run in reversed(list(enumerate(runs)))}
    for run in sorted(runs, key=lambda run: (order[repr(run.varied)], run.ranks, run.repeat)):
        points.setdefault((repr(run.varied), run.ranks), []).append(run)
    groups: list[Group] = []
    firsts: dict[str, Group] = {}
    names = dict.fromkeys(key for run in runs for key in run.varied)
    keys = [name for name in names if len({repr(run.varied.get(name)) for run in runs}) > 1]
    for (_, ranks), several in sorted(points.items(), key=lambda item: item[0][1]):
        values = repr({k: v for k, v in several[0].varied.items() if k != MESH})
        complete = [run for run in several if run.status == COMPLETE]
        failed = [run for run in several if run.status != COMPLETE]
        group = Group(several[0].varied, ranks, keys, complete, failed)
        if values not in firsts and group.values(THROUGHPUT):
            firsts[values] = group
        groups.append(replace(group, first=firsts.get(values)))
    return sorted(groups, key=lambda group: (order[repr(group.varied)], group.ranks))


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    """Write points.csv: a row for each run.

    Raises:
        WriteError: it cannot be written.
    """
    rows = [
        {
            "run": run.number,
            "status": run.status,
            **run.varied,
            "ranks": run.ranks,
            "repeat": run.repeat,
            "seconds": run.seconds,
            **run.measured,
            "message": run.message,
        }
        for run in sorted(runs, key=lambda run: (run.number, str(run.varied)))
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    # Phases come last: there may be many.
    columns.sort(key=lambda name: name.startswith(PHASE) or name in ("versions", "message"))
    write_rows(path, rows, columns)


def _columns(groups: Sequence[Group]) -> list[str]:
    """Returns the columns of a summary that some points have."""
    several = len({group.ranks for group in groups}) > 1
    measured = dict.fromkeys(
        name for group in groups for run in group.runs for name in run.measured
    )
    known = [name for name in SUMMARISED if name in measured]
    known += [name for name in measured if name.startswith(FEATURE)]
    return [*known, *RATIOS] if several else known


def summary_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns a row for each point: medians over its repetitions, speed-up and efficiency."""
    rows, columns = [], _columns(groups)
    for group in groups:
        row: dict[str, Any] = {**group.varied, "ranks": group.ranks, "runs": len(group.runs)}
        for name in columns:
            if (spread := group.spread(name)) is not None:
                row[name] = spread[0]
                if name in (STEP, THROUGHPUT, SPEED_UP):
                    row |= {f"{name}, least": spread[1], f"{name}, greatest": spread[2]}
        if group.failed:
            row[NOT_COMPLETE] = ", ".join(sorted({run.status for run in group.failed}))
        rows.append(row)
    return rows


def largest_rows(groups: Sequence[Group], key: str) -> list[dict[str, Any]]:
    """Returns the largest value of a key that fits at each point.

    Args:
        groups: all runs of the search.
        key: the key.
    """
    searches: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        others = {name: value for name, value in group.varied.items() if name != key}
        searches.setdefault((repr(others), group.ranks), []).append(group)
    rows = []
    for several in searches.values():
        fits = [group.varied[key] for group in several if group.runs]
        failed = [group for group in several if not group.runs]
        large = [g.varied[key] for g in failed if g.failed[0].status == NO_MEMORY]
        wrong = [g for g in failed if g.failed[0].status != NO_MEMORY]
        row = {name: value for name, value in several[0].varied.items() if name != key}
        row |= {"ranks": several[0].ranks, f"largest {key}": max(fits, default=0)}
        row["least without room"] = min(large, default="")
        row["failed"] = "; ".join(f"{g.varied[key]}: {g.failed[0].message}" for g in wrong)
        rows.append(row)
    return rows


def summary_text(groups: Sequence[Group], title: str) -> str:
    """Returns summary.md: a table of the points, with the spread over repetitions.

    Args:
        groups: the runs of each point.
        title: the heading.
    """
    keys, columns = groups[0].keys, _columns(groups)
    same = {key: value for key, value in groups[0].varied.items() if key not in keys}
    head = [*keys, "ranks", "runs", *columns]
    lines = [
        [
            *(_short(group.varied.get(key, "")) for key in keys),
            *map(str, (group.ranks, len(group.runs))),
            *(_with_spread(name, group.spread(name)) for name in columns),
        ]
        for group in groups
    ]
    table = [head, ["---"] * len(head), *lines]
    text = [f"# {title}", ""]
    if same:
        values = (f"{key} = {_short(value)}" for key, value in same.items())
        text += [f"In all runs: {', '.join(values)}.", ""]
    text += [*(f"| {' | '.join(row)} |" for row in table), ""]
    text.append(
        "Medians over the runs of a point; in brackets the least and the greatest value. "
        "The speed-up compares samples a second with those on the fewest ranks; the efficiency is "
        "the speed-up divided by the ideal one."
    )
    if not any(group.values(ENERGY) for group in groups):
        text += ["", NO_COUNTER]
    failed = [run for group in groups for run in group.failed]
    if failed:
        text += ["", "## Runs that are not complete", ""]
        text += [
            f"- run {run.number}: {run.status}. {' '.join(run.message.split())}" for run in failed
        ]
    return "\n".join(text) + "\n"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _with_spread(name: str, spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return ""
    median, least, greatest = spread
    if name == EFFICIENCY:
        return f"{100 * median:.0f} %"
    if least == greatest:
        return f"{median:.4g}"
    return f"{median:.4g} ({least:.3g} to {greatest:.3g})"
