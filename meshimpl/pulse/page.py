"""What a rank tells its pulse, through a page of memory that both have."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

GOES_ON, LEAVES, ABORTS = 0, 1, 2
"""What a rank says of its end: nothing yet, that it ends in good order, that it ends the job."""

HEARD = b"heard\n"
"""What a pulse writes to its rank once rank 0 hears it. Anything else is the status of an end."""


class Wait(NamedTuple):
    """A meeting of a group of ranks.

    Attributes:
        ordinal: which of the group's meetings it is; the first is 1. The meetings of a group pair
            in their order, whatever they are for.
        first, size, distance: the group: its first rank, their number, and the distance of one from
            the next.
    """

    ordinal: int
    first: int
    size: int
    distance: int

    @classmethod
    def of(cls, ordinal: int, ranks: Sequence[int]) -> Wait | None:
        """Returns the meeting of a group; None if its ranks are not equally far apart."""
        distance = ranks[1] - ranks[0]
        even = list(ranks) == list(range(ranks[0], ranks[-1] + 1, distance))
        return cls(ordinal, ranks[0], len(ranks), distance) if even else None

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
        wait: the meeting in which it waits and does nothing else; None if it may be computing.
        begun: the last meeting of each group that it has begun, if it waits.
        ending: GOES_ON, LEAVES or ABORTS.
        stopped: whether the system has stopped it, as its pulse sees.
    """

    text: str = ""
    moves: int = 0
    inside: bool = False
    wait: Wait | None = None
    begun: tuple[Wait, ...] = ()
    ending: int = GOES_ON
    stopped: bool = False

    @classmethod
    def told(cls, values: Sequence[Any]) -> Place:
        """Returns a place that came as a list of JSON."""
        place = cls(*values)
        wait = None if place.wait is None else Wait(*place.wait)
        return place._replace(wait=wait, begun=tuple(Wait(*begun) for begun in place.begun))

    def has_begun(self, meeting: Wait) -> bool:
        """Returns whether a rank that waits has begun a meeting, or one after it."""
        return any(mine[1:] == meeting[1:] and mine >= meeting for mine in self.begun)


class Page:
    """The memory that a rank shares with its pulse.

    Args:
        file: descriptor of the memory.
    """

    _SUM = struct.Struct("<I")  # of all that follows: a rank may be stopped while it writes
    _HEAD = struct.Struct("<q??HH")
    _WAIT = struct.Struct("<QIII")
    _START = 8  # the ending lies before: another thread may write it
    _SIZE = 2048
    _GROUPS = 32  # beyond which a rank is never said to wait
    _TEXT = 400

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
        begun: Sequence[Wait] = (),
    ) -> None:
        """Tells where this rank is; see `Place`."""
        if wait is None or len(begun) > self._GROUPS:
            wait, begun = None, ()
        words = text.encode()[: self._TEXT]
        waits = [self._WAIT.pack(*each) for each in (*begun, *([wait] if wait else []))]
        head = self._HEAD.pack(moves, inside, wait is not None, len(waits), len(words))
        data = b"".join([head, *waits, words])
        data = self._SUM.pack(zlib.crc32(data)) + data
        self._memory[self._START : self._START + len(data)] = data

    def end(self, ending: int) -> None:
        """Tells that this rank ends: LEAVES or ABORTS."""
        self._memory[0] = ending

    def read(self, *, stopped: bool = False) -> Place:
        """Returns what was told last; no place if the rank is just about to tell another.

        Args:
            stopped: see `Place`.
        """
        data, ending = self._memory[self._START :], self._memory[0]
        moves, inside, waits, number, length = self._HEAD.unpack_from(data, self._SUM.size)
        start = self._SUM.size + self._HEAD.size
        middle = start + number * self._WAIT.size
        told = data[self._SUM.size : middle + length]
        if self._SUM.unpack_from(data) != (zlib.crc32(told),):
            return Place(ending=ending, stopped=stopped)
        begun = [Wait(*each) for each in self._WAIT.iter_unpack(data[start:middle])]
        wait = begun.pop() if waits else None
        text = data[middle : middle + length].decode(errors="ignore")
        return Place(text, moves, inside, wait, tuple(begun), ending, stopped)
