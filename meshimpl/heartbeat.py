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
from meshimpl.pulse import Heart
from meshimpl.pulse.heart import ROOM


class _Here:
    """Where this rank is."""

    text = "computing or writing on its own"
    inside = waiting = False
    moves = 0
    heart: Heart | None = None

    def go(self, text: str, inside: bool, waiting: bool) -> None:
        """Goes to another place."""
        self.text, self.inside, self.waiting = text, inside, waiting
        self.moves += 1
        if self.heart is not None:
            self.heart.is_at(text, self.moves, inside, waiting)


_here = _Here()


@contextlib.contextmanager
def at(text: str, *, waiting: bool = False, alone: bool = False) -> Iterator[None]:
    """Tells the other ranks where this one is, for as long as the context lasts.

    Only the main thread speaks for its rank.

    Args:
        text: for the message.
        waiting: for other ranks, and for nothing else; otherwise it may be computing as well.
        alone: without other ranks, so that it is never taken for waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer = _here.text, _here.inside, _here.waiting
    _here.go(text, not alone, waiting)
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
    _here.go(_here.text, _here.inside, _here.waiting)
    return _here.heart


def end_job(message: str) -> None:
    """Ends every rank, with this message."""
    error = CollectiveError(message)
    sys.excepthook(CollectiveError, error, None)
    launch.abort(1)
