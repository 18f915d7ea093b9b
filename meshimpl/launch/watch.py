"""Watching the ranks of a job on this machine for one that stands still."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 30.0
"""Time without any work of a rank after which it is reported [s]. A rank that waits does work: it
asks for messages again and again."""

_RANK = re.compile(rb"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)")


@dataclass
class _Seen:
    """The last sign of work of a rank."""

    ticks: int
    at: float
    reported: bool = False


class Watch:
    """The ranks that a launcher has started on this machine.

    Args:
        launcher: process number of the launcher.
        patience: see `PATIENCE` [s].
    """

    def __init__(self, launcher: int, patience: float = PATIENCE) -> None:
        self._launcher, self._patience = launcher, patience
        self._seen: dict[tuple[int, int], _Seen] = {}

    def news(self) -> list[str]:
        """Returns a sentence for each rank that has begun to stand still, or has gone on."""
        now, news = time.monotonic(), []
        for rank, process in _ranks_of(self._launcher):
            found = _state(process)
            if found is None:
                continue
            state, ticks = found
            seen = self._seen.setdefault((rank, process), _Seen(ticks, now))
            if ticks != seen.ticks:
                if seen.reported:
                    news.append(f"rank {rank} goes on")
                self._seen[rank, process] = _Seen(ticks, now)
            elif now - seen.at >= self._patience and not seen.reported:
                seen.reported = True
                news.append(_report(rank, process, state, now - seen.at))
        return news


def _report(rank: int, process: int, state: str, seconds: float) -> str:
    cause = {
        "T": f"it is stopped, and `kill -CONT {process}` lets it go on",
        "D": "it waits for a disk or a file system",
    }.get(state, "it may wait for a device, or be swapped out")
    return (
        f"rank {rank} (process {process}) has done nothing for {seconds:.0f} s, and the others "
        f"wait for it: {cause}"
    )


def _ranks_of(launcher: int) -> list[tuple[int, int]]:
    """Returns rank and process number of each rank below a process."""
    found = {}
    for process in _descendants(launcher):
        try:
            match = _RANK.search(Path(f"/proc/{process}/environ").read_bytes())
        except OSError:
            continue
        # A rank comes before the processes that it starts itself.
        if match and int(match[1]) not in found:
            found[int(match[1])] = process
    return sorted(found.items())


def _descendants(process: int) -> list[int]:
    children = children_of(process)
    return [*children, *(below for child in children for below in _descendants(child))]


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


def _state(process: int) -> tuple[str, int] | None:
    """Returns the state of a process and its processor time [ticks]; None if it has ended."""
    stat = stat_of(process)
    return (stat[0], int(stat[11]) + int(stat[12])) if stat else None


def stat_of(process: int) -> list[str] | None:
    """Returns what the system says of a process: state, parent and more; None if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
