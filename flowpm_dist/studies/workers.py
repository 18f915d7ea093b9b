"""Workers that share the work in one folder: one worker at a time does each piece.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from flowpm_dist.jobs.locks import Lock
from meshimpl import launch

CLAIM = ".claim"
"""The file in the folder of a piece of work that its worker locks."""
LOOK_SECONDS = 0.2
"""Time between two looks at a process, or at a claim [s]."""
WAIT_SECONDS = 1.0
"""Time between two looks at the work of other workers [s]."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A context that only one worker at a time can enter for a folder."""
    with Lock(folder / CLAIM) as claim:
        while not claim.take():
            time.sleep(LOOK_SECONDS)
        yield


def share(
    pieces: Mapping[Path, Callable[[Lock], object]],
    stop: StopSignals,
    show: Callable[[int, Path], None],
) -> int:
    """Do those pieces of work that no other worker does, until all are done or a signal comes.

    Args:
        pieces: what does the work, or what is left of it, by the folder that a worker claims.
        stop: the signals that this process has received.
        show: is called after each piece, with the number of pieces that are done and its folder.

    Returns:
        The number of pieces that are done.
    """
    left = dict(pieces)
    while left and not stop:
        before = len(left)
        for folder, do in [*left.items()]:
            if stop:
                break
            with Lock(folder / CLAIM) as claim:
                if not claim.take():
                    continue
                do(claim)
            if not stop:
                del left[folder]
                show(len(pieces) - len(left), folder)
        if len(left) == before and not stop:
            time.sleep(WAIT_SECONDS)
    return len(pieces) - len(left)


class StopSignals:
    """Signals that ask this process to stop, remembered until its runs have ended.

    It is a context: inside, a signal is remembered, and a second SIGINT raises SystemExit.

    Args:
        say: shows the user a line.

    Attributes:
        received: the number of the last signal; None without one.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._say = say
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._handlers = {
            number: signal.signal(number, self._note) for number in launch.STOP_SIGNALS
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if number == self.received == signal.SIGINT:
            raise SystemExit(128 + number)
        launch.leave_terminal(number)
        if self.received is None:
            self._say("stopping the runs ...")
        self.received = number

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.received or 0).name
