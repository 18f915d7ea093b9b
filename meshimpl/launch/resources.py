"""A rank's share of its node: cores, threads, devices."""

import os
import sys
from pathlib import Path

from meshimpl.launch.environment import LaunchError, RankEnvironment, detect

THREAD_OVERRIDES = ("MESHIMPL_THREADS", "FLOWPM_THREADS")
"""Variables by which a user sets the number of threads of each rank."""
LIBRARY_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
"""Variables in which the libraries look for theirs."""


def available_cores() -> int:
    """Returns the number of cores that affinity and container leave to this process."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def threads_per_rank(here: RankEnvironment | None = None) -> int:
    """Returns this rank's share of the node's cores.

    MESHIMPL_THREADS or FLOWPM_THREADS in the environment override it.

    Args:
        here: the rank's place in its job; by default that of this process.

    Raises:
        LaunchError: the override is not a positive number.
    """
    for name in THREAD_OVERRIDES:
        if name in os.environ:
            if not os.environ[name].isdigit() or int(os.environ[name]) < 1:
                raise LaunchError(f"{name}={os.environ[name]} is not a positive number of threads")
            return int(os.environ[name])
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
    for name in LIBRARY_THREADS:
        os.environ[name] = str(threads)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "tensorflow" in sys.modules:
        threading_config = sys.modules["tensorflow"].config.threading
        threading_config.set_intra_op_parallelism_threads(threads)
        threading_config.set_inter_op_parallelism_threads(threads)
    return threads


def place_devices(local_rank: int) -> None:
    """Shows TensorFlow one GPU for this rank if the node has any; local ranks take turns."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        mine = gpus[local_rank % len(gpus)]
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)
