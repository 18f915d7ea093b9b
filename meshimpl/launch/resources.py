"""A rank's share of its node: cores, threads, devices."""

import os
import sys
from pathlib import Path

from meshimpl.launch.environment import LaunchError, RankEnvironment, detect
from meshimpl.launch.gpus import too_few_gpus

THREAD_OVERRIDES = ("MESHIMPL_THREADS", "FLOWPM_THREADS")
"""Variables by which a user sets the number of threads of each rank."""
LIBRARY_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
"""Variables in which the libraries look for theirs."""


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


def place_devices(here: RankEnvironment | None = None, *, shared: bool = False) -> None:
    """Shows TensorFlow one GPU for this rank, whose memory it takes as it needs it.

    Does nothing where TensorFlow finds no GPU. A single GPU that the scheduler, the program or
    CUDA_VISIBLE_DEVICES has chosen for this rank is taken as it is.

    Args:
        here: the rank's place in its job; by default that of this process.
        shared: let several ranks have one GPU, which NCCL refuses.

    Raises:
        LaunchError: the node has more ranks than GPUs, or TensorFlow has begun to use several GPUs
            already. It is raised on every rank of the node.
    """
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return
    here = here or detect()
    chosen = (
        here.launcher == "srun"
        or "CUDA_VISIBLE_DEVICES" in os.environ
        or gpus != tf.config.list_physical_devices("GPU")
    )
    if here.local_size > len(gpus) and not shared and not (chosen and len(gpus) == 1):
        raise LaunchError(too_few_gpus(here.local_size, len(gpus)))
    mine = gpus[here.local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        # A rank alone on its node, or with one GPU in sight, is where it should be.
        if here.local_size > 1 and len(gpus) > 1:
            raise LaunchError(
                f"TensorFlow has begun to use all {len(gpus)} GPUs of this node before its ranks "
                "shared them out: make the ProcessMesh, or call meshimpl.initialise, before the "
                "first tensor"
            ) from error
