"""How pulses find each other and talk: TCP, one JSON value a line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONGEST = 2**16  # of a line [bytes]
_LISTENS = "0A"  # in /proc/net/tcp
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
    """Whether the srun that has started this job is alive, if it runs on this host.

    Killed, it leaves its tasks running. It listens at a port for what concerns them. That is looked
    up and not called: a call without a message makes srun print an error.
    """

    def __init__(self, environment: Mapping[str, str], proc: Path = Path("/proc/net")) -> None:
        port = environment.get("SLURM_STEP_LAUNCHER_PORT", "")
        self._port, self._proc = int(port) if port.isdigit() else 0, proc
        self._was_there, self._missed = False, 0

    def has_gone(self) -> bool:
        """Returns whether it was there, and was not at this and the last question."""
        if not self._port:
            return False
        is_there = self._listens()
        self._was_there |= is_there
        self._missed = 0 if is_there else self._missed + 1
        return self._was_there and self._missed >= 2

    def _listens(self) -> bool:
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in (self._proc / name).read_text().splitlines()[1:]:
                    local, state = line.split()[1], line.split()[3]
                    if state == _LISTENS and int(local.rpartition(":")[2], 16) == self._port:
                        return True
        return False


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
