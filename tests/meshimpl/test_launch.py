"""Where a process stands, how a job begins, and that a job with a failed rank ends in seconds."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshimpl import launch
from meshimpl.launch import RankEnvironment, ending
from meshimpl.launch import job as job_module
from meshimpl.launch import rank as rank_module

needs_ranks = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "3",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RankEnvironment()),
        (OPEN_MPI, RankEnvironment(5, 8, 1, 4, "mpirun")),
        (MPICH, RankEnvironment(1, 2, 0, 1, "mpirun")),
        (HOROVODRUN, RankEnvironment(1, 2, 1, 2, "horovodrun")),
        (STEP, RankEnvironment(6, 7, 0, 1, "srun")),
        (STEP | {"PMI_RANK": "6", "PMI_SIZE": "7"}, RankEnvironment(6, 7, 0, 1, "srun")),
        # A batch script, an interactive step and a step of one task are one process.
        (BATCH, RankEnvironment()),
        (BATCH | {"SLURM_STEP_ID": "4294967290"}, RankEnvironment()),
        (BATCH | {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}, RankEnvironment()),
        # mpirun inside a Slurm job: its daemons are srun's tasks, its ranks are its own.
        (STEP | OPEN_MPI, RankEnvironment(5, 8, 1, 4, "mpirun")),
        (STEP | MPICH, RankEnvironment(1, 2, 0, 1, "mpirun")),
    ],
)
def test_detect(environment: dict[str, str], expected: RankEnvironment) -> None:
    assert launch.detect(environment) == expected


@pytest.mark.parametrize("rank", ["5", "-1", "x", ""])
def test_detect_refuses_a_place_that_is_none(rank: str) -> None:
    with pytest.raises(launch.LaunchError, match=f"OMPI_COMM_WORLD_RANK={rank}, .*no rank"):
        launch.detect({"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variable, no setting of ours."""
    for name in list(os.environ):
        if re.match("OMPI_COMM|PMI|SLURM|HOROVOD_|MESHIMPL_THREADS", name):
            monkeypatch.delenv(name)
    return monkeypatch


def test_threads_are_the_cores_shared_by_the_ranks_of_a_node(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(rank_module, "available_cores", lambda: 8)
    assert launch.threads_per_rank() == 8
    assert launch.threads_per_rank(RankEnvironment(0, 16, 0, 4, "mpirun")) == 2
    assert launch.threads_per_rank(RankEnvironment(0, 16, 0, 16, "mpirun")) == 1
    # srun has given this task 8 of the node's cores already.
    alone.setenv("SLURM_CPUS_ON_NODE", "32")
    assert launch.threads_per_rank(RankEnvironment(0, 16, 0, 4, "srun")) == 8
    alone.setenv("MESHIMPL_THREADS", "3")
    assert launch.threads_per_rank() == 3
    alone.setenv("MESHIMPL_THREADS", "many")
    with pytest.raises(launch.LaunchError, match="MESHIMPL_THREADS=many"):
        launch.threads_per_rank()


def test_horovod_defaults_leave_the_users_settings(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("HOROVOD_CYCLE_TIME", "2.5")
    for name in launch.ENVIRONMENT_DEFAULTS.keys() - {"HOROVOD_CYCLE_TIME"}:
        alone.setenv(name, "")
        alone.delenv(name)
    launch.set_horovod_defaults()
    assert os.environ["HOROVOD_CYCLE_TIME"] == "2.5"
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "3600"


@pytest.mark.parametrize(
    ("name", "usual"), [("MESHIMPL_STALL_LIMIT", 300), ("MESHIMPL_SILENCE_LIMIT", 30)]
)
def test_time_limits(alone: pytest.MonkeyPatch, name: str, usual: float) -> None:
    alone.delenv(name, raising=False)
    assert launch.time_limit(name) == usual
    alone.setenv(name, "0")
    assert launch.time_limit(name) == 0
    for wrong in ("soon", "-1", "nan", "inf"):
        alone.setenv(name, wrong)
        with pytest.raises(launch.LaunchError, match=f"{name}={wrong}"):
            launch.time_limit(name)


def test_srun_without_pmix_is_refused(alone: pytest.MonkeyPatch) -> None:
    """Where Open MPI needs it, and nowhere else."""
    version: list[int | None] = [5]
    alone.setattr(job_module, "find_mpirun", lambda: Path("mpirun"))
    alone.setattr(job_module, "open_mpi_version", lambda mpirun: version[0])
    with pytest.raises(launch.LaunchError, match="7 tasks without PMIx.*srun --mpi=pmix"):
        launch.check_launcher(STEP)
    for fine in (STEP | {"PMIX_NAMESPACE": "slurm.pmix.2.0"}, STEP | OPEN_MPI, BATCH, {}):
        launch.check_launcher(fine)
    for other in (4, None):
        version[0] = other
        launch.check_launcher(STEP)


@pytest.mark.parametrize(
    ("message", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", 5),
        ("mpirun (Open MPI) 4.1.4", 4),
        ("HYDRA build details:\n    Version: 4.2.0", None),
    ],
)
def test_open_mpi_version(tmp_path: Path, message: str, version: int | None) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\ncat <<'EOF'\n{message}\nEOF\n")
    mpirun.chmod(0o755)
    assert launch.open_mpi_version(mpirun) == version


def test_tasks_of_an_allocation_that_go_unused() -> None:
    assert launch.unused_tasks(BATCH) == 4
    for all_used in ({}, STEP, BATCH | OPEN_MPI, STEP | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert launch.unused_tasks(all_used) == 0


def test_launch_or_join(alone: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    joined: list[bool] = []
    alone.setattr(job_module, "abort_on_error", lambda: joined.append(True))
    assert launch.launch_or_join(None, []) is None
    assert launch.launch_or_join(1, []) is None
    assert not joined, "one rank keeps Python's handling of errors"
    assert launch.launch_or_join(0, []) == 2
    assert "at least 1" in capfd.readouterr().err
    for name, value in (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}).items():
        alone.setenv(name, value)
    assert launch.launch_or_join(8, []) is None
    assert joined
    assert launch.launch_or_join(4, []) == 2
    assert "--ranks 4, but mpirun runs this on 8" in capfd.readouterr().err


def test_what_is_missing_is_named(
    alone: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with alone.context() as patch:
        patch.setattr(job_module, "find_spec", lambda name: None)
        patch.setattr(job_module, "find_mpirun", lambda: Path("/bin/true"))
        assert launch.relaunch(2, []) == 2
        assert "needs Horovod" in capfd.readouterr().err
    alone.setattr(sys, "executable", str(tmp_path / "python"))
    alone.setenv("PATH", str(tmp_path))
    assert launch.relaunch(2, []) == 2
    assert "needs mpirun" in capfd.readouterr().err


def test_one_rank_imports_neither_mpi_nor_horovod() -> None:
    code = """
        import sys
        from meshimpl import launch
        launch.configure_threads()
        assert launch.launch_or_join(1, []) is None
        assert not {"mpi4py", "horovod"} & set(sys.modules), "imported"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


class Gpus:
    """`tf.config` of a node with GPUs, which this machine may lack."""

    def __init__(self, count: int, *, begun: bool = False) -> None:
        self.all, self.begun = [f"GPU:{i}" for i in range(count)], begun
        self.visible, self.growing = self.all, []
        self.experimental = self

    def list_physical_devices(self, kind: str) -> list[str]:
        assert kind == "GPU"
        return self.all

    def get_visible_devices(self, kind: str) -> list[str]:
        assert kind == "GPU"
        return self.visible

    def set_visible_devices(self, device: str, kind: str) -> None:
        if self.begun and self.visible != [device]:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = [device]

    def set_memory_growth(self, device: str, enable: bool) -> None:
        if self.begun:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growing.append(device)


def placed(patch: pytest.MonkeyPatch, gpus: Gpus, rank: int, ranks: int, **options: Any) -> Gpus:
    """The GPUs after rank number `rank` of a node's `ranks` has chosen."""
    import tensorflow as tf

    from meshimpl.process_mesh import place_devices

    patch.setattr(tf, "config", gpus)
    launcher = options.pop("launcher", "mpirun")
    here = launch.RankEnvironment(rank, ranks, rank, ranks, launcher)
    place_devices(here, **options)
    return gpus


def test_each_rank_has_a_gpu_that_grows(alone: pytest.MonkeyPatch) -> None:
    alone.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for ranks, rank in ((1, 0), (4, 0), (4, 3)):
        gpus = placed(alone, Gpus(4), rank, ranks)
        assert gpus.visible == gpus.growing == [f"GPU:{rank}"]
    assert placed(alone, Gpus(0), 1, 2).visible == []
    assert placed(alone, Gpus(1), 3, 4, launcher="srun").visible == ["GPU:0"]  # its own
    assert placed(alone, Gpus(2), 3, 4, shared=True).visible == ["GPU:1"]
    mine = Gpus(4)
    mine.visible = ["GPU:2"]  # the program's choice
    assert placed(alone, mine, 3, 4).growing == ["GPU:2"]


def test_ranks_without_a_gpu_of_their_own_are_refused(alone: pytest.MonkeyPatch) -> None:
    """On every rank of the node, also on those that could have one."""
    alone.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, rank in ((2, 0), (2, 3), (1, 1)):
        with pytest.raises(launch.LaunchError, match=f"has 4 ranks and {count} GPU"):
            placed(alone, Gpus(count), rank, 4)
    alone.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(launch.LaunchError, match="NCCL wants one GPU for each rank"):
        placed(alone, Gpus(2), 1, 4)


def test_tensors_that_came_before_the_mesh(alone: pytest.MonkeyPatch) -> None:
    """They bind a rank to all GPUs: an error where ranks share them, none where one is alone."""
    for rank in (0, 1):
        with pytest.raises(launch.LaunchError, match="before the first tensor"):
            placed(alone, Gpus(2, begun=True), rank, 2)
    placed(alone, Gpus(2, begun=True), 0, 1)
    placed(alone, Gpus(1, begun=True), 1, 2, launcher="srun")


def test_one_rank_places_its_devices(alone: pytest.MonkeyPatch) -> None:
    from meshimpl import ProcessMesh

    gpus = Gpus(2)
    alone.setattr("tensorflow.config", gpus)
    ProcessMesh("row:1")
    assert gpus.visible == gpus.growing == ["GPU:0"]


STARTED = """
import os, signal, sys, threading, time
from meshimpl import launch
if "threads" in sys.argv:  # as NumPy has
    for _ in range(4):
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
stop_as = signal.SIGUSR1 if "gently" in sys.argv else None
status = launch.launch_or_join(2, sys.argv[1:], stop_as=stop_as)
if status is not None:
    sys.exit(status)
"""
# What the launcher does with signals needs no TensorFlow, which takes each rank seconds to import.
MPI_ALONE = """
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
HOROVOD = """
launch.configure_threads()
launch.set_horovod_defaults()
from meshimpl.imports import import_tensorflow
import_tensorflow()
from meshimpl import engine
import tensorflow as tf
hvd = engine.import_horovod()
hvd.init()
rank = hvd.rank()
"""


def start_job(
    tmp_path: Path, body: str, argument: str = "an argument", engine: str = MPI_ALONE
) -> subprocess.Popen[str]:
    """Start a program that relaunches itself on 2 ranks, which meet in the engine's lines."""
    program = tmp_path / "program.py"
    program.write_text(STARTED + engine + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(program), argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[2])},
    )


def job(tmp_path: Path, body: str) -> tuple[int, str, str]:
    """Run such a program to its end with Horovod: its status, output and error output."""
    process = start_job(tmp_path, body, engine=HOROVOD)
    try:
        output, errors = process.communicate(timeout=50)
    finally:
        process.kill()
    return process.returncode, output, errors


@needs_ranks
def test_a_job_of_two_ranks(tmp_path: Path) -> None:
    body = """
        from mpi4py import MPI
        total = hvd.allreduce(tf.constant([rank + 1.0]), op=hvd.Sum).numpy()[0]
        MPI.COMM_WORLD.Barrier()
        maps = open("/proc/self/maps").read().splitlines()
        libraries = {line.split()[-1] for line in maps if "libmpi.so" in line}
        print(f"total {total:.0f} argument {sys.argv[1]!r} libraries {len(libraries)}", flush=True)
        sys.exit(3)
    """
    status, output, errors = job(tmp_path, body)
    assert output.count("total 3 argument 'an argument' libraries 1") == 2, errors
    assert status == 3


FAILS = """
import threading, time
from meshimpl import launch

def fail():
    launch.mark_reported()
    raise ValueError(launch.stop_name("too small"))

launch.abort_on_error()
threading.Thread(target=fail).start()
time.sleep(60)
"""


@pytest.mark.parametrize("closed", [False, True])
def test_a_rank_far_from_the_folder_of_its_job_ends_the_job(tmp_path: Path, closed: bool) -> None:
    """The folder is on the first host alone; a launcher that has ended closes the error stream."""
    here = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    here |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    here |= {"MESHIMPL_FAILURE_FOLDER": str(tmp_path / "elsewhere")}
    environment = {**os.environ, **here, "PYTHONPATH": str(Path(launch.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", FAILS], stderr=subprocess.PIPE, env=environment
    )
    assert process.stderr is not None
    if closed:
        process.stderr.close()
    try:
        assert process.wait(20) == 1
    finally:
        process.kill()
    assert closed or process.stderr.read().endswith(b"[rank 1/2] ValueError: too small\n")


# Below, the other rank sits in a collective or a sleep that would outlast the time limit.


LATE = """
import sys, time
from meshimpl import launch
status = launch.launch_or_join(2, sys.argv[1:])
if status is not None:
    sys.exit(status)
if launch.detect().rank == 1:
    time.sleep(60)
from meshimpl import ProcessMesh
ProcessMesh("row:2")
"""


@needs_ranks
def test_a_rank_that_does_not_come_at_the_start_ends_the_job(tmp_path: Path) -> None:
    """There is no other watch before Horovod has started."""
    (tmp_path / "program.py").write_text(LATE)
    here = {"PYTHONPATH": str(Path(launch.__file__).parents[2]), "MESHIMPL_START_LIMIT": "2"}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        env={**os.environ, **here},
        timeout=50,
    )
    assert done.returncode == 1
    assert f"error: rank 0 of 2 on host {socket.gethostname()} has waited 2 s" in done.stderr


def test_a_start_in_time(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(ending, "abort", lambda status: ended.append(status))
    alone.setattr(ending, "detect", lambda: launch.RankEnvironment(0, 2))
    ended: list[int] = []
    for limit, seconds in (("0.2", 0.0), ("0", 0.3), ("0.2", 0.5)):
        assert not ended
        alone.setenv("MESHIMPL_START_LIMIT", limit)
        with launch.start_in_time():
            time.sleep(seconds)
        time.sleep(0.3)
    assert ended == [1]


@needs_ranks
@pytest.mark.parametrize("with_mpi4py", [False, True])
def test_an_exception_ends_every_rank(tmp_path: Path, with_mpi4py: bool) -> None:
    body = f"""
        if {with_mpi4py}:
            from mpi4py import MPI
        if rank == 1:
            raise ValueError("one rank's trouble")
        hvd.allreduce(tf.ones(4))
    """
    status, _, errors = job(tmp_path, body)
    assert status == 1
    assert "Traceback" in errors
    assert errors.strip().endswith("[rank 1/2] ValueError: one rank's trouble")


@needs_ranks
def test_an_exception_in_a_thread_ends_every_rank(tmp_path: Path) -> None:
    body = """
        import threading
        if rank == 0:
            threading.Thread(target=lambda: 1 / 0).start()
            time.sleep(100)
        hvd.allreduce(tf.ones(4))
    """
    status, _, errors = job(tmp_path, body)
    assert status == 1
    assert "[rank 0/2] ZeroDivisionError" in errors.strip().splitlines()[-1]


@needs_ranks
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    body = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(tf.ones(4))
    """
    status, _, errors = job(tmp_path, body)
    assert status != 0
    # MPICH's mpirun gives the bare number, which might be a program's own status.
    if launch.open_mpi_version(launch.find_mpirun()):
        assert status == 128 + signal.SIGKILL
        assert "ended by SIGKILL" in errors.strip().splitlines()[-1]


@needs_ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_program_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    body = """
        print("running", os.getpid(), flush=True)
        time.sleep(100)
    """
    process = start_job(tmp_path, body, argument="threads")
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(2)]
    process.send_signal(number)
    status = process.wait(timeout=30)
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    limit = time.monotonic() + 20
    while any(Path("/proc", pid).exists() for _, pid in lines) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(Path("/proc", pid).exists() for _, pid in lines)


GENTLE = """
    received = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    MPI.COMM_WORLD.Barrier()
    print("running", os.getpid(), flush=True)
    while not received:
        time.sleep(0.1)
    time.sleep(3)  # mpirun would end a rank a second after SIGTERM or SIGINT
    MPI.COMM_WORLD.Barrier()
"""


@needs_ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_are_asked_to_stop_have_the_time_they_need(
    tmp_path: Path, number: signal.Signals
) -> None:
    body = (
        GENTLE
        + """
    print("stopped by", launch.stop_name("SIGUSR1"), flush=True)
    sys.exit(7 if launch.stop_name("SIGUSR1") == "SIGTERM" else 0)
    """
    )
    process = start_job(tmp_path, body, "gently")
    assert process.stdout is not None
    for _ in range(2):
        assert "running" in process.stdout.readline()
    process.send_signal(number)
    output, errors = process.communicate(timeout=40)
    assert output.count(f"stopped by {number.name}") == 2, errors
    assert process.returncode == (128 + number if number == signal.SIGTERM else 0)


@needs_ranks
def test_a_second_interrupt_ends_ranks_that_were_asked_to_stop(tmp_path: Path) -> None:
    process = start_job(tmp_path, GENTLE + "    time.sleep(100)", "gently")
    assert process.stdout is not None
    for _ in range(2):
        assert "running" in process.stdout.readline()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    assert process.wait(timeout=30) == 128 + signal.SIGINT


AGAIN = """
import os, sys
from meshimpl import launch
from meshimpl.launch import rank
rank.huge_pages = lambda: MODE
print("begins", os.getpid(), *sys.argv[1:])
sys.stdout.flush()
launch.use_huge_pages()
print("runs with", os.environ.get("GLIBC_TUNABLES"), os.getpid(), *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("mode", "setting", "starts", "found"),
    [
        ("madvise", None, 2, "glibc.malloc.hugetlb=1"),
        ("madvise", "glibc.malloc.tcache_count=3", 1, "glibc.malloc.tcache_count=3"),
        ("madvise", "", 1, ""),
        ("always", None, 1, "None"),
        ("never", None, 1, "None"),
    ],
)
def test_a_program_starts_again_for_huge_pages(mode, setting, starts, found):
    """As the same process with the same arguments, once, and not against the user's setting."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment |= {} if setting is None else {"GLIBC_TUNABLES": setting}
    words = [sys.executable, "-X", "utf8", "-c", AGAIN.replace("MODE", repr(mode)), "a b", "-c"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert said.splitlines() == [
        *[f"begins {process.pid} a b -c"] * starts,
        f"runs with {found} {process.pid} a b -c",
    ]


def test_who_gets_huge_pages(tmp_path):
    file = tmp_path / "enabled"
    assert launch.huge_pages(file) == "never"
    file.write_text("always [madvise] never\n")
    assert launch.huge_pages(file) == "madvise"


@pytest.fixture
def without_home(tmp_path, monkeypatch):
    """Of a user without a home, where the cache is to be."""
    for name in ("FLOWPM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(rank_module.tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"flowpm-dist-{os.geteuid()}"


def test_a_user_without_a_home_owns_the_cache(without_home):
    for _ in range(2):
        assert launch.user_cache() == without_home
        assert without_home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fault", ["owner", "mode", "link", "file"])
def test_a_cache_in_which_others_can_write_is_refused(without_home, monkeypatch, fault):
    if fault == "link":
        without_home.symlink_to(without_home.parent)
    elif fault == "file":
        without_home.touch()
    else:
        without_home.mkdir(0o700)
        without_home.chmod(0o770 if fault == "mode" else 0o700)
    if fault == "owner":
        another = os.geteuid() + 1
        without_home = without_home.rename(without_home.with_name(f"flowpm-dist-{another}"))
        monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(launch.LaunchError, match=f"{without_home} is not a folder.*FLOWPM_CACHE"):
        launch.user_cache()
