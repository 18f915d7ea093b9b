"""The state of a rank, the memory it shares with its pulse, and the connections between pulses.

Pulses send lines of text over TCP. A line is the secret of the job and a report in JSON. After a
line with another secret the connection is not read further.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

RUNNING, FINISHED, ABORTING = 0, 1, 2
"""How a rank ends: not yet, in good order, or with the whole job."""
LOOPBACK = "127.0.0.1"
_MAX_LINE_BYTES = 2**16


class Meeting(NamedTuple):
    """A point of the program at which all ranks of a group wait for each other.

    Attributes:
        ordinal: the meeting's number in its group; the first is 1. The meetings of a group pair in
            their order, whatever they are for.
        first, size, distance: the group: its first rank, the number of ranks, and the distance of
            one rank from the next.
        is_call: whether it is a call of a mesh function, which has collectives in this group. Calls
            are counted apart: they pair with calls of the same function alone.
    """

    ordinal: int
    first: int
    size: int
    distance: int
    is_call: bool = False

    @classmethod
    def of(cls, ordinal: int, ranks: Sequence[int], is_call: bool = False) -> Meeting | None:
        """Returns the meeting of a group; None if its ranks are not equally far apart."""
        distance = ranks[1] - ranks[0]
        even = list(ranks) == list(range(ranks[0], ranks[-1] + 1, distance))
        return cls(ordinal, ranks[0], len(ranks), distance, is_call) if even else None

    @property
    def ranks(self) -> range:
        """The group."""
        return range(self.first, self.first + self.size * self.distance, self.distance)


class RankState(NamedTuple):
    """The state of a rank: its activity and its meeting.

    Attributes:
        text: description for messages.
        changes: how often the state has changed.
        is_collective: whether all ranks must come to this place of the program.
        wait: a meeting that it does not leave before all of its group have begun it, such as a call
            of a mesh function; None if it may continue alone.
        begun: the last meeting of each group that it has begun, if it waits.
        ending: RUNNING, FINISHED or ABORTING.
        stopped: whether the system has stopped it, as its pulse sees.
        idle: the system's letter for its state once it has done nothing for a while, or "".
    """

    text: str = ""
    changes: int = 0
    is_collective: bool = False
    wait: Meeting | None = None
    begun: tuple[Meeting, ...] = ()
    ending: int = RUNNING
    stopped: bool = False
    idle: str = ""

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> RankState:
        """Returns a state that was written as a JSON list."""
        state = cls(*values)
        wait = None if state.wait is None else Meeting(*state.wait)
        return state._replace(wait=wait, begun=tuple(Meeting(*begun) for begun in state.begun))

    def has_begun(self, other: RankState) -> bool:
        """Returns whether a rank that waits has begun the meeting of another, or one after it."""
        meeting = other.wait
        assert meeting is not None
        if meeting.is_call and self.wait == meeting and self.text != other.text:
            return False
        return any(mine[1:] == meeting[1:] and mine >= meeting for mine in self.begun)


class SharedState:
    """The state of a rank, in memory that it shares with its pulse.

    Args:
        file: descriptor of the memory.
    """

    # Checksum and length of what follows: a rank may be stopped while it writes.
    _HEAD = struct.Struct("<II")
    _START = 8  # the ending lies before: another thread may write it
    _SIZE = 8192
    _GROUPS = 32  # with more, a rank is never reported as waiting
    _TEXT = 400

    def __init__(self, file: int) -> None:
        self.file = file
        self._memory = mmap.mmap(file, self._SIZE)

    @classmethod
    def create(cls) -> SharedState:
        """Returns new shared memory."""
        try:
            file = os.memfd_create("meshimpl-pulse")
        except (AttributeError, OSError):  # elsewhere than on Linux, or in a sandbox
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, cls._SIZE)
        return cls(file)

    def write(self, state: RankState) -> None:
        """Writes the state of this rank."""
        if state.wait is None or len(state.begun) > self._GROUPS:
            state = state._replace(wait=None, begun=())
        data = json.dumps(state._replace(text=state.text[: self._TEXT])).encode()
        data = self._HEAD.pack(zlib.crc32(data), len(data)) + data
        self._memory[self._START : self._START + len(data)] = data

    def end(self, ending: int) -> None:
        """Writes how this rank ends: FINISHED or ABORTING."""
        self._memory[0] = ending

    def read(self) -> RankState:
        """Returns the last state, or an empty one if the rank is writing at this moment."""
        checksum, length = self._HEAD.unpack_from(self._memory, self._START)
        start = self._START + self._HEAD.size
        data, ending = self._memory[start : start + length], self._memory[0]
        if not data or zlib.crc32(data) != checksum:
            return RankState(ending=ending)
        return RankState.from_json(json.loads(data))._replace(ending=ending)


class Report(NamedTuple):
    """The report that a pulse sends to another in each beat.

    Attributes:
        rank, host, process: the rank whose pulse sends it.
        state: the state of that rank.
        limit, variable: the limit of silence that rank 0 has chosen [s], and the environment
            variable that sets another.
        end: exit status if the job ends; otherwise None.
    """

    rank: int
    host: str
    process: int
    state: RankState
    limit: float
    variable: str
    end: int | None = None


class Connection:
    """A connection between two pulses, which carries reports.

    Args:
        sock: open connection.
        secret: known only to the pulses of one job; after a line with another secret the
            connection counts as closed.

    Attributes:
        is_known: whether a report has arrived.
    """

    def __init__(self, sock: socket.socket, secret: str) -> None:
        sock.setblocking(False)
        self.sock, self._secret, self.is_known = sock, secret.encode(), False
        self._part, self._unsent = b"", b""

    def send(self, report: Report) -> None:
        """Sends a report, unless an earlier one is still on its way."""
        self._unsent = self._unsent or self._secret + b" " + json.dumps(report).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def receive(self) -> tuple[list[Report], bool]:
        """Returns the reports that have arrived, and whether more can arrive."""
        try:
            data = self.sock.recv(2**16)
            *lines, self._part = (self._part + data).split(b"\n")
            return list(map(self._read, lines)), bool(data) and len(self._part) < _MAX_LINE_BYTES
        except BlockingIOError:
            return [], True
        except (OSError, TypeError, ValueError):
            return [], False

    def _read(self, line: bytes) -> Report:
        """Returns the report in a line; every message that a pulse receives is read here.

        Raises:
            TypeError, ValueError: it is no report of this job.
        """
        secret, _, text = line.partition(b" ")
        if not hmac.compare_digest(secret, self._secret):
            raise ValueError("a report of another job")
        report, self.is_known = Report(*json.loads(text)), True
        return report._replace(state=RankState.from_json(report.state))


def open_server(*, one_host: bool) -> socket.socket:
    """Returns a socket on any free port, for any number of calls.

    Args:
        one_host: whether all ranks are on this host, so that it listens to this host alone; if not,
            at all addresses.
    """
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6() and not one_host:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server((LOOPBACK if one_host else "", 0), backlog=4096)


def addresses() -> list[str]:
    """Returns the addresses of this host, the loopback address last."""
    import psutil  # the pulse itself does without

    known: list[str] = []
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        known += [str(entry[4][0]) for entry in entries]
    with contextlib.suppress(OSError):
        for interface in psutil.net_if_addrs().values():
            known += [each.address for each in interface if each.family == socket.AF_INET]
    each_once = dict.fromkeys([*known, LOOPBACK])
    return sorted(each_once, key=lambda name: name.startswith("127.") or name == "::1")
