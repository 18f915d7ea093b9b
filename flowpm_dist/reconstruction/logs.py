"""iterations.csv and draws.csv: what a reconstruction leaves while it runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowpm_dist.cosmoflow.logs import read_metrics
from flowpm_dist.io.files import WriteError, written_whole

LARGE, SMALL = 0.1, 0.3
"""Wavenumbers at which the correlation with the truth is told, about [h/Mpc]."""

COLUMNS = (
    "iteration", "stage", "evaluations", "radius", "inflation", "loss", "data", "prior",
    "gradient_norm", "step", "seconds", f"r({LARGE})", f"r({SMALL})",
)  # fmt: skip

MOVE_COLUMNS = (
    "move", "chain", "drawn", "evaluations", "radius", "inflation", "step", "acceptance",
    "energy_error", "loss", "data", "prior", "seconds",
)  # fmt: skip

read_rows = read_metrics


class Table:
    """Rows that are written as they come.

    Args:
        path: of the file.
        columns: the first numbers the rows.
        first: of what the file holds, rows of this number and later ones are dropped: work that is
            resumed makes them again.

    Raises:
        WriteError: it cannot be written.
    """

    def __init__(self, path: Path, columns: Sequence[str], first: int) -> None:
        self._path = path
        kept = [row for row in read_rows(path) if int(row[columns[0]]) < first]
        with written_whole(path) as aside:
            self._file = aside.open("w", newline="")
            self._rows = csv.DictWriter(self._file, columns)
            self._rows.writeheader()
            self._rows.writerows(kept)
            self._file.flush()

    def add(self, values: Mapping[str, Any]) -> None:
        """One more row; columns that are not named stay empty."""
        row = {k: f"{v:.9g}" if isinstance(v, float) else v for k, v in values.items()}
        try:
            self._rows.writerow(row)
            self._file.flush()
        except OSError as error:
            raise WriteError.of(self._path, error) from error

    def close(self) -> None:
        """No more rows will be added."""
        self._file.close()
