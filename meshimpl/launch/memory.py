"""The memory that a job may use on this host."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from meshimpl.launch.environment import detect

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """The memory of this host, or of the part of it that this process may use.

    Attributes:
        limit: the memory that all processes here may use together [bytes].
        free: the part of it that is free at present [bytes].
        is_container: whether a control group (of a container or a batch system) sets the limit, and
            not the hardware.
    """

    limit: int
    free: int
    is_container: bool


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """Returns the memory of this host, or that of this process's control group if it is less.

    Control groups of both versions are understood; a group is bound by those around it as well.

    Args:
        proc: where the system tells of processes.
        cgroups: where control groups are mounted.
    """
    told = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    whole, free = (1024 * int(told[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    limit = whole
    for folder, limit_name, usage_name in _groups(proc, cgroups):
        here = _number(folder / limit_name)
        if here is not None and here < whole:
            limit = min(limit, here)
            used = (_number(folder / usage_name) or 0) - _idle_cache(folder)
            free = min(free, max(0, here - used))
    return HostMemory(limit, free, limit < whole)


def ranks_on_host(ranks: int, environment: Mapping[str, str] | None = None) -> int:
    """Returns the number of ranks of a job that share this host.

    Args:
        ranks: of the job that this process is part of, or will start.
        environment: variables to read instead of `os.environ`.
    """
    env = os.environ if environment is None else environment
    here = detect(env)
    if here.size > 1:
        return here.local_size
    return ceil(ranks / int(env.get("SLURM_JOB_NUM_NODES", "1")))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields the folders of this process's groups, with the names of their limit and usage."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = "memory.max", "memory.current"
            # Where both versions are in use, the second has a folder of its own.
            roots = [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            roots = [cgroups / "memory"]
        else:
            continue
        # In a container the path can be the host's: then only the root exists here.
        inner = Path(path.lstrip("/"))
        for root in roots:
            for part in (inner, *inner.parents):
                yield root / part, *names


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _idle_cache(group: Path) -> int:
    """Returns the part of a group's usage that the system would give up: files not read lately."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    told = dict(line.split() for line in lines)
    return int(told.get("total_inactive_file", told.get("inactive_file", "0")))
