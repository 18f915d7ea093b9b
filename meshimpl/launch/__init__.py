"""The place of this process among the ranks of a job, and the start and the end of a job.

Everything here is read from the environment that mpirun, srun or horovodrun leaves. Importing this
package imports neither TensorFlow nor Horovod nor MPI.
"""

from meshimpl.launch.command import (
    ENVIRONMENT_DEFAULTS,
    check_launcher,
    check_srun_mpi,
    find_mpirun,
    mpirun_command,
    open_mpi_version,
    set_horovod_defaults,
    time_limit,
)
from meshimpl.launch.ending import (
    HOST_LOST,
    STOP_SIGNALS,
    abort,
    abort_on_error,
    mark_reported,
    start_in_time,
    stop_name,
)
from meshimpl.launch.job import launch_or_join, relaunch
from meshimpl.launch.rank import WITHOUT_RANKS, LaunchError, RankEnvironment, detect, unused_tasks
from meshimpl.launch.resources import (
    HostMemory,
    available_cores,
    check_gpus,
    configure_threads,
    gpu_identity,
    gpus_in_sight,
    horovod_has_nccl,
    host_memory,
    place_devices,
    ranks_on_host,
    threads_per_rank,
)
