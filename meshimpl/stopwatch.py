"""How long the collectives of a graph take, waiting for other ranks included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

KINDS = ("allreduce", "allgather", "alltoall", "broadcast")


class Stopwatch:
    """Seconds of each kind of collective, added up by the graphs that were built with it."""

    def __init__(self) -> None:
        self._seconds = {
            kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"seconds_of_{kind}")
            for kind in KINDS
        }

    def now(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """In a graph: the time [s] once some tensors are there."""
        with tf.control_dependencies(after):
            return tf.timestamp()

    def add(self, kind: str, begin: tf.Tensor, end: tf.Tensor) -> Any:
        """In a graph: the operation that adds a time to those of a kind."""
        return self._seconds[kind].assign_add(end - begin, read_value=False)

    def lap(self) -> dict[str, float]:
        """Seconds of each kind since the last time this was asked."""
        seconds = {kind: float(total) for kind, total in self._seconds.items()}
        for total in self._seconds.values():
            total.assign(0.0)
        return seconds
