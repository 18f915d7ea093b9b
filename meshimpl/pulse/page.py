"""What a rank tells its pulse, through a page of memory that both have."""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

GOES_ON, LEAVES, ABORTS = 0, 1, 2
"""What a rank says of its end: nothing yet, that it ends in good order, that it ends the job."""


class Wait(NamedTuple):
    """A collective in which a rank waits, and does nothing else.

    Attributes:
        key: two collectives of a group that never pair have different ones.
        first, size, distance: the group: its first rank, their number, and the distance of one from
            the next.
    """

    key: int
    first: int
    size: int
    distance: int

    @classmethod
    def of(cls, key: int, ranks: Sequence[int]) -> Wait | None:
        """Returns the wait of a group; None if its ranks are not equally far apart."""
        distance = ranks[1] - ranks[0]
        even = list(ranks) == list(range(ranks[0], ranks[-1] + 1, distance))
        return cls(key, ranks[0], len(ranks), distance) if even else None

    @property
    def ranks(self) -> range:
        """The group."""
        return range(self.first, self.first + self.size * self.distance, self.distance)


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        text: for messages.
        moves: how often it has gone from one place to another.
        inside: whether it is where all ranks must be.
        wait: what it waits in; None if it may be computing.
        ending: GOES_ON, LEAVES or ABORTS.
        stopped: whether the system has stopped it, as its pulse sees.
    """

    text: str = ""
    moves: int = 0
    inside: bool = False
    wait: Wait | None = None
    ending: int = GOES_ON
    stopped: bool = False

    @classmethod
    def told(cls, values: Sequence[Any]) -> Place:
        """Returns a place that came as a list of JSON."""
        place = cls(*values)
        return place if place.wait is None else place._replace(wait=Wait(*place.wait))


class Page:
    """The memory that a rank shares with its pulse.

    Args:
        file: descriptor of the memory.
    """

    _HEAD = struct.Struct("<q?HdQIII")
    _START = 8  # the ending lies before: another thread may write it
    _SIZE = 512

    def __init__(self, file: int) -> None:
        self.file = file
        self._memory = mmap.mmap(file, self._SIZE)

    @classmethod
    def create(cls) -> Page:
        """Returns a new page."""
        try:
            file = os.memfd_create("meshimpl-pulse")
        except (AttributeError, OSError):  # elsewhere than on Linux, or in a sandbox
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, cls._SIZE)
        return cls(file)

    def write(
        self,
        text: str,
        moves: int,
        inside: bool,
        wait: Wait | None = None,
        until: float = math.inf,
    ) -> None:
        """Tells where this rank is.

        Args:
            text, moves, inside, wait: see `Place`.
            until: after which the wait counts no longer if it was not told again; a `monotonic`
                time [s].
        """
        data = text.encode()[: self._SIZE - self._START - self._HEAD.size]
        group = (0, 0, 0, 0) if wait is None else wait
        data = self._HEAD.pack(moves, inside, len(data), until, *group) + data
        self._memory[self._START : self._START + len(data)] = data

    def end(self, ending: int) -> None:
        """Tells that this rank ends: LEAVES or ABORTS."""
        self._memory[0] = ending

    def read(self, *, stopped: bool = False) -> Place:
        """Returns what was told last.

        Args:
            stopped: see `Place`.
        """
        moves, inside, length, until, *group = self._HEAD.unpack_from(self._memory, self._START)
        start = self._START + self._HEAD.size
        text = self._memory[start : start + length].decode(errors="ignore")
        wait = Wait(*group) if group[2] and time.monotonic() < until else None
        return Place(text, moves, inside, wait, self._memory[0], stopped)
