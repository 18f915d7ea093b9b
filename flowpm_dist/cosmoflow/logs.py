"""The columns of metrics.csv, and events for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from flowpm_dist.cosmoflow.phases import PHASES

COLUMNS = (
    "step", "samples", "simulations", "loss", "validation_loss", "rate", "gradient_norm",
    "samples_per_second", *(f"{phase}_seconds" for phase in PHASES),
)  # fmt: skip


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
