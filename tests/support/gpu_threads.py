"""The kernels of GPUs on a CPU: gpu_threads.cc runs every thread, one after the other."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.particle_mesh.kernels import Ball, Kernels, Lattice, Slabs
from flowpm_dist.particle_mesh.kernels.build import HERE, compiler


class Geometry(ctypes.Structure):
    """`Geometry` of locate.h."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        ("particles", ctypes.c_int64 * 3),
        ("own", ctypes.c_int64 * 3),
        ("step", ctypes.c_int64),
        ("halo", ctypes.c_int64 * 3),
        ("mesh", ctypes.c_int64 * 3),
        ("per_cell", ctypes.c_double * 3),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the compiled gpu_threads.cc.

    Raises:
        BuildError: there is no C++ compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "gpu_threads.so"
        source = Path(__file__).with_suffix(".cc")
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{HERE}"]
        subprocess.run([*compiler(), *flags, str(source), "-o", str(target)], check=True)
        found = ctypes.CDLL(str(target))
    found.is_wide.restype = ctypes.c_bool
    return found


def is_wide(lattice: Lattice) -> bool:
    """Whether the cells of a padded block are numbered by 64 bits."""
    return library().is_wide(ctypes.byref(_geometry(lattice, batch=1)))


class Threads(Kernels):
    """The kernels of GPUs between particles and mesh; there are none for maps.

    Args:
        wide: number the cells by 64 bits, as for the largest meshes.
    """

    name = "threads"

    def __init__(self, wide: bool = False) -> None:
        self._wide = wide

    def _call(
        self, kernel: str, geometry: Lattice | Slabs | Ball | None = None, **arguments: Any
    ) -> Any:
        given = {name: None if x is None else x.numpy() for name, x in arguments.items()}
        first = next(x for x in given.values() if x is not None)
        like, batch = first.dtype, first.shape[0]

        def output(*shape: int, dtype: Any = like) -> np.ndarray:
            # The kernel must not count on zeros.
            return np.full(shape, np.nan, dtype)

        def shaped(name: str) -> np.ndarray:
            return output(*given[name].shape)

        match kernel:
            case "paint":
                call = "Paint"
                out = [output(batch, *geometry.mesh_block), output(3)]
                fields = [given["s"], given["weights"], *out]
            case "paint_vjp":
                call = "PaintVjp"
                weights = given["weights"]
                out = [shaped("s"), None if weights is None else shaped("weights")]
                fields = [given["s"], weights, given["dmesh"], given["add"], *out]
            case "read":
                call = "Read"
                width = given["fields"].shape[-1]
                out = [output(*given["s"].shape[:-1], width)]
                fields = [width, given["fields"], given["s"], *out]
            case "read_vjp":
                call = "ReadVjp"
                out = [shaped("fields"), shaped("s")]
                width = given["fields"].shape[-1]
                fields = [width, given["fields"], given["s"], given["dvalues"], *out]
            case "read_gradient":
                call = "Force"
                out = [shaped("s")]
                fields = [False, given["potential"], given["s"], None, None, *out]
            case "read_gradient_vjp":
                call = "ForceVjp"
                out = [shaped("potential"), shaped("s")]
                none = [None] * 3
                fields = [False, given["potential"], given["s"], None, given["dforce"]]
                fields += [*none, *out, None]
            case "kick":
                call = "Force"
                out = [shaped("s")]
                spectral = given["field"].ndim == 5
                fields = [spectral, given["field"], given["s"], given["v"], given["factors"], *out]
            case "kick_vjp":
                call = "ForceVjp"
                out = [shaped("field"), shaped("s"), shaped("s"), output(batch, 2, dtype=float)]
                fields = [given["field"].ndim == 5, given["field"], given["s"], given["v_after"]]
                fields += [given["dv"], given["ds"], given["factors"], out[2], out[0], out[1]]
                fields += [out[3]]
            case "linear":
                call = "Linear"
                out = [shaped("x")]
                size = given["x"].size // batch
                fields = [batch, size, given["x"], given["y"], given["factor"], *out]
            case _:
                call = "DriftVjp"
                out = [shaped("v"), shaped("v"), output(batch, dtype=float)]
                fields = [batch, given["v"].size // batch]
                fields += [given[name] for name in ("x_after", "v", "dx", "dv", "factor")] + out
        if geometry is not None:
            fields.insert(0, _geometry(geometry, batch))
        _run(f"{call}_{'float' if like == np.float32 else 'double'}", fields, self._wide)
        found = [None if x is None else tf.constant(x) for x in out]
        return found[0] if len(found) == 1 else tuple(found)


def _geometry(lattice: Lattice, batch: int) -> Geometry:
    step = lattice.inner_block[0] // lattice.particles[0] if lattice.is_whole else 0
    parts = lattice.inner_block, step, lattice.halo, lattice.mesh_block, lattice.per_cell
    return Geometry(batch, lattice.particles, *parts)


def _run(name: str, values: list[Any], wide: bool) -> None:
    """Calls a function of the library with a struct of these values, for wide or narrow cells."""
    kinds: list[Any] = []
    fields: list[Any] = []
    for value in values:
        match value:
            case Geometry():
                kind = Geometry
            case bool():
                kind = ctypes.c_bool
            case int():
                kind = ctypes.c_int64
            case _:
                kind = ctypes.c_void_p
                value = None if value is None else value.ctypes.data
        kinds.append((f"f{len(kinds)}", kind))
        fields.append(value)
    struct = type("Call", (ctypes.Structure,), {"_fields_": kinds})
    getattr(library(), name)(ctypes.byref(struct(*fields)), ctypes.c_bool(wide))
