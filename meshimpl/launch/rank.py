"""The place of a rank in its job and its share of the node, before ranks communicate.

The place is read from environment variables only. The share are cores, threads and memory. All of
it can be read before TensorFlow or MPI is loaded; so can the user's cache folder.
"""

import contextlib
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

THREADS = "MESHIMPL_THREADS"
"""Variable by which a user sets the number of threads of each rank."""
LIBRARY_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
"""Variables in which the libraries look for theirs."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Variable by which malloc asks for huge pages, where the system gives them to who asks."""

# Slurm numbers the steps that srun did not start (interactive, batch, extern) from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
WITHOUT_RANKS = "without-ranks"
"""Name of threads that never begin a collective."""


class LaunchError(RuntimeError):
    """A job cannot be started as requested; the message says what to change."""


@dataclass(frozen=True)
class RankEnvironment:
    """The place of this process among all ranks of the job and among the ranks of its node.

    `launcher` is "mpirun", "srun" or "horovodrun", or "none" for a process on its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"


def detect(environment: Mapping[str, str] | None = None) -> RankEnvironment:
    """Returns the place of this process in its job.

    A Slurm batch script without srun is one process, however many tasks the job has.

    Args:
        environment: variables to read instead of `os.environ`.

    Raises:
        LaunchError: the variables of mpirun or horovodrun contradict each other.
    """
    env = os.environ if environment is None else environment
    for prefix, launcher in (("OMPI_COMM_WORLD", "mpirun"), ("HOROVOD", "horovodrun")):
        if f"{prefix}_RANK" in env:
            names = [f"{prefix}_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
            return _from_variables(env, names, launcher)
    slurm = _slurm_step(env)
    if "PMI_RANK" in env:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        here = _from_variables(env, names, "mpirun")
        # srun speaks PMI too; MPICH's mpirun inside a Slurm job starts its own daemons with srun.
        if slurm is None or (slurm.rank, slurm.size) != (here.rank, here.size):
            return here
    return slurm or RankEnvironment()


def unused_tasks(environment: Mapping[str, str] | None = None) -> int:
    """Returns the tasks of a Slurm job in which this process runs alone; 0 if all are used.

    Args:
        environment: variables to read instead of `os.environ`.
    """
    env = os.environ if environment is None else environment
    tasks = env.get("SLURM_NTASKS", "1")
    alone = detect(env).size == 1 and not _is_slurm_step(env)
    return int(tasks) if alone and tasks.isdigit() and int(tasks) > 1 else 0


def _from_variables(env: Mapping[str, str], names: Sequence[str], launcher: str) -> RankEnvironment:
    try:
        rank, size = int(env[names[0]]), int(env[names[1]])
        local_rank, local_size = int(env.get(names[2], rank)), int(env.get(names[3], size))
    except (KeyError, ValueError):
        rank = size = local_rank = local_size = 0
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        there = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        raise LaunchError(
            f"{there} in the environment name no rank of a job: start the job by {launcher}, or "
            "unset them"
        )
    return RankEnvironment(rank, size, local_rank, local_size, launcher)


def _slurm_step(env: Mapping[str, str]) -> RankEnvironment | None:
    """Returns the place in a step that srun started with more than one task, else None."""
    size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    if not _is_slurm_step(env) or size < 2:
        return None
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(size)))
    node, rank = int(env.get("SLURM_NODEID", "0")), int(env["SLURM_PROCID"])
    local_size = _tasks_on_node(per_node, node)
    return RankEnvironment(rank, size, int(env.get("SLURM_LOCALID", rank)), local_size, "srun")


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    """Returns whether srun has started this process, rather than a batch script or a shell."""
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in env and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def _tasks_on_node(per_node: str, node: int) -> int:
    """Reads Slurm's short form: "2(x3),1" is 2 tasks on each of three nodes and 1 on the fourth."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(tasks)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]


def available_cores() -> int:
    """Returns the number of cores that affinity and container leave to this process."""
    if not hasattr(os, "sched_getaffinity"):  # elsewhere than on Linux
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def threads_per_rank(here: RankEnvironment | None = None) -> int:
    """Returns this rank's share of the node's cores.

    MESHIMPL_THREADS in the environment overrides it.

    Args:
        here: the rank's place in its job; by default this process's.

    Raises:
        LaunchError: the override is not a positive number.
    """
    if (threads := os.environ.get(THREADS)) is not None:
        if not threads.isdigit() or int(threads) < 1:
            raise LaunchError(f"{THREADS}={threads} is not a positive number of threads")
        return int(threads)
    here = here or detect()
    if here.launcher == "srun":
        # srun gives each task its own cores, or else all tasks all of them.
        whole = int(os.environ.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
        if available_cores() < whole:
            return available_cores()
    return max(1, available_cores() // here.local_size)


def configure_threads() -> int:
    """Sets the threads of TensorFlow, XLA and OpenMP to this rank's share of the node's cores.

    Call it before TensorFlow computes, and preferably before it is imported: OpenMP libraries read
    their setting when they are loaded.

    Returns:
        The number of threads.
    """
    threads = threads_per_rank()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if all(os.environ.get(name) == str(threads) for name in LIBRARY_THREADS):
        return threads  # once TensorFlow has begun, it takes no setting, not even the same
    for name in LIBRARY_THREADS:
        os.environ[name] = str(threads)
    if "tensorflow" in sys.modules:
        threading_config = sys.modules["tensorflow"].config.threading
        threading_config.set_intra_op_parallelism_threads(threads)
        threading_config.set_inter_op_parallelism_threads(threads)
    return threads


def huge_pages(file: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """Returns to whom the system gives huge pages: "always", "madvise" or "never".

    "madvise" is to who asks for them. It is "never" where the file of this setting is not there.
    """
    try:
        return file.read_text().partition("[")[2].partition("]")[0] or "never"
    except OSError:
        return "never"


def use_huge_pages() -> None:
    """Starts this program again, in this process, with huge pages for its large allocations.

    TensorFlow allocates fields anew in each step. By small pages that can take more than half as
    long as the rest, where fields are larger than 32 MiB. The C library reads its setting when a
    program starts. Nothing happens where the user has set the variable of `HUGE_PAGES`, or the
    system does not give huge pages to who asks. Call it before anything else.
    """
    if huge_pages() == "madvise" and HUGE_PAGES.keys().isdisjoint(os.environ):
        os.environ.update(HUGE_PAGES)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
    """Returns the memory of this host, or of this process's control group if that has less.

    Control groups of both versions are understood; a group is bound by those around it as well.

    Args:
        proc: the folder in which the system describes processes.
        cgroups: the folder in which control groups are mounted.
    """
    info = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    whole, free = (1024 * int(info[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
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
        ranks: number of ranks of the job that this process is part of, or will start.
        environment: variables to read instead of `os.environ`.
    """
    env = os.environ if environment is None else environment
    here = detect(env)
    if here.size > 1:
        return here.local_size
    return math.ceil(ranks / int(env.get("SLURM_JOB_NUM_NODES", "1")))


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
    stat = dict(line.split() for line in lines)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def user_cache() -> Path:
    """Returns the user's cache folder, which may have to be made, and can be removed at any time.

    It is FLOWPM_CACHE, or flowpm-dist in XDG_CACHE_HOME or ~/.cache. A user without a home, as in
    some containers, has one in the folder for temporary files.

    Raises:
        LaunchError: others can write there: libraries are loaded from the cache.
    """
    if chosen := os.environ.get("FLOWPM_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not base.startswith("~"):
        return Path(base) / "flowpm-dist"
    folder = Path(tempfile.gettempdir()) / f"flowpm-dist-{os.geteuid()}"
    with contextlib.suppress(OSError):  # it exists, or cannot be made
        folder.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not mine or status.st_mode & OTHERS_WRITE:
            raise LaunchError(
                f"the cache {folder} is not a folder that belongs to this user, and in which no "
                "other user can write: set FLOWPM_CACHE to such a folder"
            )
    return folder


def why_unsafe(path: Path) -> str:
    """Returns why code from the user's cache must not be loaded; an empty text if it can be.

    The file and all folders that it is in must belong to this user or to root, and not everybody
    may write to them. In the cache the group may not write either; above it, a group is trusted. A
    folder in which others can only add things is fine, as /tmp.

    Args:
        path: an existing file of the cache, or one of its folders.
    """
    cache, path = user_cache().resolve(), path.resolve()
    trusted = {0, os.geteuid(), *_unknown_owners()}
    for each in (path, *path.parents):
        status = each.stat()
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        writers = OTHERS_WRITE if each.is_relative_to(cache) else stat.S_IWOTH
        if status.st_uid not in trusted:
            fault, remedy = "belongs to another user", "set FLOWPM_CACHE to a folder of your own"
        elif status.st_mode & writers and not shared:
            fault, remedy = "can be changed by other users", f"run chmod -R go-w {cache}"
            if not each.is_relative_to(cache):
                remedy = "set FLOWPM_CACHE to a folder that only you can write to"
        else:
            continue
        return f"{each} {fault}, and code from the cache is run: {remedy}"
    return ""


def _unknown_owners() -> set[int]:
    """Returns the number of the owners that a container without their numbers shows, if any."""
    with contextlib.suppress(OSError, ValueError):
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
        if first or count < 2**32 - 1:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return set()


def private_folder(folder: Path) -> None:
    """Makes a folder of the user's cache for code, to which no other user can write.

    Raises:
        OSError: it cannot be made.
    """
    cache = user_cache()
    for each in reversed([folder, *(p for p in folder.parents if p.is_relative_to(cache))]):
        each.mkdir(mode=0o755, parents=True, exist_ok=True)
        if each != cache or "FLOWPM_CACHE" not in os.environ:  # the user's own folder stays as is
            make_private(each)


def make_private(path: Path) -> None:
    """Takes the permission to write to a file or folder of this user from all others."""
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
        path.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
