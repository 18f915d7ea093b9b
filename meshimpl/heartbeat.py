"""Signs of life between ranks: what ends a job that is stuck, and spares one that is only slow.

A thread of each rank meets those of the others every few seconds, whatever its rank is doing, and
tells them where it is. So a rank that writes or computes alone for an hour is waited for, and the
job ends, with a message on rank 0, when

* a rank has given no sign of life for the stall limit: it is stopped, or cut off;
* all ranks wait for each other at different places of the program, and none has moved.

The limit is that of `launch.stall_limit`: 300 s, or MESHIMPL_STALL_LIMIT.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from meshimpl import engine, launch
from meshimpl.engine import CollectiveError, Ranks

_BEATS = 60  # in a stall limit
_BEATS_WHILE_WAITING = 6  # after which ranks that can only wait for each other are stuck
_COLUMNS = ("place", "moves", "inside", "waiting", "leaving")
_TEXT = 256


class _Place:
    """Where this rank is, as its own thread writes it and the heart reads it."""

    text = "computing or writing on its own"
    inside = waiting = False
    moves = 0


_here = _Place()


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
    _here.text, _here.inside, _here.waiting = text, not alone, waiting
    _here.moves += 1
    try:
        yield
    finally:
        _here.text, _here.inside, _here.waiting = outer
        _here.moves += 1


def by_rank(ranks: Ranks, texts: Sequence[str]) -> str:
    """Returns one line for each different text that is not empty, after the ranks that said it."""
    said: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        said.setdefault(text, []).append(rank)
    return "\n".join(
        f"  rank{'s' * (len(who) > 1)} {', '.join(map(str, who[:8]))}{', ...' * (len(who) > 8)}: "
        f"{text}"
        for text, who in said.items()
        if text
    )


def is_stuck(tables: list[np.ndarray]) -> bool:
    """Returns whether ranks wait for each other in vain.

    Args:
        tables: of the beats so far, the last one last; each int64 of shape [ranks, 5] with the
            columns place, moves, inside, waiting and leaving.
    """
    place, _, inside, waiting, leaving = tables[-1].T
    if not inside.all() or leaving.any() or len(set(place)) == 1:
        return False
    beats = _BEATS_WHILE_WAITING if waiting.all() else _BEATS
    recent = tables[-beats - 1 :]
    return len(recent) > beats and all((table == recent[0]).all() for table in recent)


class Heart:
    """The thread that meets those of the other ranks, and the one that listens for it.

    Args:
        ranks: all of the job's.
        limit: seconds without a sign of life after which the job ends.
    """

    def __init__(self, ranks: Ranks, limit: float) -> None:
        self._ranks, self._limit = ranks, limit
        self._rank = launch.detect().rank
        self._leaving = threading.Event()
        self._beats = 0
        self._gather_numbers = self._gather(
            "heartbeat", tf.TensorSpec([1, len(_COLUMNS)], tf.int64)
        )
        self._gather_texts = self._gather("places", tf.TensorSpec([1, _TEXT], tf.uint8))
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._thread.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def _gather(self, name: str, spec: tf.TensorSpec) -> Callable[[np.ndarray], np.ndarray]:
        def gather(x: tf.Tensor) -> tf.Tensor:
            with tf.device("CPU:0"):
                return engine.current().gather(x, self._ranks, name)

        with tf.init_scope():
            function = tf.compat.v1.wrap_function(gather, [spec])

        def call(row: np.ndarray) -> np.ndarray:
            found: np.ndarray = function(tf.constant(row[np.newaxis])).numpy()
            return found

        return call

    def stop(self) -> None:
        """Ends the threads, when every rank calls this."""
        self._leaving.set()
        self._thread.join()

    def _beat_on(self) -> None:
        tables: list[np.ndarray] = []
        # When Horovod has been shut down there is nobody to meet.
        with contextlib.suppress(tf.errors.OpError):
            while True:
                self._leaving.wait(self._limit / _BEATS)
                here = _here
                place = zlib.crc32(here.text.encode())
                row = [place, here.moves, here.inside, here.waiting, self._leaving.is_set()]
                tables = [*tables[-_BEATS:], self._gather_numbers(np.array(row, np.int64))]
                self._beats += 1
                if tables[-1][:, -1].all():
                    return
                if is_stuck(tables):
                    self._end(here.text)

    def _end(self, text: str) -> None:
        row = np.frombuffer(text.encode()[:_TEXT].ljust(_TEXT, b"\0"), np.uint8)
        texts = [bytes(r).rstrip(b"\0").decode(errors="ignore") for r in self._gather_texts(row)]
        if self._rank == self._ranks[0]:
            end_job(
                "the ranks wait for each other at different places of the program:\n"
                + by_rank(self._ranks, texts)
            )

    def _listen(self) -> None:
        # Counted, not read from a clock: a job that is suspended as a whole has not been silent.
        seen, silent, step = 0, 0.0, self._limit / _BEATS
        while self._thread.is_alive():
            self._thread.join(step)
            silent = 0.0 if self._beats != seen else silent + step
            seen = self._beats
            if silent >= self._limit + step and self._thread.is_alive():
                end_job(
                    f"a rank has given no sign of life for {self._limit:g} s: it is stopped or cut "
                    "off, or its memory is swapped out. MESHIMPL_STALL_LIMIT sets another limit"
                )


def end_job(message: str) -> None:
    """Ends every rank, with this message."""
    error = CollectiveError(message)
    sys.excepthook(CollectiveError, error, None)
    launch.abort(1)
