"""The versions that results depend on."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = (
    "flowpm-dist", "tensorflow", "tensorflow-cpu", "mesh-tensorflow", "horovod", "mpi4py",
    "numpy", "zarr", "camb",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
