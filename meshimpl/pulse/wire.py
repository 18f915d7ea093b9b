"""How pulses find each other and talk: TCP, one JSON value a line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LONGEST = 2**16  # of a line [bytes]
_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


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
    """Returns the addresses of this host: those of its name first, its own loop last."""
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
    of_loop = [address for address in found if address.startswith("127.") or address == "::1"]
    return [address for address in found if address not in of_loop] + (of_loop or ["127.0.0.1"])


class Srun:
    """Whether the srun that has started this job is alive, wherever it runs.

    Killed, it leaves its tasks running. It listens at a port for what concerns them; that nobody
    listens there any more counts only if somebody did before.
    """

    _EVERY = 10.0  # [s]
    _REFUSALS = 2  # one after the other

    def __init__(self, environment: Mapping[str, str]) -> None:
        names = ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_STEP_LAUNCHER_PORT")
        self._where = tuple(environment.get(name, "") for name in names)
        self._was_there, self._refused, self._waited = False, 0, self._EVERY

    def has_gone(self, seconds: float) -> bool:
        """Returns whether it has ended.

        Args:
            seconds: since the last question.
        """
        self._waited += seconds
        address, port = self._where
        if self._waited >= self._EVERY and address and port.isdigit():
            self._waited = 0.0
            try:
                socket.create_connection((address, int(port)), timeout=1.0).close()
                self._was_there, self._refused = True, 0
            except ConnectionRefusedError:
                self._refused += 1
            except OSError:  # its host may be cut off, or the network busy
                self._refused = 0
        return self._was_there and self._refused >= self._REFUSALS


class Line:
    """A connection that carries one JSON value a line.

    Args:
        connection: open.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._part, self._unsent = b"", b""

    def send(self, value: Any) -> None:
        """Sends a value, unless an earlier one is still on its way."""
        self._unsent = self._unsent or json.dumps(value).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def receive(self) -> tuple[list[Any], bool]:
        """Returns the values that have come, and whether more can come."""
        try:
            data = self.connection.recv(2**16)
            *lines, self._part = (self._part + data).split(b"\n")
            return [json.loads(line) for line in lines], bool(data) and len(self._part) < _LONGEST
        except BlockingIOError:
            return [], True
        except (OSError, ValueError):
            return [], False
