"""What a training leaves while it runs: a table, TensorBoard's events, a bar."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any

from flowpm_dist.cosmoflow.phases import PHASES
from flowpm_dist.io.files import WriteError, written_whole

COLUMNS = (
    "step", "samples", "simulations", "loss", "validation_loss", "rate", "gradient_norm",
    "samples_per_second", *(f"{phase}_seconds" for phase in PHASES),
)  # fmt: skip


class MetricsTable:
    """metrics.csv: a row for each step.

    Args:
        path: of the file.
        after: of what the file holds, rows of this step and later ones are dropped: a training that
            is resumed makes them again.

    Raises:
        WriteError: it cannot be written.
    """

    def __init__(self, path: Path, after: int) -> None:
        self._path = path
        kept = [row for row in read_metrics(path) if int(row["step"]) < after]
        with written_whole(path) as aside:
            self._file = aside.open("w", newline="")
            self._rows = csv.DictWriter(self._file, COLUMNS)
            self._rows.writeheader()
            self._rows.writerows(kept)
            self._file.flush()

    def add(self, **values: Any) -> None:
        """One more row; columns that are not named stay empty."""
        try:
            self._rows.writerow({name: _text(value) for name, value in values.items()})
            self._file.flush()
        except OSError as error:
            raise WriteError.of(self._path, error) from error

    def close(self) -> None:
        """No more rows will be added; those that were are on disk."""
        with contextlib.suppress(OSError):  # of a row that could not be written, which was told
            self._file.close()


def _text(value: Any) -> Any:
    return f"{value:.9g}" if isinstance(value, float) else value


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv; none where there is no such file, and no half-written last one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


class TensorBoard:
    """Scalars for TensorBoard.

    Args:
        folder: of the events of all sessions.
        first: step that this session begins with; its events go into a folder of their own.
    """

    def __init__(self, folder: Path, first: int) -> None:
        import tensorflow as tf

        self._scalar, self._writer = (
            tf.summary.scalar,
            tf.summary.create_file_writer(str(folder / f"from-{first}")),
        )

    def add(self, step: int, **values: float) -> None:
        """The values of a step, by name."""
        with self._writer.as_default():
            for name, value in values.items():
                self._scalar(name, value, step=step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
