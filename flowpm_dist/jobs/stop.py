"""Stopping a job on all ranks at once when a signal asks for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import tensorflow as tf

from meshimpl.process_mesh import ProcessMesh

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals by which a scheduler or a user stops a job."""


class StopError(Exception):
    """A job was stopped by a signal; what it has done is saved."""


class StopRequest:
    """A request to stop, which all ranks agree on after each step.

    Args:
        mesh: the ranks of the job.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh, self._received = mesh, 0

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """Inside, signals are remembered and do not end the process."""

        def note(number: int, frame: FrameType | None) -> None:
            self._received = number

        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def name(self) -> str | None:
        """Returns the name of a signal that some rank has received, or None. On all ranks.

        Every rank returns the same.
        """
        received = int(self._mesh.world.allreduce(tf.constant(self._received), "max"))
        return signal.Signals(received).name if received else None
