"""Ending long work when a signal asks for it, on all ranks at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import tensorflow as tf

from meshimpl.process_mesh import ProcessMesh

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Of a scheduler or a person that wants the work to stop."""


class StopError(Exception):
    """A signal asked for the end, and what was done is kept."""


class StopRequest:
    """Signals that ask for the end, agreed on by all ranks after a step."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh, self._received = mesh, 0

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """Inside, the signals are taken down instead of ending the process."""

        def note(number: int, frame: FrameType | None) -> None:
            self._received = number

        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def name(self) -> str | None:
        """Of a signal that some rank has received; the same answer on every rank."""
        received = int(self._mesh.world.allreduce(tf.constant(self._received), "max"))
        return signal.Signals(received).name if received else None
