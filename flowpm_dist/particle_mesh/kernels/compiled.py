"""Particle kernels as operations of a library compiled for this TensorFlow.

The portable kernels take their place where the library is not found or does not suit the GPU.

`setup.py` builds a library next to this file where it finds TensorFlow; `flowpm-dist build kernels`
leaves one in the user's cache, for an installed package.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import cast_float
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.particle_mesh.kernels import build
from flowpm_dist.particle_mesh.kernels.base import Ball, Kernels, Lattice, Slabs
from flowpm_dist.particle_mesh.kernels.nvrtc import PACKAGE, GpuCodeError, gpu_code
from flowpm_dist.particle_mesh.kernels.portable import Portable
from meshimpl import launch
from meshimpl.launch import private_folder, user_cache, why_unsafe

NAME = "_kernels.so"
PATH = Path(__file__).with_name(NAME)
"""Where setup.py leaves the library."""
CHOICE = "FLOWPM_KERNELS"
NOT_BUILT = "the compiled kernels are not built"


class KernelsError(Exception):
    """An error: the requested kernels are not available. The message says why and what to do."""


def cached_path() -> Path:
    """Returns where the library is in the user's cache, or would be.

    The folder is named after the sources, TensorFlow and the machine that it is built for.
    """
    name = f"{build.identity(tf.__version__)} {platform.machine()}".encode()
    return user_cache() / "kernels" / hashlib.sha256(name).hexdigest()[:16] / NAME


def build_into_cache() -> Path:
    """Builds the library for this TensorFlow and returns its path in the user's cache.

    Raises:
        BuildError: something is missing, the compiler does not accept the sources, or others can
            write to the cache.
        OSError: the cache cannot be written.
    """
    path = cached_path()
    private_folder(path.parent)
    if reason := why_unsafe(path.parent):
        raise build.BuildError(reason)
    with tempfile.TemporaryDirectory(prefix="flowpm-kernels-") as objects:
        build.build(path, Path(objects))
    return path


@functools.cache
def load() -> tuple[Any, str | None]:
    """Returns the library's operations and None, or None and why they cannot be used."""
    # The library of the installation comes first. The last existing library gives the reason.
    reason = NOT_BUILT
    for path in (PATH, cached_path()):
        if path.exists():
            # Who can write to the installation can change this file as well.
            unsafe = "" if path == PATH else why_unsafe(path)
            operations, reason = (None, unsafe) if unsafe else _loaded(path)
            if operations is not None:
                return operations, None
    return None, reason


def _loaded(path: Path) -> tuple[Any, str]:
    if fault := build.fault(path.read_bytes(), tf.__version__):
        return None, f"{path.name} {fault}"
    try:
        return tf.load_op_library(str(path)), ""
    except (tf.errors.OpError, OSError, RuntimeError) as error:
        # The loader's first line names the symbol that TensorFlow no longer has.
        reason = str(getattr(error, "message", error)).strip().split("\n")[0]
        return None, f"{path.name} does not load with TensorFlow {tf.__version__} ({reason})"


def _attributes(geometry: Lattice | Slabs | Ball | None, amounts: Any) -> dict[str, Any]:
    """Returns the geometry as arguments of an operation, with the maps of these amounts."""
    match geometry:
        case Lattice():
            with tf.device("CPU:0"):  # where GPUs' kernels expect it
                per_cell = tf.stack([cast_float(n, tf.float64) for n in geometry.per_cell])
            return {
                "per_cell": per_cell,
                "lattice": [*geometry.particles, *geometry.inner_block, *geometry.halo],
            }
        case Slabs():
            return _of_maps(geometry, [geometry.pixel], amounts, [geometry.pixels] * 2) | {
                "places": tf.convert_to_tensor(geometry.places, tf.int32),
                "directions": tf.convert_to_tensor(geometry.directions, tf.float64),
                "distances": tf.convert_to_tensor(geometry.distances, tf.float64),
            }
        case Ball():
            sphere, limits = Healpix(geometry.nside), (geometry.near, geometry.far)
            scales = [*geometry.observer, *limits]
            return _of_maps(geometry, scales, amounts, [sphere.pixels]) | {
                "copies": tf.constant(geometry.copies, tf.int32),
                "edges": tf.constant(geometry.edges, tf.float64),
                "rings": tf.constant(sphere.theta),
                "first": geometry.first,
            }
    return {}


def _of_maps(
    geometry: Slabs | Ball, scales: Sequence[float], amounts: tf.Tensor, pixels: list[int]
) -> dict[str, Any]:
    """Returns the arguments of an operation that `Slabs` and `Ball` have in common."""
    shared = *geometry.spacing, *geometry.lengths, geometry.step, geometry.depth
    return {
        "borders": tf.constant(geometry.borders, tf.float64),
        "scales": tf.constant([*shared, *scales], tf.float64),
        "shape": [geometry.maps(amounts), *pixels],
        "power": geometry.power,
    }


class Compiled(Kernels):
    """The kernels in C++, on CPUs and on NVIDIA's GPUs.

    On CPUs every result has the same bits on any number of threads. On GPUs sums are made in any
    order, and maps of the sky are painted by the portable kernels.

    Raises:
        GpuCodeError: a GPU is visible for which the kernels cannot be compiled.
        RuntimeError: the library does not exist or does not load.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._ops, reason = load()
        if reason is not None:
            raise RuntimeError(reason)
        gpus = tf.config.get_visible_devices("GPU")
        for gpu in gpus:
            details = tf.config.experimental.get_device_details(gpu)
            if "compute_capability" not in details:
                raise GpuCodeError(f"{gpu.name} is not a GPU of NVIDIA")
            capability = details["compute_capability"]
            with tf.init_scope(), tf.device("CPU:0"):
                self._ops.flowpm_gpu_code(gpu_code(capability), capability=capability)
        self._maps = Portable() if gpus else None

    def _call(
        self, kernel: str, geometry: Lattice | Slabs | Ball | None = None, **arguments: Any
    ) -> Any:
        if self._maps is not None and isinstance(geometry, (Slabs, Ball)):
            return self._maps._call(kernel, geometry, **arguments)
        for name in ("weights", "add"):
            # The operations take what may be left out as a list of one tensor or of none.
            if name in arguments:
                arguments[name] = [] if arguments[name] is None else [arguments[name]]
        operation = getattr(self._ops, f"flowpm_{kernel}")
        results = operation(**arguments, **_attributes(geometry, arguments.get("amounts")))
        if kernel == "paint_vjp":
            return results.ds, results.dweights[0] if results.dweights else None
        return tuple(results) if isinstance(results, tuple) else results


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
