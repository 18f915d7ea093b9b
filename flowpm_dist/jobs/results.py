"""What jobs write besides their main results: run files, versions, tables that grow by rows."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowpm_dist.io.files import WriteError, write_text, written_whole

PACKAGES = (
    "flowpm-dist", "tensorflow", "tensorflow-cpu", "mesh-tensorflow", "horovod", "mpi4py",
    "numpy", "zarr", "camb",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_run_file(path: Path, text: str) -> None:
    """Write the resolved run file of a job.

    Raises:
        WriteError: it cannot be written.
    """
    write_text(path, f"# As run by flowpm-dist.\n{text}")


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
        kept = [row for row in read_rows(path) if int(row[columns[0]]) < first]
        with written_whole(path) as aside:
            self._file = aside.open("w", newline="")
            self._rows = csv.DictWriter(self._file, columns)
            self._rows.writeheader()
            self._rows.writerows(kept)
            self._file.flush()

    def add(self, values: Mapping[str, Any]) -> None:
        """Add a row.

        Args:
            values: by name of the column; columns without a value stay empty.

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


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a table, without a last one that was only partly written.

    Args:
        path: path of the file; a missing file has no rows.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]
