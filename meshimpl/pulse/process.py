"""The process that is a rank's pulse."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshimpl.pulse.judgement import (
    IDLE_SECONDS,
    PROOF,
    Cause,
    Peer,
    by_rank,
    is_stuck,
    named,
    trouble,
    who,
)
from meshimpl.pulse.launchers import Activity, Srun, end_launcher, stat_of, waited
from meshimpl.pulse.rank import HEARD
from meshimpl.pulse.state import RUNNING, Connection, RankState, Report, SharedState

TIME_TO_ABORT = 12.0
"""Time in which a rank ends the job before its pulse ends the rank [s]; `abort` has an alarm."""
_AFTER_ROOT = 3.0  # in which rank 0 ends the job before others do [s]
_JOINING = 60.0  # in which pulses find the pulse of rank 0 [s]
_CONNECTING = 3.0  # to one address [s]
_SILENT = 10.0  # for which a call without a report is kept [s]
_STRANGERS = 64  # calls without a report that are kept, and one for each rank


@dataclass(frozen=True)
class Settings:
    """The settings that a rank sends its pulse at the start.

    Attributes:
        rank, size: place of the rank in its job, and number of ranks.
        speaks: whether this pulse reports why a job ends when rank 0 cannot.
        stall: time after which ranks that wait for each other are stuck, and limit of silence
            within one host [s].
        silence: limit of silence between hosts [s].
        reported: file that marks that the end was reported, or an empty text.
        port, addresses: the port and addresses of the pulse of rank 0.
        secret: see `Connection`.
    """

    rank: int
    size: int
    speaks: bool
    stall: float
    silence: float
    reported: str
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


class Pulse:
    """The pulse of a rank other than 0. It talks with rank 0's pulse.

    Args:
        shared_state: the state of the rank, in shared memory.
        settings: the settings that the rank has sent.
    """

    def __init__(self, shared_state: SharedState, settings: Settings) -> None:
        self.shared_state, self.settings = shared_state, settings
        self.host, self.process = socket.gethostname(), os.getppid()
        self.peers: dict[int, Peer] = {}
        self.limit = settings.stall, "MESHIMPL_STALL_LIMIT"
        self._activity, self._launcher = Activity(self.process), self._starter()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, self._hear_rank)
        self._closed = False

    def join(self) -> None:
        """Finds the pulse of rank 0."""
        for _ in range(round(_JOINING)):
            if not self._is_there() or any(map(self._joined, self.settings.addresses)):
                return
            time.sleep(1)

    def _joined(self, address: str) -> bool:
        with contextlib.suppress(OSError):
            where = address, self.settings.port
            sock = socket.create_connection(where, timeout=_CONNECTING)
            connection = Connection(sock, self.settings.secret)
            connection.send(self.report(self.shared_state.read()))
            self.listen(sock, lambda: self.hear(connection))
            # Something else at this address would not answer with a report.
            select.select([sock], [], [], _CONNECTING)
            self.hear(connection)
            if connection.is_known:
                self.tell_rank(HEARD)
                return True
            self.close(sock)
        return False

    def report(self, state: RankState, end: int | None = None) -> Report:
        """Returns the report that this pulse sends."""
        return Report(self.settings.rank, self.host, self.process, state, *self.limit, end)

    def hear(self, connection: Connection) -> None:
        """Reads the reports that have arrived on a connection."""
        reports, more = connection.receive()
        for report in reports:
            self.take(connection, report)
        if not more:
            self.close(connection.sock)
            for peer in self.peers.values():
                if peer.connection is connection:
                    self.miss(peer)

    def miss(self, peer: Peer) -> None:
        """Notes that a rank has ended. If only its pulse has, the rank starts another one."""
        peer.gone = 0.0
        if peer.rank == 0 and peer.state.ending == RUNNING:
            any(map(self._joined, self.settings.addresses))

    def take(self, connection: Connection, report: Report) -> None:
        """Stores a report of rank 0, and ends the job if rank 0 does."""
        if report.end is not None:
            self.end(Cause("", report.end), speaks=False, after=_AFTER_ROOT)
        self.limit = report.limit, report.variable
        peer = self.peers.setdefault(0, Peer(0, report.host, report.process))
        peer.connection, peer.gone = connection, None
        peer.hear(report.state)

    def on_beat(self, state: RankState) -> None:
        """Reports the state of the rank, and ends the job if it cannot continue."""
        for peer in self.peers.values():
            peer.send(self.report(state))
            peer.beat(self.settings.beat)
        if (cause := trouble(self.peers.values(), *self.limit)) is not None:
            self.end(cause, speaks=self.settings.speaks)

    def run(self) -> None:
        """Beats until the rank has ended."""
        due = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                key.data()
            if not self._is_there():
                for peer in self.peers.values():
                    peer.send(self.report(self.shared_state.read()))
                return
            if time.monotonic() >= due:
                due = time.monotonic() + self.settings.beat
                self.on_beat(self._state())
                if self._starter() not in (None, self._launcher):
                    mine = who([Peer(self.settings.rank, self.host, self.process)])
                    reason = f"the process {self._launcher} that started {mine} has ended"
                    self.end(Cause(reason), speaks=self.settings.speaks)

    def end(self, cause: Cause, *, speaks: bool = True, after: float = 0.0) -> None:
        """Lets the rank end the job; ends a rank that does not, and this pulse.

        Args:
            cause: why, and the status.
            speaks: whether to report it.
            after: time that others have to end the job before [s].
        """
        if speaks:
            say(f"error: {cause.reason}", self.settings.reported, cause.status)
        launcher = self._launcher
        if waited(after, self._rank_has_ended):
            os._exit(0)  # in good order
        self.tell_rank(f"{cause.status}\n".encode())
        if not waited(TIME_TO_ABORT, self._rank_has_ended):
            os.kill(self.process, signal.SIGKILL)
        if self.settings.speaks and launcher is not None:
            end_launcher(launcher)
        os._exit(0)

    def listen(self, sock: socket.socket, call: Callable[[], None]) -> None:
        """Calls something whenever a connection has news."""
        self._selector.register(sock, selectors.EVENT_READ, call)

    def close(self, sock: socket.socket) -> None:
        """Closes a connection that was listened to."""
        with contextlib.suppress(KeyError, ValueError):  # closed before
            self._selector.unregister(sock)
        sock.close()

    def tell_rank(self, text: bytes) -> None:
        """Writes to the rank, which may have ended."""
        with contextlib.suppress(OSError):
            os.write(1, text)

    def _is_there(self) -> bool:
        return not self._closed and not self._rank_has_ended()

    def _state(self) -> RankState:
        letter, idle = self._activity.sample(self.settings.beat)
        state = self.shared_state.read()
        return state._replace(stopped=letter == "T", idle=letter if idle >= IDLE_SECONDS else "")

    def _rank_has_ended(self) -> bool:
        return os.getppid() != self.process

    def _starter(self) -> int | None:
        stat = stat_of(self.process)
        return int(stat[1]) if stat else None

    def _hear_rank(self) -> None:
        self._closed = not os.read(0, 2**16)


class RootPulse(Pulse):
    """The pulse of rank 0. It talks with the pulses of all other ranks.

    Args:
        shared_state, settings: see `Pulse`.
        server: socket at which the others call.
    """

    def __init__(
        self, shared_state: SharedState, settings: Settings, server: socket.socket
    ) -> None:
        super().__init__(shared_state, settings)
        self.peers[0] = Peer(0, self.host, self.process)
        self._tables: list[list[RankState]] = []
        self._server, self._joining = server, 0.0
        self._strangers: dict[Connection, float] = {}
        self._srun = Srun(os.environ)

    def join(self) -> None:
        """Accepts connections from the other pulses."""
        self._server.setblocking(False)
        self.listen(self._server, self._accept)
        self.tell_rank(HEARD)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = Connection(self._server.accept()[0], self.settings.secret)
            self._strangers[connection] = time.monotonic()
            self.listen(connection.sock, lambda: self.hear(connection))
        self._close_strangers()

    def _close_strangers(self) -> None:
        """Closes connections without a report that last too long or are too many."""
        now, most = time.monotonic(), self.settings.size + _STRANGERS
        self._strangers = {
            connection: since
            for connection, since in self._strangers.items()
            if not connection.is_known and connection.sock.fileno() >= 0
        }
        for number, (connection, since) in enumerate(reversed(list(self._strangers.items()))):
            if number >= most or now - since > _SILENT:
                self.close(connection.sock)
                del self._strangers[connection]

    def take(self, connection: Connection, report: Report) -> None:
        """Stores the state of a rank; answers its first report."""
        new = Peer(report.rank, report.host, report.process)
        peer = self.peers.setdefault(report.rank, new)
        if (peer.host, peer.process) != (new.host, new.process):
            return
        if peer.connection is not connection:  # of its first pulse, or of a replacement
            if peer.connection is not None:
                self.close(peer.connection.sock)
            peer.connection, peer.gone = connection, None
            self.limit = self._limit()
            peer.send(self.report(self.shared_state.read()))
        peer.hear(report.state)

    def _limit(self) -> tuple[float, str]:
        """Returns the limit of silence [s] and the variable that sets it."""
        several = len({peer.host for peer in self.peers.values()}) > 1
        if several and self.settings.silence < self.settings.stall:
            return self.settings.silence, "MESHIMPL_SILENCE_LIMIT"
        return self.settings.stall, "MESHIMPL_STALL_LIMIT"

    def on_beat(self, state: RankState) -> None:
        """Reports the state of rank 0 to all, ends the job if it cannot continue, and warns.

        Warnings are about ranks that are missing or do no work.
        """
        self.peers[0].hear(state)
        self._close_strangers()
        peers = [peer for _, peer in sorted(self.peers.items())]
        for peer in peers:
            peer.beat(self.settings.beat)
            peer.send(self.report(state))
        cause = trouble(peers, *self.limit)
        if self._srun.has_gone():
            cause = cause or Cause("the srun that started this job has ended")
        if len(peers) == self.settings.size and all(peer.fresh for peer in peers):
            cause = cause or self._stuck(peers)
        if cause is not None:
            for peer in peers:
                peer.send(self.report(state, cause.status))
            self.end(cause)
        self._look_for_missing()
        if warnings := [f"warning: {news}" for peer in peers if (news := peer.news())]:
            say("\n".join(warnings))

    def _stuck(self, peers: Sequence[Peer]) -> Cause | None:
        """Returns where ranks wait for each other without end; None if they do not."""
        for peer in peers:
            peer.fresh = False
        beats, proof = round(self.settings.stall / self.settings.beat), self.settings.proof
        # `idle` is only for the user: a rank that waits may use the processor rarely.
        table = [peer.state._replace(idle="") for peer in peers]
        self._tables = [*self._tables[-max(beats, proof) :], table]
        if not is_stuck(self._tables, proof, beats):
            return None
        places = by_rank([peer.rank for peer in peers], [state.text for state in table])
        reason = f"the ranks wait for each other at different places of the program:\n{places}"
        return Cause(reason, 1)

    def _look_for_missing(self) -> None:
        """Warns, once, of ranks that have not come."""
        before, self._joining = self._joining, self._joining + self.settings.beat
        missing = [rank for rank in range(self.settings.size) if rank not in self.peers]
        if missing and before < 2 * _JOINING <= self._joining:
            where = f"{', '.join(self.settings.addresses)}, port {self.settings.port}"
            say(
                f"warning: {named(missing)} cannot reach rank 0 by TCP ({where}): whether they are "
                "alive is not watched"
            )


def say(text: str, reported: str = "", status: int = 1) -> None:
    """Writes a line to the error stream, which may be closed or full.

    Args:
        text: the line.
        reported: file that marks that the end of the job was reported, and its status.
        status: exit status of the job.
    """

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)
    if reported:
        with contextlib.suppress(OSError):
            Path(reported).write_text(str(status))


def main(arguments: Sequence[str]) -> None:
    """Beats for the process that has started this one.

    Args:
        arguments: descriptor of the shared memory, and on rank 0 the descriptor of the socket to
            which the others connect. The `Settings` are read as a line of JSON.
    """
    shared_state = SharedState(int(arguments[0]))
    server = socket.socket(fileno=int(arguments[1])) if arguments[1:] else None
    with contextlib.suppress(OSError, ValueError):  # a connection to each of many ranks
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Without a buffer: `Pulse` waits for the end of the same input.
    text = open(0, "rb", buffering=0, closefd=False).readline()
    if not text.endswith(b"\n"):  # the rank has ended
        return
    settings = Settings(**json.loads(text))
    pulse = RootPulse(shared_state, settings, server) if server else Pulse(shared_state, settings)
    pulse.join()
    pulse.run()
