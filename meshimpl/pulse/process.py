"""The process that is a rank's pulse."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshimpl.launch.watch import stat_of
from meshimpl.pulse.judgement import PROOF, Cause, Peer, by_rank, is_stuck, named, trouble, who
from meshimpl.pulse.launchers import end_launcher, waited
from meshimpl.pulse.page import HEARD, Page, Place
from meshimpl.pulse.wire import Line, Srun, addresses, open_server

TIME_TO_ABORT = 12.0
"""Time in which a rank ends the job before its pulse ends the rank [s]; `abort` has an alarm."""
_AFTER_ROOT = 3.0  # in which rank 0 ends the job before others do [s]
_JOINING = 60.0  # in which pulses find that of rank 0 [s]
_CONNECTING = 3.0  # to one address [s]


@dataclass(frozen=True)
class Settings:
    """What a rank tells its pulse.

    Attributes:
        rank, size: of the rank and its job.
        speaks: whether this pulse says why a job ends when rank 0 cannot.
        stall: time after which ranks that wait for each other are stuck, and limit of silence
            within one host [s].
        silence: limit of silence between hosts [s].
        told: file that says that the end was told, or an empty text.
        port, secret, addresses: of the pulse of rank 0.
    """

    rank: int
    size: int
    speaks: bool
    stall: float
    silence: float
    told: str
    port: int
    secret: str
    addresses: Sequence[str]

    @property
    def beat(self) -> float:
        """Time between two beats [s]."""
        return min(self.stall / 60, self.silence / 10)

    @property
    def proof(self) -> int:
        """Beats in which a deadlock is proven, in at least `PROOF` seconds."""
        return max(2, math.ceil(PROOF / self.beat))


class Pulse(ABC):
    """What the pulses of all ranks have in common.

    Args:
        page: shared with the rank.
        settings: of the rank.
    """

    def __init__(self, page: Page, settings: Settings) -> None:
        self.page, self.settings = page, settings
        self.host, self.process = socket.gethostname(), os.getppid()
        self._launcher = self._starter()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, self._hear_rank)
        self._closed = False

    @abstractmethod
    def on_beat(self) -> None:
        """Tells the others where the rank is, and looks whether all is well."""

    @abstractmethod
    def on_leaving(self) -> None:
        """Tells the others that the rank has ended."""

    def is_there(self) -> bool:
        """Returns whether the rank has not ended."""
        return not self._closed and os.getppid() == self.process

    def place(self) -> Place:
        """Returns where the rank is."""
        stat = stat_of(self.process)
        return self.page.read(stopped=stat is not None and stat[0] == "T")

    def listen(self, connection: socket.socket, call: Callable[[], None]) -> None:
        """Calls something whenever a connection has news."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        self._selector.register(connection, selectors.EVENT_READ, call)

    def close(self, connection: socket.socket) -> None:
        """Closes a connection that was listened to."""
        self._selector.unregister(connection)
        connection.close()

    def run(self) -> None:
        """Beats until the rank has ended."""
        due = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                key.data()
            if not self.is_there():
                self.on_leaving()
                return
            if time.monotonic() >= due:
                due = time.monotonic() + self.settings.beat
                self.on_beat()
                if self._starter() not in (None, self._launcher):
                    mine = who([Peer(self.settings.rank, self.host, self.process)])
                    reason = f"the process {self._launcher} that started {mine} has ended"
                    self.end(Cause(reason), speaks=self.settings.speaks)

    def end(self, cause: Cause, *, speaks: bool = True, after: float = 0.0) -> None:
        """Lets the rank end the job; ends a rank that does not, and this pulse.

        Args:
            cause: why, and the status.
            speaks: whether to say it.
            after: time that others have to end the job before [s].
        """
        if speaks:
            say(f"error: {cause.reason}", self.settings.told, cause.status)
        launcher = self._launcher
        if waited(after, self._rank_has_ended):
            os._exit(0)  # in good order
        self.tell_rank(f"{cause.status}\n".encode())
        if not waited(TIME_TO_ABORT, self._rank_has_ended):
            os.kill(self.process, signal.SIGKILL)
        if self.settings.speaks and launcher is not None:
            end_launcher(launcher)
        os._exit(0)

    def tell_rank(self, text: bytes) -> None:
        """Writes to the rank, which may have ended."""
        with contextlib.suppress(OSError):
            os.write(1, text)

    def _rank_has_ended(self) -> bool:
        return os.getppid() != self.process

    def _starter(self) -> int | None:
        stat = stat_of(self.process)
        return int(stat[1]) if stat else None

    def _hear_rank(self) -> None:
        self._closed = not os.read(0, 2**16)


class RootPulse(Pulse):
    """The pulse of rank 0, which hears those of all ranks.

    Args:
        page, settings: see `Pulse`.
        server: at which the others call.
    """

    def __init__(self, page: Page, settings: Settings, server: socket.socket) -> None:
        super().__init__(page, settings)
        self._peers = {0: Peer(0, self.host, self.process)}
        self._tables: list[list[Place]] = []
        self._server, self._joining = server, 0.0
        self._srun = Srun(os.environ)
        server.setblocking(False)
        self.listen(server, self._accept)
        self.tell_rank(HEARD)

    def _limit(self) -> tuple[float, str]:
        """Returns the limit of silence [s] and the variable that sets it."""
        several = len({peer.host for peer in self._peers.values()}) > 1
        if several and self.settings.silence < self.settings.stall:
            return self.settings.silence, "MESHIMPL_SILENCE_LIMIT"
        return self.settings.stall, "MESHIMPL_STALL_LIMIT"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line = Line(self._server.accept()[0])
            self.listen(line.connection, lambda: self._welcome(line))

    def _welcome(self, line: Line) -> None:
        values, more = line.receive()
        if not values and more:
            return
        hello = values[0] if values and isinstance(values[0], dict) else {}
        if hello.get("secret") != self.settings.secret or hello["rank"] in self._peers:
            self.close(line.connection)
            return
        peer = Peer(hello["rank"], hello["host"], hello["process"], line)
        self._peers[peer.rank] = peer
        self.listen(line.connection, lambda: self._hear(peer))
        self._answer(peer)

    def _answer(self, peer: Peer) -> None:
        peer.send([self._peers[0].ending, *self._limit(), self.host, self.process])

    def _hear(self, peer: Peer) -> None:
        assert peer.line is not None
        values, more = peer.line.receive()
        if values:
            peer.hear(Place.told(values[-1]))
        if not more:
            peer.gone = 0.0
            self.close(peer.line.connection)

    def on_beat(self) -> None:
        """See `Pulse.on_beat`."""
        self._peers[0].hear(self.place())
        peers = [peer for _, peer in sorted(self._peers.items())]
        for peer in peers:
            peer.beat(self.settings.beat)
            self._answer(peer)
        self._look_for_missing()
        cause = trouble(peers, *self._limit())
        if self._srun.has_gone():
            cause = cause or Cause("the srun that started this job has ended")
        if len(peers) == self.settings.size and all(peer.fresh for peer in peers):
            cause = cause or self._stuck(peers)
        if cause is not None:
            for peer in peers:
                peer.send({"end": cause.status})
            self.end(cause)

    def _stuck(self, peers: Sequence[Peer]) -> Cause | None:
        """Returns where ranks wait for each other in vain; None if they do not."""
        for peer in peers:
            peer.fresh = False
        beats, proof = round(self.settings.stall / self.settings.beat), self.settings.proof
        table = [peer.place for peer in peers if peer.place is not None]
        self._tables = [*self._tables[-max(beats, proof) :], table]
        if not is_stuck(self._tables, proof, beats):
            return None
        found = by_rank([peer.rank for peer in peers], [place.text for place in table])
        reason = f"the ranks wait for each other at different places of the program:\n{found}"
        return Cause(reason, 1)

    def _look_for_missing(self) -> None:
        """Warns, once, of ranks that have not come."""
        before, self._joining = self._joining, self._joining + self.settings.beat
        missing = [rank for rank in range(self.settings.size) if rank not in self._peers]
        if missing and before < 2 * _JOINING <= self._joining:
            where = f"{', '.join(self.settings.addresses)}, port {self.settings.port}"
            say(
                f"warning: {named(missing)} cannot reach rank 0 by TCP ({where}): whether they are "
                "alive is not watched"
            )

    def on_leaving(self) -> None:
        """See `Pulse.on_leaving`."""
        self._peers[0].hear(self.page.read())
        for peer in self._peers.values():
            self._answer(peer)


class OtherPulse(Pulse):
    """The pulse of any other rank, which hears that of rank 0.

    Args:
        page, settings: see `Pulse`.
    """

    def __init__(self, page: Page, settings: Settings) -> None:
        super().__init__(page, settings)
        self._limit = settings.stall, "MESHIMPL_STALL_LIMIT"
        self._root: Peer | None = None
        for _ in range(round(_JOINING)):
            if not self.is_there() or self._joined():
                break
            time.sleep(1)

    def _joined(self) -> bool:
        hello = {"secret": self.settings.secret, "rank": self.settings.rank}
        hello |= {"host": self.host, "process": self.process}
        for address in self.settings.addresses:
            with contextlib.suppress(OSError):
                where = address, self.settings.port
                connection = socket.create_connection(where, timeout=_CONNECTING)
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Something else at this address would not answer so.
                if connection.recv(1, socket.MSG_PEEK) == b"[":
                    self._follow(Line(connection))
                    return True
                connection.close()
        return False

    def _follow(self, line: Line) -> None:
        root = self._root = Peer(0, "unknown", 0, line)
        self.listen(line.connection, lambda: self._hear(root, line))
        self.tell_rank(HEARD)

    def _hear(self, root: Peer, line: Line) -> None:
        values, more = line.receive()
        for value in values:
            if isinstance(value, dict):
                self.end(Cause("", value["end"]), speaks=False, after=_AFTER_ROOT)
        if values:
            ending, limit, name, root.host, root.process = values[-1]
            self._limit = limit, name
            root.hear(Place(ending=ending))
        if not more:
            root.gone = 0.0
            self.close(line.connection)

    def on_beat(self) -> None:
        """See `Pulse.on_beat`."""
        if self._root is None:
            return
        self._root.send(self.place())
        self._root.beat(self.settings.beat)
        if (cause := trouble([self._root], *self._limit)) is not None:
            self.end(cause, speaks=self.settings.speaks)

    def on_leaving(self) -> None:
        """See `Pulse.on_leaving`."""
        if self._root is not None:
            self._root.send(self.page.read())


def say(text: str, told: str = "", status: int = 1) -> None:
    """Writes a line to the error stream, which may be closed or full.

    Args:
        text: to write.
        told: file that notes that the end of the job was told, and its status.
        status: of the job.
    """

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)
    if told:
        with contextlib.suppress(OSError):
            Path(told).write_text(str(status))


def main(arguments: Sequence[str]) -> None:
    """Beats for the process that has started this one.

    Args:
        arguments: descriptor of the page; "root" on rank 0, whose pulse first writes the port and
            the addresses at which it is called. The `Settings` are read as a line of JSON.
    """
    page, server = Page(int(arguments[0])), None
    if arguments[1:] == ["root"]:
        server = open_server()
        about = {"port": server.getsockname()[1], "addresses": addresses()}
        os.write(1, json.dumps(about).encode() + b"\n")
    # Not by a buffered reader: `Pulse` waits for the end of the same input.
    text = b""
    while not text.endswith(b"\n"):
        if not (part := os.read(0, 2**16)):
            return
        text += part
    settings = Settings(**json.loads(text))
    pulse = RootPulse(page, settings, server) if server else OtherPulse(page, settings)
    pulse.run()
