"""Whether srun has started ranks that find each other."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from meshimpl.launch.command import find_mpirun
from meshimpl.launch.environment import LaunchError, detect, is_slurm_step

_NEEDS_PMIX = 5  # version of Open MPI from which on it knows nothing else


@functools.cache
def open_mpi_version(mpirun: Path) -> int | None:
    """Returns the major version of an Open MPI's mpirun; None if it is of another MPI."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    found = re.search(r"open.?mpi\W+(?:v\w*\W*)?(\d+)\.", done.stdout, re.IGNORECASE)
    return int(found[1]) if found else None


def check_launcher(environment: Mapping[str, str] | None = None) -> None:
    """Check that the ranks that a launcher has started find each other.

    Args:
        environment: variables to read instead of `os.environ`.

    Raises:
        LaunchError: srun has started them without PMIx, and Open MPI would make each a job of one.
    """
    env = os.environ if environment is None else environment
    here = detect(env)
    if here.launcher != "srun" or "PMIX_NAMESPACE" in env:
        return
    try:
        version = open_mpi_version(find_mpirun())
    except (LaunchError, OSError, subprocess.SubprocessError):
        return  # which MPI there is will show
    if version is not None and version >= _NEEDS_PMIX:
        raise LaunchError(
            f"srun has started {here.size} tasks without PMIx, and Open MPI {version} would make "
            f"each of them a job of one rank: use srun --mpi=pmix (`srun --mpi=list` shows whether "
            f"this Slurm has it), or in the allocation mpirun -n {here.size}"
        )


def check_srun_mpi(plugin: str) -> None:
    """Check that ranks which srun will start find each other.

    Args:
        plugin: value of srun's --mpi.

    Raises:
        LaunchError: Open MPI would make each of them a job of one rank.
    """
    try:
        version = open_mpi_version(find_mpirun())
    except (LaunchError, OSError, subprocess.SubprocessError):
        return
    if version is not None and version >= _NEEDS_PMIX and not plugin.startswith("pmix"):
        raise LaunchError(
            f"srun --mpi={plugin} starts ranks without PMIx, and Open MPI {version} would make "
            'each of them a job of one rank: site.mpi = "pmix", or site.launcher = "mpirun"'
        )


def unused_tasks(environment: Mapping[str, str] | None = None) -> int:
    """Returns the tasks of a Slurm job in which this process runs alone; 0 if all are used.

    Args:
        environment: variables to read instead of `os.environ`.
    """
    env = os.environ if environment is None else environment
    tasks = env.get("SLURM_NTASKS", "1")
    alone = detect(env).size == 1 and not is_slurm_step(env)
    return int(tasks) if alone and tasks.isdigit() and int(tasks) > 1 else 0
