"""Workers that share the work in one folder: one worker at a time does each piece.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from flowpm_dist.io.files import no_link
from meshimpl import launch

CLAIM = ".claim"
LOOK_SECONDS = 0.2
"""Time between two looks at a process, or at a claim [s]."""
WAIT_SECONDS = 1.0
"""Time between two looks at the work of other workers [s]."""


class Claim:
    """A piece of work that one process at a time does, on any host that sees its folder.

    The system gives the claim up when the process ends, however it ends.

    Args:
        folder: folder of the piece; it is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._path = folder, folder / CLAIM
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Returns whether this process has the claim now."""
        file = open(self._path, "a", opener=no_link)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptor of the claim, if this process has it."""
        return () if self._file is None else (self._file.fileno(),)

    def give_up(self) -> None:
        """Let another process take it."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A context that only one worker at a time can enter for a folder."""
    claim = Claim(folder)
    while not claim.take():
        time.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        claim.give_up()


def share(
    pieces: Mapping[Path, Callable[[Claim], object]],
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
            claim = Claim(folder)
            if not claim.take():
                continue
            try:
                do(claim)
            finally:
                claim.give_up()
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
