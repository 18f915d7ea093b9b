"""How fast this machine has worked before, so that a job can tell how long it will take.

A job that is complete leaves its speed in the user's cache; nothing else is kept there.
"""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from flowpm_dist.io.files import WriteError, write_text
from meshimpl import launch
from meshimpl.user_cache import user_cache

WITHIN = 64
"""Ratio of cells up to which the speed of one job says something about that of another."""


@dataclass(frozen=True)
class Kind:
    """What two jobs have in common if their speeds can be compared.

    Attributes:
        work: what was done, such as "simulate".
        ranks: of the job.
        threads: of each rank.
    """

    work: str
    ranks: int
    threads: int

    @property
    def key(self) -> str:
        """The name in the file of this and no other kind on this host."""
        return json.dumps({**asdict(self), "host": socket.gethostname()}, sort_keys=True)


def kind_of(work: str, ranks: int) -> Kind:
    """Returns the kind of a job of so many ranks that this process is part of or will start."""
    here = launch.detect()
    if here.size == 1:
        here = launch.RankEnvironment(size=ranks, local_size=launch.ranks_on_host(ranks))
    return Kind(work, ranks, launch.threads_per_rank(here))


def measured_rate(kind: Kind, cells: int) -> float | None:
    """Returns the seconds for each cell of the most similar job of a kind; None if there is none.

    Args:
        kind: of the job.
        cells: of its box.
    """
    near = {}
    found = _read().get(kind.key)
    for size, rate in (found if isinstance(found, dict) else {}).items():
        ratio = max(int(size) / cells, cells / int(size))
        if ratio <= WITHIN:
            near[ratio] = rate
    return near[min(near)] if near else None


def record_rate(kind: Kind, cells: int, rate: float) -> None:
    """Keep the speed of a job. That it cannot be kept is no error.

    Args:
        kind: of the job.
        cells: of its box.
        rate: seconds for each cell, of a step or of what the kind of work counts.
    """
    told = _read()
    told.setdefault(kind.key, {})[str(cells)] = rate
    with contextlib.suppress(WriteError):
        write_text(_path(), json.dumps(told, indent=1) + "\n")


def _path() -> Path:
    return user_cache() / "rates.json"


def _read() -> dict[str, dict[str, float]]:
    try:
        told = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
