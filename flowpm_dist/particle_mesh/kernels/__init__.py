"""Particle kernels: compiled for CPUs where that is possible, portable elsewhere."""

from __future__ import annotations

import functools
import os

import tensorflow as tf

from flowpm_dist.particle_mesh.kernels.base import Ball, Kernels, Lattice, Slabs
from flowpm_dist.particle_mesh.kernels.compiled import Compiled, load
from flowpm_dist.particle_mesh.kernels.portable import Portable

__all__ = [
    "Ball",
    "Compiled",
    "Kernels",
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
    """Returns why `kernels()` are the portable ones, or None if they are the compiled ones."""
    choice = _choice()
    if choice == "portable":
        return f"{CHOICE}=portable"
    if choice != "compiled" and tf.config.get_visible_devices("GPU"):
        return "a GPU is visible"
    return load()[1]


@functools.cache
def kernels() -> Kernels:
    """Returns the kernels of this process: the compiled ones if it has no GPU and they load.

    FLOWPM_KERNELS=portable or compiled overrides the choice.

    Raises:
        KernelsError: if FLOWPM_KERNELS is "compiled" and they do not load, or has another value
            than these two.
    """
    reason = why_portable()
    if reason is None:
        return Compiled()
    if _choice() == "compiled":
        raise KernelsError(
            f"{CHOICE}=compiled, but {reason}. To build them: flowpm-dist build kernels, with a "
            "C++ compiler and TensorFlow installed"
        )
    return Portable()
