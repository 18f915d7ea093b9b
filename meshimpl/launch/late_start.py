"""A limit to the start of a job, in which its ranks find each other."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshimpl.launch.command import start_limit
from meshimpl.launch.ending import abort
from meshimpl.launch.environment import WITHOUT_RANKS, detect


@contextmanager
def in_time() -> Iterator[None]:
    """Ends the job if what the context holds, which waits for other ranks, takes too long.

    Raises:
        LaunchError: the limit is not a number of seconds; see `start_limit`.
    """
    here, limit = detect(), start_limit()

    def end() -> None:
        print(
            f"error: rank {here.rank} of {here.size} on host {socket.gethostname()} has waited "
            f"{limit:g} s for the others to start: one has not come, or the hosts cannot reach "
            "each other, as behind a firewall. MESHIMPL_START_LIMIT sets another limit",
            file=sys.stderr,
            flush=True,
        )
        abort(1)

    timer = threading.Timer(limit, end)
    timer.name, timer.daemon = WITHOUT_RANKS, True
    if limit and here.size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
