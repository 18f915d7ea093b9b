"""Tables and figures that a study and a tuning write."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowpm_dist.io.errors import decoration
from flowpm_dist.io.files import written_whole


def write_rows(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None = None,
    *,
    digits: int = 6,
) -> None:
    """Write a table of comma-separated values.

    Args:
        path: path of the file.
        rows: the values by name of the column; a value that is missing or None stays empty.
        columns: the columns in their order; by default all that the rows have.
        digits: significant digits of numbers that are not whole.

    Raises:
        WriteError: it cannot be written.
    """
    if columns is None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
    with written_whole(path) as aside, aside.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow(
                {k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()}
            )


def save_figures(
    folder: Path, drawings: Mapping[str, Callable[[], Any]], warn: Callable[[str], None]
) -> None:
    """Write figures; one that fails is a warning.

    Args:
        folder: the folder.
        drawings: functions that draw the figures, by the name of their file.
        warn: shows the user a warning.
    """
    from flowpm_dist.io.figures import save_figure

    for name, draw in drawings.items():
        with decoration(name, warn):
            save_figure(draw(), folder / name)
