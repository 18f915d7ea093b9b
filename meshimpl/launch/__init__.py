"""The place of this process among the ranks of a job, and the start and the end of a job.

Everything here is read from the environment that mpirun, srun or horovodrun leaves. Importing this
package imports neither TensorFlow nor Horovod nor MPI.
"""

from meshimpl.launch.ending import (
    ENVIRONMENT_DEFAULTS,
    HOST_LOST,
    STOP_SIGNALS,
    abort,
    abort_on_error,
    environment_defaults,
    leave_terminal,
    mark_reported,
    set_horovod_defaults,
    start_in_time,
    stop_name,
    time_limit,
)
from meshimpl.launch.gpus import (
    check_gpus,
    gpu_identity,
    gpus_in_sight,
    horovod_has_nccl,
)
from meshimpl.launch.job import (
    check_launcher,
    check_srun_mpi,
    dying_with_parent,
    find_mpirun,
    launch_or_join,
    mpirun_command,
    open_mpi_version,
    relaunch,
)
from meshimpl.launch.rank import (
    HUGE_PAGES,
    THREADS,
    WITHOUT_RANKS,
    HostMemory,
    LaunchError,
    RankEnvironment,
    available_cores,
    configure_threads,
    detect,
    host_memory,
    huge_pages,
    make_private,
    private_folder,
    ranks_on_host,
    threads_per_rank,
    unused_tasks,
    use_huge_pages,
    user_cache,
    why_unsafe,
)
