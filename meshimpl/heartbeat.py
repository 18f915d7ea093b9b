"""Where each rank is: what its pulse tells the others, so that a job that is stuck ends.

See `meshimpl.pulse` for what ends a job. A rank that writes or computes alone for an hour is waited
for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from meshimpl import engine, launch
from meshimpl.engine import CollectiveError, Ranks
from meshimpl.pulse import Heart, Wait
from meshimpl.pulse.heart import ROOM

_LOOKS = 1.0  # time between two looks at a collective of a graph [s]
_NOTHING = 2e-3  # processor time of a thread that goes to wait [s]
_COUNTS = 2.5  # time for which a look counts [s]; shorter than the beats that prove a deadlock


class _Here:
    """Where this rank is."""

    text = "computing or writing on its own"
    inside = False
    wait: Wait | None = None
    moves = 0
    heart: Heart | None = None

    def go(self, text: str, inside: bool, wait: Wait | None) -> None:
        """Goes to another place."""
        self.text, self.inside, self.wait = text, inside, wait
        self.tell()

    def tell(self) -> None:
        """Tells where this rank is now, after it has moved."""
        self.moves += 1
        if self.heart is not None:
            self.heart.is_at(self.text, self.moves, self.inside, self.wait)


_here = _Here()


@contextlib.contextmanager
def at(text: str, *, meeting: Ranks = (), alone: bool = False) -> Iterator[None]:
    """Tells the other ranks where this one is, for as long as the context lasts.

    Only the main thread speaks for its rank.

    Args:
        text: for the message.
        meeting: the group of a meeting, in which it waits and does nothing else; otherwise it may
            be computing as well.
        alone: without other ranks, so that it is never taken for waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer = _here.text, _here.inside, _here.wait
    _here.go(text, not alone, Wait.of(0, meeting) if meeting else None)
    try:
        yield
    finally:
        _here.go(*outer)


class _Collective(NamedTuple):
    """A collective that a graph has begun.

    Attributes:
        text: for messages.
        wait: see `Place`.
        moves: how often the main thread had gone from one place to another.
        work: processor time of the main thread [s].
        since: a `monotonic` time [s].
    """

    text: str
    wait: Wait | None
    moves: int
    work: float
    since: float

    def is_waited_for(self) -> bool:
        """Returns whether the main thread has done nothing since, and for a while."""
        rests = _here.moves == self.moves and _work() - self.work < _NOTHING
        return rests and time.monotonic() - self.since > _LOOKS


class _Graphs:
    """The collectives in which graphs wait that users have lowered themselves.

    TensorFlow's threads tell when one begins and ends. A thread of Python looks whether the main
    thread still waits for the graph: one that fails elsewhere leaves a collective behind.
    """

    def __init__(self) -> None:
        self._begun: dict[str, _Collective] = {}
        self._lock = threading.Lock()
        self._told: _Collective | None = None
        self._watcher: threading.Thread | None = None

    def begin(self, name: str, text: str, ranks: Ranks) -> None:
        """Notes that a collective has begun."""
        wait = Wait.of(1 + zlib.crc32(name.encode()), ranks)
        begun = _Collective(text, wait, _here.moves, _work(), time.monotonic())
        with self._lock:
            self._begun[name] = begun
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, daemon=True)
                self._watcher.start()

    def end(self, name: str) -> None:
        """Notes that it has ended."""
        with self._lock:
            if self._begun.pop(name, None) is self._told:
                self._tell(None)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOKS)
            with self._lock:
                self._tell(self._only())

    def _only(self) -> _Collective | None:
        """Returns the collective for which the main thread waits, if there is no other.

        With two, one may be what another graph still computes for.
        """
        found = list(self._begun.values())
        return found[0] if len(found) == 1 and found[0].is_waited_for() else None

    def _tell(self, collective: _Collective | None) -> None:
        heart = _here.heart
        if heart is None or (collective is None and self._told is None):
            return
        self._told = collective
        if collective is None:
            _here.tell()
        else:
            until = time.monotonic() + _COUNTS
            number = -1 - int(1000 * collective.since)  # unlike those of other places
            heart.is_at(collective.text, number, True, collective.wait, until)


def _work() -> float:
    """Returns the processor time of the main thread [s]; ever more where it is not known."""
    try:
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        return time.clock_gettime(clock)
    except (AttributeError, OSError):
        return time.monotonic()


graphs = _Graphs()
"""Of this process."""


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


def end_job(message: str) -> None:
    """Ends every rank, with this message."""
    error = CollectiveError(message)
    sys.excepthook(CollectiveError, error, None)
    launch.abort(1)
