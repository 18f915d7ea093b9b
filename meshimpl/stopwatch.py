"""The time that the collectives of a graph take, including the wait for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

KINDS = ("allreduce", "allgather", "alltoall", "broadcast")


class Stopwatch:
    """Adds up the seconds of each kind of collective in the graphs that are built with it."""

    def __init__(self) -> None:
        self._seconds = {
            kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"seconds_of_{kind}")
            for kind in KINDS
        }

    def now(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the time [s], in a graph, once some tensors have been computed."""
        with tf.control_dependencies(after):
            return tf.timestamp()

    def add(self, kind: str, begin: tf.Tensor, end: tf.Tensor) -> Any:
        """Returns the operation, in a graph, that adds a time to those of a kind."""
        return self._seconds[kind].assign_add(end - begin, read_value=False)

    def lap(self) -> dict[str, float]:
        """Returns the seconds of each kind since the last lap."""
        seconds = {kind: float(total) for kind, total in self._seconds.items()}
        for total in self._seconds.values():
            total.assign(0.0)
        return seconds
