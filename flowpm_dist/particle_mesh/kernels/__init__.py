"""Particle kernels: compiled for CPUs and NVIDIA's GPUs, portable elsewhere."""

from __future__ import annotations

import functools
import os
import warnings

from flowpm_dist.particle_mesh.kernels.base import Ball, Kernels, Lattice, Slabs
from flowpm_dist.particle_mesh.kernels.compiled import Compiled, load
from flowpm_dist.particle_mesh.kernels.nvrtc import PACKAGE, GpuCodeError
from flowpm_dist.particle_mesh.kernels.portable import Portable
from meshimpl import launch

__all__ = [
    "Ball",
    "Compiled",
    "Kernels",
    "KernelsError",
    "Lattice",
    "Portable",
    "Slabs",
    "kernels",
    "why_portable",
]

CHOICE = "FLOWPM_KERNELS"


class KernelsError(Exception):
    """An error: the requested kernels are not available. The message says why and what to do."""


def _choice() -> str:
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "portable", "compiled"):
        raise KernelsError(f'{CHOICE} is "portable", "compiled" or not set, not "{choice}"')
    return choice


def why_portable() -> str | None:
    """Returns why `kernels()` are the portable ones, or None if they are the compiled ones.

    A GPU for which the compiled ones have no code is found by `kernels` only.
    """
    return f"{CHOICE}=portable" if _choice() == "portable" else load()[1]


@functools.cache
def kernels() -> Kernels:
    """Returns the kernels of this process: the compiled ones if they load and suit its GPU.

    FLOWPM_KERNELS=portable or compiled overrides the choice. Warns (`UserWarning`) where there are
    no compiled kernels, since an installation by pip does not show that it could not build them.

    Raises:
        KernelsError: if FLOWPM_KERNELS is "compiled" and they do not load, or there is no code for
            a GPU; or if it has another value than these two.
    """
    reason, remedy = why_portable(), "flowpm-dist build kernels compiles them"
    if reason is None:
        try:
            return Compiled()
        except (GpuCodeError, OSError) as error:
            reason, remedy = str(error), f"they need compute capability 7.0 and {PACKAGE}"
    if _choice() == "compiled":
        raise KernelsError(f"{CHOICE}=compiled, but {reason}: {remedy}")
    if reason != f"{CHOICE}=portable" and launch.detect().rank == 0:
        warnings.warn(
            f"{reason}: particles take several times as long; {remedy}, and {CHOICE}=portable says "
            "that this is meant",
            stacklevel=2,
        )
    return Portable()
