"""A rank's side of the liveness watch: its state, and the process that reports it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshimpl.launch.ending import HOST_LOST, JobFolder, abort, before_abort
from meshimpl.launch.rank import WITHOUT_RANKS, detect
from meshimpl.mesh_shape import Ranks
from meshimpl.pulse.state import (
    ABORTING,
    FINISHED,
    LOOPBACK,
    RUNNING,
    Meeting,
    RankState,
    SharedState,
    addresses,
    open_server,
)

MAX_SHARED_BYTES = 1024
"""Bytes that rank 0 gives the other ranks at the start."""
HEARD = b"heard\n"
"""What a pulse writes to its rank once rank 0 hears it. Anything else is the status of an end."""
_RESTARTS = 5  # of a pulse that has ended before its rank
_OF_A_RANK = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")  # variables that a pulse must lack
# Without site-packages, which a pulse does not need, it starts in 50 ms.
_PROGRAM = (
    "import sys; sys.path.insert(0, {!r}); from meshimpl.pulse.process import main; "
    "main(sys.argv[1:])"
)


class RankReporter:
    """Reports the state of this rank to the other ranks, once `start` has started its pulse.

    Attributes:
        state: the state of this rank.
        begun: the last meeting and the last call of each group that this rank has begun.
        is_alone: whether the main thread alone has begun meetings so far.
        is_wanted: whether the ranks watch each other, if their pulses can be started.
        shared_state: the state, in memory shared with the pulse; None without one.
    """

    def __init__(self) -> None:
        self.state = RankState("computing or writing on its own")
        self.begun: dict[tuple[Ranks, bool], Meeting] = {}
        self.is_alone, self.is_wanted = True, False
        self.shared_state: SharedState | None = None
        self._server: socket.socket | None = None
        self._heard = threading.Event()

    def begin(self, groups: Sequence[Ranks], is_call: bool = False) -> Meeting | None:
        """Counts a meeting, or a call, of each group before it begins.

        Returns:
            One that can be waited for, and watched; None if there is none.
        """
        first = None
        for ranks in groups:
            before = self.begun.get((ranks, is_call))
            meeting = Meeting.of(before.ordinal + 1 if before else 1, ranks, is_call)
            if meeting is not None:
                self.begun[ranks, is_call] = meeting
                first = first or meeting
        # Other threads of Python might begin a meeting meanwhile.
        others = [t for t in threading.enumerate() if t.name != WITHOUT_RANKS][1:]
        return first if self.is_alone and not others else None

    def set_state(self, text: str, is_collective: bool, wait: Meeting | None) -> None:
        """Publishes the new state of this rank; see `RankState`."""
        begun = tuple(self.begun.values())
        self.state = RankState(text, self.state.changes + 1, is_collective, wait, begun)
        if self.shared_state is not None:
            self.shared_state.write(self.state)

    def start(
        self, from_rank_zero: Callable[[bytes], bytes], *, stall: float, silence: float
    ) -> None:
        """Starts the pulse, and a thread that ends the job when the pulse asks for it.

        Args:
            from_rank_zero: returns on every rank the bytes that rank 0 gives it, at most
                `MAX_SHARED_BYTES`; it is called once, by all ranks.
            stall: time after which a job ends if its ranks wait for each other at different places
                [s]. If all ranks are on one host, also the time for which a rank may be silent.
            silence: time for which a rank of another host may be silent [s].
        """
        self.is_wanted = True
        here, folder = detect(), JobFolder.of_this_rank()
        shared_state, files, mine = SharedState.create(), [], {}
        if here.rank == 0:
            one_host = here.local_size == here.size
            self._server = open_server(one_host=one_host)
            files.append(self._server.fileno())
            mine = {
                "port": self._server.getsockname()[1],
                "addresses": [LOOPBACK] if one_host else addresses(),
                "secret": secrets.token_hex(16),
            }
        pulse = _start_process([shared_state.file, *files])
        shared = from_rank_zero(_fitting(mine) if pulse else b"")
        if pulse is None or pulse.stdin is None or not shared:
            if pulse is not None and pulse.stdin is not None:
                pulse.stdin.close()
            return
        settings = {
            **json.loads(shared),
            "rank": here.rank,
            "size": here.size,
            "speaks": here.local_rank == 0,
            "stall": stall,
            "silence": silence,
            "reported": str(folder.reported) if folder else "",
        }
        self.shared_state = shared_state
        shared_state.write(self.state)
        before_abort(lambda: shared_state.end(ABORTING))
        arguments = [pulse, json.dumps(settings).encode() + b"\n", [shared_state.file, *files]]
        threading.Thread(target=self._live, args=arguments, name=WITHOUT_RANKS, daemon=True).start()

    def is_heard(self, seconds: float) -> bool | None:
        """Returns whether rank 0's pulse hears this one within a time [s]; None if not wanted."""
        if not self.is_wanted:
            return None
        return self.shared_state is not None and self._heard.wait(seconds)

    def stop(self) -> None:
        """Tells the other ranks that this one ends in good order."""
        if self.shared_state is not None:
            self.shared_state.end(FINISHED)

    def _live(
        self, pulse: subprocess.Popen[bytes] | None, settings: bytes, files: Sequence[int]
    ) -> None:
        """Carries out the pulse's requests; replaces a pulse that ends before this rank."""
        assert self.shared_state is not None
        for _ in range(_RESTARTS + 1):
            if pulse is None or pulse.stdin is None or pulse.stdout is None:
                break
            with contextlib.suppress(OSError):  # it has ended
                pulse.stdin.write(settings)
                pulse.stdin.flush()
            while line := pulse.stdout.readline():
                if line == HEARD:
                    self._heard.set()
                else:
                    abort(int(line))
            status = pulse.wait()
            if self.shared_state.read().ending != RUNNING:
                return
            lost = f"process {pulse.pid}, by which the other ranks know that rank {detect().rank}"
            _say(f"warning: {lost} is alive, has ended (status {status}). It is started again")
            pulse = _start_process(files)
        _say(f"error: {lost} is alive, cannot be kept alive itself")
        abort(HOST_LOST)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


reporter = RankReporter()
"""The reporter of this process."""


@contextlib.contextmanager
def at(
    text: str, *, meetings: Sequence[Ranks] = (), is_call: bool = False, alone: bool = False
) -> Iterator[None]:
    """Lets the other ranks know where this one is, for as long as the context lasts.

    Only the main thread speaks for its rank. After a meeting that another thread has begun, nothing
    proves any more what this rank waits for.

    Args:
        text: description for messages.
        meetings: the groups whose ranks must all come here before this one continues. Without them
            it may be computing alone.
        is_call: whether it is a call of a mesh function.
        alone: without other ranks, so that it is never taken for waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        reporter.is_alone = reporter.is_alone and not meetings
        yield
        return
    outer = reporter.state
    reporter.set_state(text, not alone, reporter.begin(meetings, is_call) if meetings else None)
    try:
        yield
    finally:
        reporter.set_state(outer.text, outer.is_collective, outer.wait)


def _start_process(files: Sequence[int]) -> subprocess.Popen[bytes] | None:
    """Returns a new pulse of this process; None if the system grants no process.

    Args:
        files: descriptors of the shared memory and, on rank 0, of the socket to which the others
            connect.
    """
    program = _PROGRAM.format(str(Path(__file__).parents[2]))
    words = [sys.executable, "-I", "-S", "-c", program, *map(str, files)]
    # A pulse takes no notice of signals: they are for its rank.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=files,
            env={k: v for k, v in os.environ.items() if not k.startswith(_OF_A_RANK)},
            process_group=0,  # mpirun ends the process group of a rank that aborts
        )
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fitting(mine: dict[str, Any]) -> bytes:
    """Returns the settings that rank 0 gives the others, with as many addresses as fit.

    Args:
        mine: port, addresses and secret; empty on another rank.
    """
    while len(text := json.dumps(mine).encode()) > MAX_SHARED_BYTES:
        mine["addresses"].pop()
    return text
