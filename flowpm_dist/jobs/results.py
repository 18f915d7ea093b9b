"""What jobs leave in their folders: tables that grow by rows, and the record of a folder.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flowpm_dist.io.files import WriteError, written_whole
from flowpm_dist.options.regular_files import read_text

MOST_TABLE = 2**28
"""Largest table that is read [bytes]."""


class Table:
    """A CSV file whose rows are on disk as soon as they are added.

    Args:
        path: path of the file.
        columns: names of the columns; the first holds the number of the row.
        first: number of the first row that will be added. Rows of the file with this number or a
            later one are dropped, because work that is resumed makes them again.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: Path, columns: Sequence[str], first: int) -> None:
        self._path = path
        earlier = [row for row in read_rows(path) if int(row[columns[0]]) < first]
        with written_whole(path) as aside:
            self._file = aside.open("w", newline="")
            self._rows = csv.DictWriter(self._file, columns)
            self._rows.writeheader()
            self._rows.writerows(earlier)
            self._file.flush()

    def add(self, values: Mapping[str, Any]) -> None:
        """Add a row.

        Args:
            values: the values by name of the column; columns without a value stay empty.

        Raises:
            WriteError: the row cannot be written.
        """
        row = {k: f"{v:.9g}" if isinstance(v, float) else v for k, v in values.items()}
        try:
            self._rows.writerow(row)
            self._file.flush()
        except OSError as error:
            raise WriteError.of(self._path, error) from error

    def close(self) -> None:
        """Close the file. A row that could not be written, which `add` reported, is dropped."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_rows(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None = None,
    *,
    digits: int | None = 6,
) -> None:
    """Write a table of comma-separated values.

    Args:
        path: path of the file.
        rows: the values by name of the column; a value that is missing or None stays empty.
        columns: the columns in their order; by default all that the rows have.
        digits: significant digits of numbers that are not whole; None for all.

    Raises:
        WriteError: it cannot be written.
    """
    spec = "" if digits is None else f".{digits}g"
    if columns is None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
    with written_whole(path) as aside, aside.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow(
                {k: format(v, spec) if isinstance(v, float) else v for k, v in row.items()}
            )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a table, without a last one that was only partly written.

    Args:
        path: path of the file; a missing file has no rows.

    Raises:
        OSError, UnicodeDecodeError: see `read_text`.
        csv.Error: it is not a table.
    """
    try:
        text = io.StringIO(read_text(path, MOST_TABLE), newline="")
    except FileNotFoundError:
        return []
    return [row for row in csv.DictReader(text) if None not in row.values()]


@dataclass(frozen=True)
class RunRecord:
    """What is known of the folder of a run.

    Attributes:
        folder: its path.
        kind: such as "simulation", "training" or "evaluation".
        state: "complete", "running", "stopped" or "damaged".
        steps: what was done, such as "8/24 steps"; empty where it is not known.
        when: the time of its last change.
        results: the main numbers by name.
        settings: the values of its resolved run file by "section.key".
        captions: what its files show, in a sentence, by their names.
    """

    folder: Path
    kind: str
    state: str
    steps: str
    when: datetime
    results: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    captions: Mapping[str, str] = field(default_factory=dict, compare=False)


def changed(path: Path) -> datetime:
    """Returns the time of a file's last change."""
    return datetime.fromtimestamp(path.stat().st_mtime)
