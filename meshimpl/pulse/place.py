"""Where a rank is, and the memory through which its pulse knows it."""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

GOES_ON, LEAVES, ABORTS = 0, 1, 2
"""How a rank ends: not yet, in good order, or with the whole job."""


class Wait(NamedTuple):
    """A meeting of a group of ranks.

    Attributes:
        ordinal: the meeting's number in its group; the first is 1. The meetings of a group pair in
            their order, whatever they are for.
        first, size, distance: the group: its first rank, the number of ranks, and the distance of
            one rank from the next.
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
        text: description for messages.
        moves: how often the rank has gone from one place to another.
        inside: whether all ranks must come to this place.
        wait: the meeting in which it waits and does nothing else; None if it may be computing.
        begun: the last meeting of each group that it has begun, if it waits.
        ending: GOES_ON, LEAVES or ABORTS.
        stopped: whether the system has stopped it, as its pulse sees.
        idle: the system's letter for its state once it has done nothing for a while, or "".
    """

    text: str = ""
    moves: int = 0
    inside: bool = False
    wait: Wait | None = None
    begun: tuple[Wait, ...] = ()
    ending: int = GOES_ON
    stopped: bool = False
    idle: str = ""

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Place:
        """Returns a place that was written as a list of JSON."""
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

    # Checksum and length of what follows: a rank may be stopped while it writes.
    _HEAD = struct.Struct("<II")
    _START = 8  # the ending lies before: another thread may write it
    _SIZE = 8192
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

    def write(self, place: Place) -> None:
        """Writes where this rank is."""
        if place.wait is None or len(place.begun) > self._GROUPS:
            place = place._replace(wait=None, begun=())
        data = json.dumps(place._replace(text=place.text[: self._TEXT])).encode()
        data = self._HEAD.pack(zlib.crc32(data), len(data)) + data
        self._memory[self._START : self._START + len(data)] = data

    def end(self, ending: int) -> None:
        """Writes that this rank ends: LEAVES or ABORTS."""
        self._memory[0] = ending

    def read(self) -> Place:
        """Returns the last place, an empty one if the rank is writing another at this moment."""
        checksum, length = self._HEAD.unpack_from(self._memory, self._START)
        start = self._START + self._HEAD.size
        data, ending = self._memory[start : start + length], self._memory[0]
        if not data or zlib.crc32(data) != checksum:
            return Place(ending=ending)
        return Place.from_json(json.loads(data))._replace(ending=ending)
