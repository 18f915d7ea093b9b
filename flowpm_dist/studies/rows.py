"""Rows of settings, each for a run in a folder of its own: from a table, an array, or a study.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.run_file import Settings, parse_settings, read_columns

MOST_ROWS = 10_000
"""Jobs of the largest array."""
SHOWN = 10
"""Different mistakes that are shown, and runs that have one of them."""
_RANGE = re.compile(r"(\d+)-(\d+)")
Work = TypeVar("Work")


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each combination of the values of keys; the last key changes first."""
    for row in itertools.product(*values.values()):
        yield dict(zip(values, row, strict=True))


def array_rows(texts: Sequence[str]) -> list[dict[str, str]]:
    """Returns the combinations of keys and their values; none without a text.

    Args:
        texts: such as "initial.seed=0-9" or "evolution.steps=5,10".

    Raises:
        UserError: a text has another form, or there would be too many rows.
    """
    columns: dict[str, list[str]] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        values = listed.split(",")
        if span := _RANGE.fullmatch(listed):
            low, high = int(span[1]), int(span[2])
            if low > high:
                raise UserError(f"--array {text}: {low} is above {high}")
            if high - low >= MOST_ROWS:
                raise UserError(f"--array {text}: more than {MOST_ROWS} jobs")
            values = list(map(str, range(low, high + 1)))
        if not re.fullmatch(r"\w+\.\w+", key) or not all(values):
            raise UserError(
                f"--array {text}: must be SECTION.KEY=VALUES, such as initial.seed=0-9 or "
                "evolution.steps=5,10"
            )
        if key in columns:
            raise UserError(f"--array {text}: {key} is given twice")
        if len({*values}) < len(values):
            raise UserError(f"--array {text}: has a value twice")
        columns[key] = values
    if math.prod(map(len, columns.values())) > MOST_ROWS:
        raise UserError(f"--array: more than {MOST_ROWS} jobs")
    return [*combinations(columns)] if columns else []


def all_planned(
    plans: Mapping[str, Callable[[], Work]], place: Callable[[str], str] = str, hint: str = ""
) -> list[Work]:
    """Returns the work of each run; none may begin unless all can.

    Args:
        plans: what returns the work of a run, by the name of the run. It may raise UserError.
        place: returns how a message begins, given names of runs.
        hint: a line for the user if folders cannot take their run.

    Raises:
        UserError: runs cannot begin; the message has each mistake once, with the runs that have it.
    """
    works, last = [], ""
    wrong: dict[str, list[str]] = {}
    for name, plan in plans.items():
        try:
            works.append(plan())
        except UserError as error:
            wrong.setdefault(str(error), []).append(name)
            if isinstance(error, OutputError):
                last = hint
    if wrong:
        lines = []
        for mistake, names in [*wrong.items()][:SHOWN]:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{place('; '.join(names[:SHOWN]) + more)}: {mistake}")
        if len(wrong) > SHOWN:
            lines.append(f"... and {len(wrong) - SHOWN} more mistakes")
        raise UserError("\n".join([*lines, *([last] if last else [])]))
    return works


@dataclass(frozen=True)
class Rows:
    """The runs that a command line asks for.

    Attributes:
        changes: settings of all runs, such as "evolution.steps=20".
        values: the values of each row as texts, by "section.key"; empty for a single run.
        source: where the rows are from, for messages.
    """

    changes: Sequence[str] = ()
    values: Sequence[Mapping[str, str]] = ()
    source: str = ""

    @classmethod
    def read(cls, changes: Sequence[str], table: Path | None, array: Sequence[str] = ()) -> Rows:
        """Returns the rows of a table or of an array.

        Args:
            changes: the values of --set.
            table: path of the table, see `read_columns`; None without one.
            array: the values of --array, see `array_rows`.

        Raises:
            UserError: there are mistakes.
        """
        if table is not None and array:
            raise UserError("--table and --array are both given: give one of them")
        if table is None:
            rows, option = array_rows(array), "--array"
        else:
            columns, option = read_columns(table), "--table"
            rows = [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
        for key in map(".".join, parse_settings(changes)):
            if rows and key in rows[0]:
                raise UserError(f"{key} is given by {option} and by --set: leave one of them out")
        return cls(changes, rows, option if table is None else str(table))

    def texts(self, number: int) -> list[str]:
        """Returns the settings that one row alone has, such as "initial.seed=3"."""
        return [f"{key}={value}" for key, value in self.values[number].items()]

    def planned(
        self, output: Path, plan: Callable[[Path, Settings], Work], hint: str = ""
    ) -> list[Work]:
        """Returns the work of each run, in OUTPUT-0, OUTPUT-1 ...; a single run is in OUTPUT.

        Args:
            output: folder of the results, or the beginning of their folders' names.
            plan: returns the work of a run, given its folder and its settings.
            hint: a line for the user if folders cannot take their run.

        Raises:
            UserError: runs cannot begin; the message names their rows.
        """
        if not self.values:
            return [plan(output, parse_settings(self.changes))]

        def plan_row(number: int) -> Work:
            settings = parse_settings([*self.changes, *self.texts(number)])
            return plan(Path(f"{output}-{number}"), settings)

        plans = {f"row {n}": partial(plan_row, n) for n in range(len(self.values))}
        return all_planned(plans, lambda rows: f"{self.source}, {rows} (counted from 0)", hint)
