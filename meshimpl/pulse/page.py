"""What a rank tells its pulse, through a page of memory that both have."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

GOES_ON, LEAVES, ABORTS = 0, 1, 2
"""What a rank says of its end: nothing yet, that it ends in good order, that it ends the job."""


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        text: for messages.
        moves: how often it has gone from one place to another.
        inside: whether it is where all ranks must be.
        waiting: whether it waits for other ranks and does nothing else.
        ending: GOES_ON, LEAVES or ABORTS.
        stopped: whether the system has stopped it, as its pulse sees.
    """

    text: str = ""
    moves: int = 0
    inside: bool = False
    waiting: bool = False
    ending: int = GOES_ON
    stopped: bool = False


class Page:
    """The memory that a rank shares with its pulse.

    Args:
        file: descriptor of the memory.
    """

    _HEAD = struct.Struct("<q??H")
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

    def write(self, text: str, moves: int, inside: bool, waiting: bool) -> None:
        """Tells where this rank is."""
        data = text.encode()[: self._SIZE - self._START - self._HEAD.size]
        data = self._HEAD.pack(moves, inside, waiting, len(data)) + data
        self._memory[self._START : self._START + len(data)] = data

    def end(self, ending: int) -> None:
        """Tells that this rank ends: LEAVES or ABORTS."""
        self._memory[0] = ending

    def read(self, *, stopped: bool = False) -> Place:
        """Returns what was told last.

        Args:
            stopped: see `Place`.
        """
        moves, inside, waiting, length = self._HEAD.unpack_from(self._memory, self._START)
        start = self._START + self._HEAD.size
        text = self._memory[start : start + length].decode(errors="ignore")
        return Place(text, moves, inside, waiting, self._memory[0], stopped)
