"""The speeds of jobs that have run here, for estimates of time.

Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowpm_dist.io.files import WriteError, read_json, write_json
from meshimpl import launch
from meshimpl.launch import user_cache

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
    if gpus := launch.gpus_in_sight():
        kind["gpus"] = gpus
    return json.dumps({**kind, "host": socket.gethostname()}, sort_keys=True)


def measured_rate(kind: str, cells: int) -> float | None:
    """Returns the seconds for each cell of the most similar job of a kind; None if there is none.

    Args:
        kind: the job's kind, see `kind_of`.
        cells: number of cells of its box.
    """
    near = {}
    rates = _rates().get(kind)
    for size, rate in (rates if isinstance(rates, dict) else {}).items():
        ratio = max(int(size) / cells, cells / int(size))
        if ratio <= COMPARABLE:
            near[ratio] = rate
    return near[min(near)] if near else None


@dataclass(frozen=True)
class Pieces:
    """Equal pieces of a work, such as its steps; their speed is kept for the next estimate.

    Attributes:
        name: name under which the speed is kept; jobs with the same name are comparable.
        cells: the number of cells in a piece; the duration is proportional to it.
        left: the number of pieces that are left to do; None if it is not known.
        like: name of similar pieces, whose speed is taken where this one was not measured.
    """

    name: str
    cells: int
    left: int | None
    like: str = ""

    @property
    def _names(self) -> list[str]:
        return [name for name in (self.name, self.like) if name]

    def seconds(self, ranks: int) -> float | None:
        """Returns the duration of the pieces that are left [s]; None where it is not known.

        Args:
            ranks: number of ranks of the job.
        """
        if not self.left:
            return self.left
        for name in self._names:
            rate = measured_rate(kind_of(name, ranks), self.cells)
            if rate is not None:
                return rate * self.cells * self.left
        return None

    def scaled_seconds(self, cores: int) -> tuple[float, str] | None:
        """Returns their duration on other hosts, if it is inversely proportional to the cores.

        Speeds of hosts with GPUs are left out.

        Args:
            cores: the number of cores of all ranks together.

        Returns:
            The duration [s], and where and how the nearest box was measured; None if none was, or
            if it is not known how many pieces are left.
        """
        if self.left is None:
            return None
        for name in self._names:
            measured = list(_measured_on_cores(name))
            if measured:
                size, seconds, where = min(
                    measured, key=lambda each: abs(math.log(each[0] / self.cells))
                )
                where = f"{where}, a box of {size:,} cells"
                return seconds * self.cells * self.left / cores, where
        return None

    def remember(self, seconds: float, ranks: int) -> None:
        """Keeps the speed for the next estimates. On rank 0.

        Args:
            seconds: the duration of a piece [s].
            ranks: number of ranks of the job.
        """
        record_rate(kind_of(self.name, ranks), self.cells, seconds / self.cells)


def _measured_on_cores(work: str) -> Iterator[tuple[int, float, str]]:
    """Yields cells, seconds of a core for each cell, host and cores of each job without GPUs."""
    for kind, rates in _rates().items():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # older versions
            about = json.loads(kind)
            if about["work"] == work and "gpus" not in about:
                cores = about["ranks"] * about["threads"]
                where = f"{about['host']} with {cores} core{'s' * (cores > 1)}"
                yield from ((int(size), rate * cores, where) for size, rate in rates.items())


def record_rate(kind: str, cells: int, rate: float) -> None:
    """Records the speed of a job, if the file can be written.

    Args:
        kind: the job's kind, see `kind_of`.
        cells: number of cells of its box.
        rate: seconds for each cell in one step, or in another unit of the work.
    """
    rates = _rates()
    rates.setdefault(kind, {})[str(cells)] = rate
    with contextlib.suppress(WriteError):
        write_json(_rates_file(), rates)


def _rates_file() -> Path:
    return user_cache() / "rates.json"


def _rates() -> dict[str, dict[str, float]]:
    return read_json(_rates_file())
