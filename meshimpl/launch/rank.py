"""What a rank knows of itself before it talks to others, from environment variables only."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Slurm numbers the steps that srun did not start (interactive, batch, extern) from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

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
    """
    env = os.environ if environment is None else environment
    for prefix, launcher in (("OMPI_COMM_WORLD", "mpirun"), ("HOROVOD", "horovodrun")):
        if f"{prefix}_RANK" in env:
            names = [f"{prefix}_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
            return _from_variables(env, names, launcher)
    slurm = _slurm_step(env)
    if "PMI_RANK" in env:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        found = _from_variables(env, names, "mpirun")
        # srun speaks PMI too; MPICH's mpirun inside a Slurm job starts its own daemons with srun.
        if slurm is None or (slurm.rank, slurm.size) != (found.rank, found.size):
            return found
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
    rank, size = int(env[names[0]]), int(env[names[1]])
    local_rank, local_size = int(env.get(names[2], rank)), int(env.get(names[3], size))
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
