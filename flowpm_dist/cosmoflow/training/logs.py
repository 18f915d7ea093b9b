"""The logs of each step of a training: a row of metrics.csv, and events for TensorBoard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.phases import PHASES
from flowpm_dist.cosmoflow.training.training import StepReport
from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.tables import Table

COLUMNS = (
    "step", "samples", "simulations", "loss", "validation_loss", "validation_mae", "rate",
    "gradient_norm", "samples_per_second", *(f"{phase}_seconds" for phase in PHASES),
)  # fmt: skip


class TensorBoard:
    """Scalars for TensorBoard.

    Args:
        folder: of the events of all sessions.
        first: step that this session begins with; its events go into a folder of their own.

    Raises:
        WriteError: by any method but `close`: events cannot be written.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self._path = folder / f"from-{first}"
        with self._written():
            self._writer = tf.summary.create_file_writer(str(self._path))

    def add(self, step: int, **values: float) -> None:
        """Adds the values of a step, by name. They may stay in memory for a while."""
        with self._written(), self._writer.as_default():
            for name, value in values.items():
                tf.summary.scalar(name, value, step=step)

    def flush(self) -> None:
        """Writes what is still in memory."""
        with self._written():
            self._writer.flush()

    def close(self) -> None:
        """Closes the file. Events that cannot be written, of which `flush` tells, are dropped."""
        with contextlib.suppress(tf.errors.OpError):
            self._writer.close()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            raise WriteError.of(self._path, error) from error


class TrainingLogs:
    """The table and TensorBoard's events of a session. On rank 0.

    Args:
        folder: of the training.
        first: step that this session begins with.

    Raises:
        WriteError: the table cannot be written.
    """

    def __init__(self, folder: TrainingFolder, first: int) -> None:
        self._table = Table(folder.metrics, COLUMNS, first)
        self._board = TensorBoard(folder.path / "tensorboard", first)

    def add(
        self,
        report: StepReport,
        seconds: dict[str, float],
        rate: float,
        validation: tuple[float, float] | None,
        *,
        samples: int,
        simulations: int,
    ) -> None:
        """Adds a step.

        Args:
            report: of the step.
            seconds: of each phase.
            rate: samples per second.
            validation: loss and mean absolute error of validation, where they were found after
                this step, see `mean_errors`.
            samples: seen so far.
            simulations: made when the step began.

        Raises:
            WriteError: the row, or events of earlier steps, cannot be written.
        """
        found = validation or ()
        values = {
            "loss": report.loss,
            "rate": report.rate,
            "gradient_norm": report.gradient_norm,
            "samples_per_second": rate,
            **dict(zip(("validation_loss", "validation_mae"), found, strict=False)),
            **{f"{phase}_seconds": value for phase, value in seconds.items()},
        }
        counts = {"step": report.step, "samples": samples, "simulations": simulations}
        self._table.add(counts | values)
        self._board.add(report.step, **values)

    def flush(self) -> None:
        """Writes what is still in memory.

        Raises:
            WriteError: it cannot be written.
        """
        self._board.flush()

    def close(self) -> None:
        """Closes both, see `flush`."""
        self._board.close()
        self._table.close()
