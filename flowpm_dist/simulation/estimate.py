"""The memory, disk space and time that work takes on this machine.

Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowpm_dist.io.files import WriteError, human_size, read_json, write_text
from meshimpl import launch
from meshimpl.launch import user_cache

PROCESS = 680 * 2**20
"""Memory of a process that has TensorFlow and the packages, and small compiled graphs [bytes]."""
OF_RANKS = 110 * 2**20
"""Additional memory if there are several ranks: Horovod, MPI and their buffers [bytes]."""
SHARED = 360 * 2**20
"""The part of `PROCESS` that the ranks of a host share: code and data of libraries [bytes]."""


def process_bytes(axes: Mapping[str, int]) -> int:
    """Returns the memory of a rank without any field [bytes].

    Args:
        axes: sizes of the mesh's axes.
    """
    return PROCESS + (OF_RANKS if math.prod(axes.values()) > 1 else 0)


@dataclass(frozen=True)
class Estimate:
    """What a job will take; `print` shows it beside the memory of this host.

    Attributes:
        ranks: number of ranks.
        together: ranks that share this host.
        memory: greatest memory of a rank, TensorFlow included [bytes].
        disk: what will be written, at most [bytes].
        seconds: duration of the work; None where nothing like it was measured on this machine.
    """

    ranks: int
    together: int
    memory: int
    disk: int = 0
    seconds: float | None = None

    @property
    def on_host(self) -> int:
        """The memory of all ranks of this host [bytes]."""
        return self.together * self.memory - (self.together - 1) * SHARED

    def lines(self, host: launch.HostMemory) -> list[str]:
        """Returns the estimate as lines for a user."""
        text = f"memory: about {human_size(self.memory)}"
        if self.ranks > 1:
            text += f" on each of {self.ranks} ranks"
        if self.together > 1:
            text += f", {human_size(self.on_host)} on this host"
        text += f"; there are {human_size(host.limit)}"
        if host.free < self.on_host <= host.limit:
            text += f", of which only {human_size(host.free)} are free now"
        lines = [text]
        if self.disk:
            lines.append(f"disk: at most {human_size(self.disk)}")
        if self.seconds is not None:
            lines.append(f"time: about {human_time(self.seconds)}, as measured here before")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines(launch.host_memory()))


def human_time(seconds: float) -> str:
    """Returns a duration as people read it, such as "3 min"."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.0f} s"


COMPARABLE = 64
"""Ratio of cells up to which the speeds of two jobs are comparable."""


def kind_of(work: str, ranks: int) -> str:
    """Returns the name of this host's jobs of a kind; their speeds can be compared.

    Args:
        work: what is done, such as "simulate".
        ranks: number of ranks of the job that this process is part of or will start.
    """
    here = launch.detect()
    if here.size == 1:
        here = launch.RankEnvironment(size=ranks, local_size=launch.ranks_on_host(ranks))
    kind = {"work": work, "ranks": ranks, "threads": launch.threads_per_rank(here)}
    return json.dumps({**kind, "host": socket.gethostname()}, sort_keys=True)


def measured_rate(kind: str, cells: int) -> float | None:
    """Returns the seconds for each cell of the most similar job of a kind; None if there is none.

    Args:
        kind: the job's kind, see `kind_of`.
        cells: number of cells of its box.
    """
    near = {}
    found = _rates().get(kind)
    for size, rate in (found if isinstance(found, dict) else {}).items():
        ratio = max(int(size) / cells, cells / int(size))
        if ratio <= COMPARABLE:
            near[ratio] = rate
    return near[min(near)] if near else None


def measured_seconds(kind: str, cells: int, pieces: int) -> float | None:
    """Returns the duration of pieces of work [s], by `measured_rate`; None if it is not known.

    Args:
        kind, cells: see `measured_rate`.
        pieces: their number, such as steps.
    """
    rate = measured_rate(kind, cells)
    return None if rate is None else rate * cells * pieces


def record_rate(kind: str, cells: int, rate: float) -> None:
    """Keeps the speed of a job, if the file can be written.

    Args:
        kind: the job's kind, see `kind_of`.
        cells: number of cells of its box.
        rate: seconds for each cell in one step, or in another unit of the work.
    """
    rates = _rates()
    rates.setdefault(kind, {})[str(cells)] = rate
    with contextlib.suppress(WriteError):
        write_text(_rates_file(), json.dumps(rates, indent=1) + "\n")


def _rates_file() -> Path:
    return user_cache() / "rates.json"


def _rates() -> dict[str, dict[str, float]]:
    return read_json(_rates_file())
