"""The end of the processes that start ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshimpl.launch.watch import children_of, stat_of

LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted", "hydra_pmi_proxy")
"""Names of processes that start ranks and belong to their job."""
HELPERS = ("srun", "ssh", "rsh")
"""Names of processes by which these start their daemons on other hosts."""


def waited(seconds: float, over: Callable[[], bool]) -> bool:
    """Waits until something is over; returns whether it is."""
    for _ in range(round(seconds / 0.1)):
        if over():
            return True
        time.sleep(0.1)
    return over()


def end_launcher(process: int, patience: float = 6.0) -> None:
    """Ends mpirun or its daemon, which may wait for ever for hosts that are cut off.

    So may the srun by which mpirun reaches them in an allocation: it ends with mpirun.

    Args:
        process: that started ranks which have ended. Other processes, and one that still has ranks,
            are left alone.
        patience: time that it has to end itself [s].
    """
    if not _is(process, LAUNCHERS):
        return
    helpers = [(child, _start_of(child)) for child in children_of(process) if _is(child, HELPERS)]
    start = _start_of(process)

    def has_ended() -> bool:
        return start is None or _start_of(process) != start

    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, patience / 2)):
        if waited(seconds, has_ended):
            break
        if not all(_is(child, HELPERS) for child in children_of(process)):
            return
        if _is(process, LAUNCHERS):
            with contextlib.suppress(OSError):
                os.kill(process, number)
    if not waited(patience / 6, has_ended):
        return
    waited(patience / 6, lambda: all(_start_of(child) != since for child, since in helpers))
    for child, since in helpers:
        if _start_of(child) == since:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)


def _is(process: int, names: Sequence[str]) -> bool:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip() in names
    except OSError:
        return False


def _start_of(process: int) -> str | None:
    """Returns when a process has started, which tells it from a later one; None if it has ended."""
    stat = stat_of(process)
    return None if stat is None or stat[0] == "Z" else stat[19]
