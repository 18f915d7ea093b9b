"""The periodic box, its grid, and which part of it this rank holds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.decomposition import finer_grid, mesh_factor_problem
from flowpm_dist.options import in_unit, keep_in_units
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl
from meshimpl.mesh_function import MeshFunction, block_of, check_divisible, whole_tensor
from meshimpl.operations.fft import Pencils, pencils, spectral_shape
from meshimpl.operations.halo import SUFFIX
from meshimpl.process_mesh import ProcessMesh

SPLIT = {
    "replica": ("batch",),
    "row": ("x", "x" + SUFFIX, "ky"),
    "col": ("y", "y" + SUFFIX, "kz"),
}
"""Mesh axis -> the dimensions that are split over it."""

VECTOR = mtf.Dimension("component", 3)

_ANY_SIZE = (math.nan, math.nan, math.nan)
_SIZE_IN_GRAPH = "flowpm_dist.box_size"


@dataclass(frozen=True)
class Box:
    """A periodic box or a batch of boxes, with its grid and its distribution over ranks.

    Attributes:
        grid: cells along x, y, z.
        size: side lengths [Mpc/h].
        mesh: the ranks. x is split over `row`, y over `col` and the batch over `replica`; z is not
            split.
        dtype: the dtype of its fields, float32 or float64.
        batch: the number of boxes, each with its own universe. None: a single box, whose fields
            have no batch dimension.

    Raises:
        ValueError: a side that is not positive, an odd or tiny grid, or one the mesh does not
            divide.
    """

    grid: tuple[int, int, int]
    size: tuple[float, float, float]
    mesh: ProcessMesh
    dtype: tf.DType = field(default=tf.float32)
    batch: int | None = None

    def __post_init__(self) -> None:
        keep_in_units(self, grid="", size="Mpc/h", batch="")
        for name in ("grid", "size"):
            if isinstance(sides := getattr(self, name), np.ndarray):
                object.__setattr__(self, name, tuple(sides.tolist()))
        if len(self.grid) != 3 or any(n < 4 or n % 2 for n in self.grid):
            raise ValueError(f"grid {self.grid}: three even numbers of at least 4 are needed")
        if self.size is not _ANY_SIZE and (
            len(self.size) != 3 or any(not 0 < s < math.inf for s in self.size)
        ):
            raise ValueError(f"box size {self.size}: three positive lengths [Mpc/h] are needed")
        for name, size in self.mesh.axes:
            if size > 1 and (name not in SPLIT or (name == "replica" and self.batch is None)):
                raise ValueError(
                    f"mesh {self.mesh}: one simulation is split over row and col; axis {name!r} "
                    "must have size 1"
                )
        check_divisible(self.shape, self.impl, "grid")

    def __reduce__(self) -> tuple[Any, ...]:
        return Box, (self.grid, self.size, self.mesh, self.dtype, self.batch)

    def __str__(self) -> str:
        batch = "" if self.batch is None else f"batch {self.batch}, "
        grid, size = (" x ".join(f"{n:g}" for n in three) for three in (self.grid, self.size))
        return f"{batch}grid {grid}, size {size} Mpc/h, mesh {self.mesh}, {self.dtype.name}"

    def facts(self) -> dict[str, str]:
        """Returns the box's properties as texts by name, for notebooks."""
        grid, size, cell = (
            " x ".join(f"{n:.6g}" for n in x) for x in (self.grid, self.size, self.cell)
        )
        batch = {} if self.batch is None else {"universes": str(self.batch)}
        lengths = {"size": f"{size} Mpc/h", "cell": f"{cell} Mpc/h"}
        return {**batch, "grid": grid, **lengths, "mesh": str(self.mesh), "dtype": self.dtype.name}

    def finer(self, factor: float) -> Box:
        """Returns the same box with `factor` times as many cells along each side.

        Args:
            factor: at least 1; whole, or such as 1.5.

        Raises:
            ValueError: the number of cells would not be even or not divide by the mesh of ranks.
        """
        factor = in_unit("factor", factor)
        if factor == 1:
            return self
        if problem := mesh_factor_problem(factor, self.grid, dict(self.mesh.axes)):
            raise ValueError(f"mesh_factor {problem}")
        return dataclasses.replace(self, grid=finer_grid(self.grid, factor))

    @property
    def of_any_size(self) -> Box:
        """The same box, whose mesh functions have its size as their last input.

        Functions that are lowered for it suit boxes of all sizes, see `cached_for_all_sizes`. Its
        `size` is NaN. Its lengths are tensors, in the graphs of its mesh functions alone.
        """
        return dataclasses.replace(self, size=_ANY_SIZE)

    @property
    def lengths(self) -> Sequence[Any]:
        """The side lengths [Mpc/h]: numbers, or float64 tensors for a box of any size."""
        return tf.unstack(self.size_tensor) if self.size is _ANY_SIZE else self.size

    @functools.cached_property
    def _size_outside(self) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.constant(self.size, tf.float64)

    @property
    def size_tensor(self) -> tf.Tensor:
        """The side lengths [Mpc/h], float64 [3]; a box of any size has the graph's size."""
        if self.size is not _ANY_SIZE:
            return self._size_outside
        (size,) = tf.compat.v1.get_collection(_SIZE_IN_GRAPH)
        return size

    @staticmethod
    def set_size(size: tf.Tensor) -> None:
        """Sets the size of boxes of any size in the graph under construction.

        Args:
            size: the side lengths [Mpc/h], float64 [3].
        """
        tf.compat.v1.get_collection_ref(_SIZE_IN_GRAPH)[:] = [size]

    @property
    def cell_lengths(self) -> tuple[Any, Any, Any]:
        """Sides of a cell [Mpc/h], like `lengths`."""
        x, y, z = (s / n for s, n in zip(self.lengths, self.grid, strict=True))
        return x, y, z

    @property
    def cell(self) -> tuple[float, float, float]:
        """Sides of a cell [Mpc/h]."""
        x, y, z = (s / n for s, n in zip(self.size, self.grid, strict=True))
        return x, y, z

    @property
    def volume(self) -> float:
        """The volume of the box [(Mpc/h)^3]."""
        return math.prod(self.size)

    @property
    def cells(self) -> int:
        """Number of cells, and of particles."""
        return math.prod(self.grid)

    @property
    def layout(self) -> str:
        """Tensor dimension to mesh axis, for the axes this mesh has."""
        return ";".join(f"{dim}:{axis}" for axis in self.mesh.names for dim in SPLIT.get(axis, ()))

    @functools.cached_property
    def impl(self) -> HvdSimdMeshImpl:
        """The mesh implementation of this layout, for look-ups."""
        return HvdSimdMeshImpl(self.mesh, self.layout)

    @property
    def number_shape(self) -> Any:
        """`mtf.Shape` of an array with one number for each universe: [], or [batch]."""
        return mtf.Shape([] if self.batch is None else [mtf.Dimension("batch", self.batch)])

    @property
    def shape(self) -> Any:
        """`mtf.Shape` of a scalar field: [x, y, z], or [batch, x, y, z]."""
        space = [mtf.Dimension(d, n) for d, n in zip("xyz", self.grid, strict=True)]
        return mtf.Shape(self.number_shape.dims + space)

    @property
    def vector_shape(self) -> Any:
        """`mtf.Shape` of a vector field: [..., x, y, z, component]."""
        return mtf.Shape([*self.shape.dims, VECTOR])

    @property
    def spectral_shape(self) -> Any:
        """`mtf.Shape` of a spectrum: [..., kz, ky, kx, pair]."""
        return spectral_shape(self.shape, self.impl)

    @property
    def mode_shape(self) -> Any:
        """`mtf.Shape` of one real number for each mode: [..., kz, ky, kx]."""
        return mtf.Shape(self.spectral_shape.dims[:-1])

    @property
    def pencils(self) -> Pencils:
        """The transform between fields and spectra."""
        return pencils(self.shape, self.impl)

    @property
    def split(self) -> dict[str, int]:
        """The number of ranks over which x and y are each split."""
        return {"x": self.mesh.axis_size("row"), "y": self.mesh.axis_size("col")}

    @property
    def offset(self) -> tuple[int, int, int]:
        """First cell of this rank's block."""
        x, y, z = self.impl.slice_begin(self.shape, self.mesh.rank)[-3:]
        return x, y, z

    @property
    def block(self) -> tuple[int, int, int]:
        """Cells of this rank's block, without the batch."""
        x, y, z = self.impl.slice_shape(self.shape)[-3:]
        return x, y, z

    @property
    def local_batch(self) -> tuple[int, ...]:
        """The number of universes of which this rank has a block: (), or (n,)."""
        return tuple(self.impl.slice_shape(self.number_shape))

    @property
    def batch_offset(self) -> int:
        """The first universe of which this rank has a block."""
        return sum(self.impl.slice_begin(self.number_shape, self.mesh.rank))

    @property
    def place(self) -> tuple[slice, ...]:
        """The slices of this rank's block in the whole array of a field: [batch,] x, y, z."""
        return self.place_of(self.mesh.rank)

    def place_of(self, rank: int) -> tuple[slice, ...]:
        """Returns the slices of a rank's block in the whole array of a field: [batch,] x, y, z."""
        begin, shape = self.impl.slice_begin(self.shape, rank), self.impl.slice_shape(self.shape)
        return tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))

    def sites(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y, z [Mpc/h] of this rank's cells: float64 arrays that broadcast to a block."""
        x, y, z = (
            side * np.arange(first, first + n)
            for side, first, n in zip(self.cell, self.offset, self.block, strict=True)
        )
        return x[:, np.newaxis, np.newaxis], y[:, np.newaxis], z

    def wavenumbers(
        self, transform: Pencils | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """kx, ky, kz [h/Mpc] of this rank's modes: float64 arrays that broadcast to a block.

        Args:
            transform: gives the order of the modes; `pencils` if None.
        """
        numbers = (transform or self.pencils).mode_numbers()
        kx, ky, kz = (2 * np.pi / s * n for s, n in zip(self.size, numbers, strict=True))
        return kx, ky, kz

    def graph_wavenumbers(self, transform: Pencils | None = None) -> list[tf.Tensor]:
        """As `wavenumbers`, in the field's dtype and the same graph on every rank."""
        transform = transform or self.pencils
        if self.size is not _ANY_SIZE:
            return [fence(tf.constant(k, self.dtype)) for k in self.wavenumbers(transform)]
        numbers = [fence(tf.constant(n, tf.float64)) for n in transform.mode_numbers()]
        return [
            tf.cast(2 * np.pi / s * n, self.dtype)
            for s, n in zip(self.lengths, numbers, strict=True)
        ]

    def check_equal(self, what: str, **inputs: Any) -> None:
        """Checks that all ranks were given this box, and the same inputs for work on it.

        See `ProcessMesh.check_equal`.
        """
        if self.mesh.size > 1:
            properties = {"grid": self.grid, "box_size": self.size, "precision": self.dtype.name}
            properties |= {"batch": self.batch, "mesh": str(self.mesh)}
            self.mesh.check_equal(what, **properties, **inputs)

    def function(self, build: Callable[..., Any], **inputs: Any) -> MeshFunction:
        """A mesh function on this box; inputs are shapes (of the box's dtype) or (shape, dtype)."""
        specs = {
            name: spec if isinstance(spec, tuple) else (spec, self.dtype)
            for name, spec in inputs.items()
        }
        if self.size is not _ANY_SIZE:
            return MeshFunction(build, self.mesh, self.layout, specs)

        @functools.wraps(build)
        def with_size(graph_mesh: Any, *args: Any) -> Any:
            *others, size = args
            self.set_size(whole_tensor(size))
            return build(graph_mesh, *others)

        specs["box_size"] = mtf.Shape([mtf.Dimension("axis", 3)]), tf.float64
        return MeshFunction(with_size, self.mesh, self.layout, specs)

    def block_of(self, name: str, value: Any, shape: Any) -> tf.Tensor:
        """Returns this rank's block of a field given as the block or as the whole array.

        Args:
            name: the name of the field in messages.
            value: tensor or array.
            shape: `mtf.Shape` of the whole array.

        Raises:
            ValueError: the value has neither shape, or its dtype is not the box's, or it has a
                unit.
        """
        return block_of(self.impl, name, in_unit(name, value), shape, self.dtype)

    def whole(self, block: tf.Tensor, shape: Any) -> np.ndarray:
        """The whole array of mtf shape `shape`, on every rank, from the ranks' blocks."""
        return self.impl.gather(tf.convert_to_tensor(block), shape).numpy()


def cast_float(number: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns a number or a float64 tensor, such as one of `Box.lengths`, in a dtype."""
    return tf.cast(tf.convert_to_tensor(number, tf.float64), dtype)


def check_same_box(a: Box, b: Box, what: str) -> None:
    """Raises a ValueError that shows both boxes, unless they are the same."""
    if a != b:
        raise ValueError(f"{what} are not on the same box: {a}; and {b}")


P = ParamSpec("P")
T = TypeVar("T")
Of = Callable[Concatenate[Box, P], T]


def cached_on_mesh(maxsize: int) -> Callable[[Of[P, T]], Of[P, T]]:
    """Like `functools.lru_cache`, with a cache on each mesh of ranks.

    What a mesh function needs is built by all of its ranks together, so they must also forget it
    together. In one cache for all meshes, what a rank does on its own would drive out what it
    shares on this rank alone, and the others would not build it again with it.

    Args:
        maxsize: the number of results of the function to keep on each mesh.
    """

    def decorate(function: Of[P, T]) -> Of[P, T]:
        @functools.wraps(function)
        def cached(box: Box, *args: P.args, **kwargs: P.kwargs) -> T:
            caches = box.mesh.cache
            if function not in caches:
                caches[function] = functools.lru_cache(maxsize)(function)
            result: T = caches[function](box, *args, **kwargs)
            return result

        return cached

    return decorate


class FunctionAtSize:
    """A mesh function of a box of any size, called with the size of a box.

    Args:
        function: the mesh function.
        box: the box. The functions of a box of any size are called within graphs of it alone, see
            `Box.set_size`.
    """

    def __init__(self, function: MeshFunction | FunctionAtSize, box: Box) -> None:
        self._function: MeshFunction = (
            function._function if isinstance(function, FunctionAtSize) else function
        )
        self._box = box

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the function, see `MeshFunction`."""
        return self._function(*args, **kwargs, box_size=self._box.size_tensor)

    def gather(self, block: Any, output: int = 0) -> np.ndarray:
        """Returns the whole array of an output, see `MeshFunction.gather`."""
        return self._function.gather(block, output)


BoxFunction = MeshFunction | FunctionAtSize
"""A mesh function of a box, lowered for its size or for all sizes."""


def cached_for_all_sizes(
    maxsize: int,
) -> Callable[[Of[P, MeshFunction]], Of[P, BoxFunction]]:
    """Like `cached_on_mesh`, for mesh functions that are lowered once for all sizes of the box.

    The decorated function gets `Box.of_any_size`. Its mesh function must be a function of that box,
    which reads the size from `Box.lengths`, `Box.cell_lengths` and `Box.graph_wavenumbers` alone.

    Args:
        maxsize: the number of mesh functions to keep on each mesh.
    """

    def decorate(function: Of[P, MeshFunction]) -> Of[P, BoxFunction]:
        lowered = cached_on_mesh(maxsize)(function)

        @functools.wraps(function)
        def of_size(box: Box, *args: P.args, **kwargs: P.kwargs) -> BoxFunction:
            return FunctionAtSize(lowered(box.of_any_size, *args, **kwargs), box)

        return of_size

    return decorate
