"""The system's records of ranks and of their launchers, and how launchers are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted", "hydra_pmi_proxy")
"""Names of processes that start ranks and belong to their job."""
HELPERS = ("srun", "ssh", "rsh")
"""Names of processes by which these start their daemons on other hosts."""
_LISTENS = "0A"  # in /proc/net/tcp


def stat_of(process: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on; None if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def children_of(process: int) -> list[int]:
    """Returns the processes that a process has started and that have not been waited for."""
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{process}/task"):
            text = Path(f"/proc/{process}/task/{task}/children").read_text()
            children += map(int, text.split())
    except OSError:  # it has ended
        return []
    return children


class Activity:
    """Whether a process works. A rank that waits works too: it asks for messages again and again.

    Args:
        process: its number.
    """

    def __init__(self, process: int) -> None:
        self._process, self._ticks, self._idle = process, -1, 0.0

    def sample(self, seconds: float) -> tuple[str, float]:
        """Returns the system's letter for its state, and the time without any work [s].

        Args:
            seconds: time since the last sample [s].
        """
        stat = stat_of(self._process)
        if stat is None:
            return "", 0.0
        ticks = int(stat[11]) + int(stat[12])  # of processor time
        self._idle = self._idle + seconds if ticks == self._ticks else 0.0
        self._ticks = ticks
        return stat[0], self._idle


def waited(seconds: float, over: Callable[[], bool]) -> bool:
    """Waits for a condition, with a limit of time; returns whether the condition holds."""
    for _ in range(round(seconds / 0.1)):
        if over():
            return True
        time.sleep(0.1)
    return over()


def end_launcher(process: int, seconds: float = 6.0) -> None:
    """Ends mpirun or its daemon, which may wait for ever for hosts that are cut off.

    So may the srun by which mpirun reaches them in an allocation: it ends with mpirun.

    Args:
        process: number of the process that started the ranks, which have ended. Other processes,
            and one that still has ranks, are left alone.
        seconds: time that it has to end itself [s].
    """
    if not _is(process, LAUNCHERS):
        return
    helpers = [(child, _start_of(child)) for child in children_of(process) if _is(child, HELPERS)]
    start = _start_of(process)

    def has_ended() -> bool:
        return start is None or _start_of(process) != start

    for number, wait in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds / 2)):
        if waited(wait, has_ended):
            break
        if not all(_is(child, HELPERS) for child in children_of(process)):
            return
        if _is(process, LAUNCHERS):
            with contextlib.suppress(OSError):
                os.kill(process, number)
    if not waited(seconds / 6, has_ended):
        return
    waited(seconds / 6, lambda: all(_start_of(child) != since for child, since in helpers))
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
    """Returns the start time of a process, which identifies it; None if it has ended."""
    stat = stat_of(process)
    return None if stat is None or stat[0] == "Z" else stat[19]


class Srun:
    """Whether the srun that has started this job is alive, if it runs on this host.

    If srun is killed, its tasks keep running. It listens at a port for messages about its tasks.
    The port is looked up, not called: a call without a message makes srun print an error.
    """

    def __init__(self, environment: Mapping[str, str], proc: Path = Path("/proc/net")) -> None:
        port = environment.get("SLURM_STEP_LAUNCHER_PORT", "")
        self._port, self._proc = int(port) if port.isdigit() else 0, proc
        self._was_there, self._missed = False, 0

    def has_gone(self) -> bool:
        """Returns whether srun was seen before, but not at this call and the last."""
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
