"""The place of this process among the ranks of a job, and the start and the end of a job.

Everything here is read from the environment that mpirun, srun or horovodrun leaves. Importing this
package imports neither TensorFlow nor Horovod nor MPI.
"""

from meshimpl.launch.command import (
    ENVIRONMENT_DEFAULTS,
    find_mpirun,
    is_open_mpi,
    mpirun_command,
    set_horovod_defaults,
    silence_limit,
    stall_limit,
    start_limit,
)
from meshimpl.launch.ending import HOST_LOST, abort, abort_on_error
from meshimpl.launch.environment import WITHOUT_RANKS, LaunchError, RankEnvironment, detect
from meshimpl.launch.gpus import check_gpus, gpu_identity, gpus_in_sight, horovod_has_nccl
from meshimpl.launch.job import launch_or_join, relaunch
from meshimpl.launch.job_folder import STOP_SIGNALS, end_was_told, stop_name
from meshimpl.launch.late_start import in_time
from meshimpl.launch.memory import HostMemory, host_memory, ranks_on_host
from meshimpl.launch.pmix import check_launcher, check_srun_mpi, unused_tasks
from meshimpl.launch.resources import (
    available_cores,
    configure_threads,
    place_devices,
    threads_per_rank,
)

__all__ = [
    "ENVIRONMENT_DEFAULTS",
    "HOST_LOST",
    "HostMemory",
    "LaunchError",
    "STOP_SIGNALS",
    "RankEnvironment",
    "WITHOUT_RANKS",
    "abort",
    "abort_on_error",
    "available_cores",
    "check_gpus",
    "check_launcher",
    "check_srun_mpi",
    "configure_threads",
    "detect",
    "end_was_told",
    "find_mpirun",
    "gpu_identity",
    "gpus_in_sight",
    "horovod_has_nccl",
    "host_memory",
    "in_time",
    "is_open_mpi",
    "launch_or_join",
    "mpirun_command",
    "place_devices",
    "ranks_on_host",
    "relaunch",
    "set_horovod_defaults",
    "silence_limit",
    "stall_limit",
    "start_limit",
    "stop_name",
    "threads_per_rank",
    "unused_tasks",
]
