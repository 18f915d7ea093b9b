"""Where each rank is: what its pulse tells the others, so that a job that is stuck ends.

See `meshimpl.pulse` for what ends a job. A rank that writes or computes alone for an hour is waited
for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from meshimpl import engine, launch
from meshimpl.engine import CollectiveError, Ranks
from meshimpl.pulse import Heart, Wait
from meshimpl.pulse.heart import ROOM


class _Here:
    """Where this rank is.

    Attributes:
        begun: the last meeting of each group that this rank has begun.
        is_alone: whether the main thread alone has begun meetings so far.
    """

    text = "computing or writing on its own"
    inside = False
    wait: Wait | None = None
    moves = 0
    heart: Heart | None = None
    is_alone = True

    def __init__(self) -> None:
        self.begun: dict[Ranks, Wait] = {}

    def begin(self, ranks: Ranks) -> Wait | None:
        """Counts a meeting before it begins; returns it if it can be waited for, and watched."""
        before = self.begun.get(ranks)
        meeting = Wait.of(before.ordinal + 1 if before else 1, ranks)
        if meeting is not None:
            self.begun[ranks] = meeting
        return meeting if self.is_alone and not _other_threads() else None

    def go(self, text: str, inside: bool, wait: Wait | None) -> None:
        """Goes to another place."""
        self.text, self.inside, self.wait = text, inside, wait
        self.moves += 1
        if self.heart is not None:
            self.heart.is_at(text, self.moves, inside, wait, tuple(self.begun.values()))


_here = _Here()


def _other_threads() -> bool:
    """Returns whether there are threads of Python that might begin a meeting meanwhile."""
    found = [thread for thread in threading.enumerate() if thread.name != launch.WITHOUT_RANKS]
    return len(found) > 1


@contextlib.contextmanager
def at(text: str, *, meeting: Ranks = (), alone: bool = False) -> Iterator[None]:
    """Tells the other ranks where this one is, for as long as the context lasts.

    Only the main thread speaks for its rank. After a meeting that another thread has begun, nothing
    proves any more what this rank waits for.

    Args:
        text: for the message.
        meeting: the group of a meeting, in which it waits and does nothing else; otherwise it may
            be computing as well.
        alone: without other ranks, so that it is never taken for waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        _here.is_alone = _here.is_alone and not meeting
        yield
        return
    outer = _here.text, _here.inside, _here.wait
    _here.go(text, not alone, _here.begin(meeting) if meeting else None)
    try:
        yield
    finally:
        _here.go(*outer)


def watch(ranks: Ranks) -> Heart | None:
    """Lets the ranks of a job watch each other from now on. On all ranks.

    Args:
        ranks: all of the job's.

    Returns:
        This rank's part; None if the user does not want it.

    Raises:
        LaunchError: a limit is not a number of seconds.
    """
    stall, silence = launch.stall_limit(), launch.silence_limit()
    if not stall:
        return None

    def from_rank_zero(data: bytes) -> bytes:
        row = np.frombuffer(data.ljust(ROOM, b"\0"), np.uint8)
        with tf.init_scope(), tf.device("CPU:0"):
            told = engine.current().broadcast(tf.constant(row), ranks[0], ranks, "pulse").numpy()
        return bytes(told).rstrip(b"\0")

    _here.heart = Heart(from_rank_zero, stall=stall, silence=silence or stall)
    _here.go(_here.text, _here.inside, _here.wait)
    return _here.heart


def is_heard(patience: float) -> bool | None:
    """Returns whether rank 0 hears this rank's pulse; None if the ranks do not watch each other.

    Args:
        patience: time for which it is waited for [s].
    """
    return _here.heart.is_heard(patience) if _here.heart is not None else None


def end_job(message: str) -> None:
    """Ends every rank, with this message."""
    error = CollectiveError(message)
    sys.excepthook(CollectiveError, error, None)
    launch.abort(1)
