"""A table of parameters in a text file: a row for each simulation, a named column for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import RecordError


class TableError(RecordError):
    """An error: a table of parameters cannot be read. The message names file and line."""


def read_table(
    path: Path, columns: Sequence[str] | None = None, wanted: Sequence[str] | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names and the values of the columns that are wanted.

    Columns are separated by commas or by spaces. The first line may name them, after a "#" or not;
    other lines that begin with "#", and empty ones, are left out.

    Args:
        path: of the table.
        columns: names of all columns, where the first line does not name them.
        wanted: names of columns, in the order of the result; all by default.

    Returns:
        The names, and float64 [row, column].

    Raises:
        TableError: if there is no such table or column, a row has other columns than the first, or
            a value that is wanted is no finite number.
    """
    try:
        lines = list(enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"cannot read the table {path}: {error}") from error
    lines = [(number, line) for number, line in lines if line.strip(" \t#")]
    if not lines:
        raise TableError(f"the table {path} is empty")
    first = _cells(lines[0][1].lstrip(" \t#"))
    named = not any(_is_number(cell) for cell in first)
    names = tuple(columns) if columns else tuple(first) if named else None
    if names is None:
        raise TableError(
            f"{path} does not name its {len(first)} columns: give data.columns, a list of names"
        )
    if columns and len(first) != len(columns):
        raise TableError(
            f"{path} has {len(first)} columns, data.columns names {len(columns)}: {list(columns)}"
        )
    if missing := [name for name in wanted or () if name not in names]:
        raise TableError(f"{path} has no column {missing[0]!r}; those it has: {', '.join(names)}")
    chosen = [names.index(name) for name in wanted or names]
    body = [(n, _cells(line)) for n, line in lines[named:] if not line.lstrip().startswith("#")]
    rows = []
    for number, cells in body:
        if len(cells) != len(names):
            raise TableError(f"{path}, line {number}: {len(cells)} values for {len(names)} columns")
        for place in chosen:
            if not _is_number(cells[place]):
                raise TableError(
                    f"{path}, line {number}: {names[place]} = {cells[place]!r} is no finite number"
                )
        rows.append([float(cells[place]) for place in chosen])
    if not rows:
        raise TableError(f"the table {path} has no rows")
    return tuple(wanted or names), np.array(rows)


def _cells(line: str) -> list[str]:
    return [c.strip().strip('"') for c in line.split(",")] if "," in line else line.split()


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
