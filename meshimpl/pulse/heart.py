"""A rank's side of its pulse."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshimpl.launch.ending import abort, before_abort
from meshimpl.launch.environment import WITHOUT_RANKS, detect
from meshimpl.launch.job_folder import JobFolder
from meshimpl.pulse.page import ABORTS, HEARD, LEAVES, Page, Wait

ROOM = 1024
"""Bytes that rank 0 tells the others."""
_OF_A_RANK = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")  # a pulse is none
# Without site-packages, which a pulse does not need, it starts in 50 ms.
_PROGRAM = (
    "import sys; sys.path.insert(0, {!r}); from meshimpl.pulse.process import main; "
    "main(sys.argv[1:])"
)


class Heart:
    """The pulse of this rank, and the thread that ends the job when the pulse says so.

    Args:
        from_rank_zero: returns on every rank the bytes that rank 0 gives it, at most `ROOM`; it is
            called once, by all ranks.
        stall: time after which a job ends whose ranks wait for each other at different places, and
            in which a rank may be silent if all are on one host [s].
        silence: time in which a rank of another host may be silent [s].
    """

    def __init__(
        self, from_rank_zero: Callable[[bytes], bytes], *, stall: float, silence: float
    ) -> None:
        here, folder = detect(), JobFolder.of_this_rank()
        self._heard = threading.Event()
        self._page = Page.create()
        self._pulse = _start(self._page, root=here.rank == 0)
        mine: dict[str, Any] = {}
        if here.rank == 0 and self._pulse is not None:
            mine = {**json.loads(self._read() or "{}"), "secret": secrets.token_hex(16)}
        told = from_rank_zero(_fitting(mine))
        if self._pulse is None or not told:
            self._close()
            return
        settings = {
            **json.loads(told),
            "rank": here.rank,
            "size": here.size,
            "speaks": here.local_rank == 0,
            "stall": stall,
            "silence": silence,
            "told": str(folder.told) if folder else "",
        }
        self._say(json.dumps(settings))
        before_abort(lambda: self._page.end(ABORTS))
        threading.Thread(target=self._listen, name=WITHOUT_RANKS, daemon=True).start()

    def is_at(
        self,
        text: str,
        moves: int,
        inside: bool,
        wait: Wait | None = None,
        begun: Sequence[Wait] = (),
    ) -> None:
        """Tells where this rank is; see `Place`."""
        self._page.write(text, moves, inside, wait, begun)

    def is_heard(self, patience: float) -> bool:
        """Returns whether the pulse of rank 0 hears this one, in a time [s]."""
        return self._heard.wait(patience)

    def stop(self) -> None:
        """Tells the other ranks that this one ends in good order."""
        self._page.end(LEAVES)

    def _read(self) -> bytes:
        assert self._pulse is not None and self._pulse.stdout is not None
        return self._pulse.stdout.readline()

    def _say(self, text: str) -> None:
        assert self._pulse is not None and self._pulse.stdin is not None
        try:
            self._pulse.stdin.write(text.encode() + b"\n")
            self._pulse.stdin.flush()
        except OSError:  # it has ended: rank 0 misses it
            pass

    def _close(self) -> None:
        if self._pulse is not None and self._pulse.stdin is not None:
            self._pulse.stdin.close()

    def _listen(self) -> None:
        while said := self._read():
            if said == HEARD:
                self._heard.set()
            else:
                abort(int(said))


def _start(page: Page, *, root: bool) -> subprocess.Popen[bytes] | None:
    """Returns a new pulse of this process; None if the system grants no process."""
    program = _PROGRAM.format(str(Path(__file__).parents[2]))
    words = [sys.executable, "-I", "-S", "-c", program, str(page.file), *["root"][: int(root)]]
    # A pulse takes no notice of signals: they are for its rank.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[page.file],
            env={k: v for k, v in os.environ.items() if not k.startswith(_OF_A_RANK)},
            process_group=0,  # mpirun ends that of a rank which aborts
        )
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fitting(told: dict[str, Any]) -> bytes:
    """Returns what rank 0 tells, with as many addresses as there is room for."""
    if "port" not in told:
        return b""
    while len(text := json.dumps(told).encode()) > ROOM:
        told["addresses"].pop()
    return text
