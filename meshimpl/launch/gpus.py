"""The GPUs of a node, counted before TensorFlow or MPI is loaded."""

import ctypes
import itertools
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from meshimpl.launch.rank import LaunchError

GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
"""In which the driver has a folder for each GPU."""
UUID_BYTES = 16
HIDES = "CUDA_VISIBLE_DEVICES"


def gpus_in_sight(environment: Mapping[str, str] | None = None) -> int:
    """Returns the number of GPUs that a process of this machine may use.

    Args:
        environment: variables to read instead of `os.environ`.
    """
    env = os.environ if environment is None else environment
    try:
        there = len(list(GPU_FOLDERS.iterdir()))
    except OSError:
        return 0
    if HIDES not in env:
        return there
    # CUDA takes the entries before the first that is none.
    entries = map(str.strip, env[HIDES].split(","))
    chosen = len([*itertools.takewhile(lambda entry: entry and entry[0] != "-", entries)])
    return chosen if "MIG" in env[HIDES] else min(chosen, there)


def horovod_has_nccl() -> bool:
    """Returns whether the installed Horovod was built with NCCL, without loading it."""
    spec = find_spec("horovod")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    libraries = [file for folder in folders for file in Path(folder).glob("tensorflow/mpi_lib*.so")]
    return any(b"libnccl.so" in file.read_bytes() for file in libraries)


def too_few_gpus(ranks: int, gpus: int) -> str:
    """Returns the error message, with its remedy, for a node with more ranks than GPUs."""
    return (
        f"this node has {ranks} ranks and {gpus} GPU{'s' if gpus > 1 else ''}, and NCCL wants one "
        f"GPU for each rank: start {gpus} ranks a node, or hide the GPUs with {HIDES}=''"
    )


def check_gpus(ranks: int) -> None:
    """Refuses more ranks on this machine than GPUs, before they start.

    Where there is no GPU, or Horovod carries messages by MPI, any number of ranks will do.

    Args:
        ranks: number of ranks to start here.

    Raises:
        LaunchError: NCCL would refuse them.
    """
    gpus = gpus_in_sight()
    if 0 < gpus < ranks and horovod_has_nccl():
        raise LaunchError(too_few_gpus(ranks, gpus))


def gpu_identity(index: int) -> bytes:
    """Returns the UUID of a GPU of this process, which no other in the world has.

    Args:
        index: its number among the GPUs that CUDA shows to this process.

    Returns:
        `UUID_BYTES` bytes; zeros if the driver does not know it.
    """
    uuid = ctypes.create_string_buffer(UUID_BYTES)
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        tell = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        done = [
            driver.cuInit(0),
            driver.cuDeviceGet(ctypes.byref(device), index),
            tell(uuid, device),
        ]
    except (OSError, AttributeError):
        return bytes(UUID_BYTES)
    return bytes(UUID_BYTES) if any(done) else uuid.raw
