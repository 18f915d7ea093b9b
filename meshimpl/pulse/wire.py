"""How pulses find each other and talk: over TCP, one report in JSON a line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import socket
import struct
from typing import NamedTuple

from meshimpl.pulse.place import Place

_LONGEST = 2**16  # line [bytes]
_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


class Report(NamedTuple):
    """What a pulse sends another in each beat.

    Attributes:
        secret: known to the pulses of one job alone.
        rank, host, process: the rank whose pulse sends it.
        place: where that rank is.
        limit, variable: the limit of silence that rank 0 has chosen [s], and the environment
            variable that sets another.
        end: exit status if the job ends; otherwise None.
    """

    secret: str
    rank: int
    host: str
    process: int
    place: Place
    limit: float
    variable: str
    end: int | None = None


class Line:
    """A connection that carries reports.

    Args:
        connection: open connection.
        secret: the job's secret; a connection on which another one comes is taken for closed.
    """

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.setblocking(False)
        self.connection, self._secret = connection, secret
        self._part, self._unsent = b"", b""

    def send(self, report: Report) -> None:
        """Sends a report, unless an earlier one is still on its way."""
        self._unsent = self._unsent or json.dumps(report).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def receive(self) -> tuple[list[Report], bool]:
        """Returns the reports that have come, and whether more can come."""
        try:
            data = self.connection.recv(2**16)
            *lines, self._part = (self._part + data).split(b"\n")
            return list(map(self._read, lines)), bool(data) and len(self._part) < _LONGEST
        except BlockingIOError:
            return [], True
        except (OSError, TypeError, ValueError):
            return [], False

    def _read(self, line: bytes) -> Report:
        """Returns the report in a line; every message that a pulse receives is read here.

        Raises:
            TypeError, ValueError: it is no report of this job.
        """
        report = Report(*json.loads(line))
        if report.secret != self._secret:
            raise ValueError("a report of another job")
        return report._replace(place=Place.from_json(report.place))


def open_server() -> socket.socket:
    """Returns a socket on any free port of all addresses of this host, for any number of calls."""
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=4096)


def addresses() -> list[str]:
    """Returns the addresses of this host, the loopback address last."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found[str(entry[4][0])] = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = None
    loopback = [address for address in found if address.startswith("127.") or address == "::1"]
    return [address for address in found if address not in loopback] + (loopback or ["127.0.0.1"])
