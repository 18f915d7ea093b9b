"""Stopping a job on all ranks at once when a signal asks for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import tensorflow as tf

from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh


class StopError(Exception):
    """A job was stopped by a signal; what it has done is saved."""


class StopRequest:
    """A request to stop, which all ranks agree on after each step.

    Args:
        mesh: the ranks of the job.
        step: what a step of the job is called, such as "iteration".
        say: shows the user a line; it is called from another thread.
    """

    def __init__(self, mesh: ProcessMesh, step: str, say: Callable[[str], None]) -> None:
        self._mesh, self._received = mesh, 0
        self._step, self._say = step, say

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """Inside, signals are remembered and do not end the process.

        The first one is answered at once with a line. A second SIGINT raises SystemExit where there
        is one rank; where there are several, the process that started them ends them.
        """

        def note(number: int, frame: FrameType | None) -> None:
            if number == self._received == signal.SIGINT and self._mesh.size == 1:
                raise SystemExit(128 + number)
            self._received = number

        before = {number: signal.signal(number, note) for number in launch.STOP_SIGNALS}
        try:
            with _answered(f"stopping after this {self._step} ...", self._say):
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


@contextmanager
def _answered(line: str, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first of `launch.STOP_SIGNALS` is answered with a line.

    Python calls a signal's handler only between two of its own instructions, and a step of
    TensorFlow is one of them. What the interpreter writes to the wakeup file, it writes at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def answer() -> None:
        while number := os.read(reader, 1):
            if number[0] in launch.STOP_SIGNALS:
                say(line)
                break

    thread = threading.Thread(target=answer, name=launch.WITHOUT_RANKS, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
