"""Particle kernels in TensorFlow's own operations, compiled by XLA for CPUs and GPUs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from flowpm_dist.grid.box import cast_float
from flowpm_dist.particle_mesh.kernels import portable_sky
from flowpm_dist.particle_mesh.kernels.base import (
    FARTHEST,
    Ball,
    Kernels,
    Lattice,
    Slabs,
)


class _Corners:
    """The eight cells about each particle in a batch of padded blocks, and their weights.

    Args:
        g: the particles and the mesh.
        s: the displacement [b, nx, ny, nz, 3] [Mpc/h].
        margin: the number of cells that the block must hold on either side of the eight, along axes
            with halo.
    """

    def __init__(self, g: Lattice, s: tf.Tensor, margin: int) -> None:
        self.block = g.mesh_block
        self.batch = s.shape[0]
        cells = self.batch * self.block[0] * self.block[1] * self.block[2]
        self._index = tf.int32 if cells < 2**31 else tf.int64
        self._per_cell = _per_cell(g, s.dtype)
        places = [g.places(axis) for axis in range(3)]
        if not g.is_whole:
            # Added to the length: XLA may round a sum after a product in two ways, see `locate`.
            rest = [self._along(axis, cast_float(places[axis][1], s.dtype)) for axis in range(3)]
            s += tf.stack([tf.broadcast_to(along, g.particles) for along in rest], axis=-1)
        offset = s * self._per_cell
        self.inside = tf.reduce_all(tf.abs(offset) < FARTHEST, axis=-1)
        self._planes, self._weights = [], []
        for axis, (h, size) in enumerate(zip(g.halo, self.block, strict=True)):
            along = tf.where(self.inside, offset[..., axis], 0)
            floor = tf.floor(along)
            cells = tf.constant(places[axis][0], tf.int32)
            lower = self._along(axis, cells + h) + tf.cast(floor, tf.int32)
            if h:
                self.inside &= (lower >= margin) & (lower + 1 + margin < size)
            self._planes.append([lower, lower + 1])
            self._weights.append([1 - (along - floor), along - floor])
        for axis, size in enumerate(self.block):
            # Floor division rounds down, so the remainder lies in the block.
            planes = [
                plane % size if g.halo[axis] == 0 else tf.where(self.inside, plane, 0)
                for plane in self._planes[axis]
            ]
            self._planes[axis] = [tf.cast(plane, self._index) for plane in planes]

    @staticmethod
    def _along(axis: int, values: tf.Tensor) -> tf.Tensor:
        """Returns values along an axis as a tensor that broadcasts to the lattice."""
        return tf.reshape(values, [-1] + [1] * (2 - axis))

    def cells(self) -> list[tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]]:
        """Returns for each of the eight cells: flat index, weight, gradient of the weight [h/Mpc].

        The index is that in the flattened batch of blocks.
        """
        _, ny, nz = self.block
        (x, y, z), (wx, wy, wz) = self._planes, self._weights
        first = tf.range(self.batch, dtype=self._index) * (self.block[0] * ny * nz)
        first = tf.reshape(first, [-1, 1, 1, 1])
        result = []
        for i, j, k in ((i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)):
            slopes = [
                (2 * i - 1) * wy[j] * wz[k] * self._per_cell[0],
                (2 * j - 1) * wx[i] * wz[k] * self._per_cell[1],
                (2 * k - 1) * wx[i] * wy[j] * self._per_cell[2],
            ]
            index = first + (x[i] * ny + y[j]) * nz + z[k]
            result.append((index, wx[i] * wy[j] * wz[k], slopes))
        return result

    def outside(self, values: tf.Tensor, instead: float) -> tf.Tensor:
        """Returns values [b, nx, ny, nz, c] with `instead` for particles that are left out."""
        return tf.where(self.inside[..., tf.newaxis], values, tf.constant(instead, values.dtype))

    def gather(self, fields: tf.Tensor) -> tf.Tensor:
        """Returns the cloud-in-cell values of fields [b, px, py, pz, c] at the particles."""
        rows = tf.reshape(fields, [-1, fields.shape[-1]])
        parts = [tf.gather(rows, index) * w[..., tf.newaxis] for index, w, _ in self.cells()]
        return self.outside(tf.add_n(parts), float("nan"))

    def scatter(self, values: tf.Tensor) -> tf.Tensor:
        """Returns fields from values [b, nx, ny, nz, c], the adjoint of `gather`."""
        width = values.shape[-1]
        values = self.outside(values, 0)
        rows = tf.zeros([self.batch * self.block[0] * self.block[1] * self.block[2], width])
        rows = tf.cast(rows, values.dtype)
        for index, weight, _ in self.cells():
            updates = tf.reshape(values * weight[..., tf.newaxis], [-1, width])
            rows = tf.tensor_scatter_nd_add(rows, tf.reshape(index, [-1, 1]), updates)
        return tf.reshape(rows, [self.batch, *self.block, width])

    def slope(self, fields: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of <values, gather(fields)> with respect to s."""
        rows = tf.reshape(fields, [-1, fields.shape[-1]])
        axes: list[Any] = [0, 0, 0]
        for index, _, slopes in self.cells():
            product = tf.reduce_sum(tf.gather(rows, index) * values, axis=-1)
            axes = [total + product * slope for total, slope in zip(axes, slopes, strict=True)]
        return tf.stack(axes, axis=-1)


def _per_cell(g: Lattice, dtype: tf.DType) -> tf.Tensor:
    return tf.stack([cast_float(n, dtype) for n in g.per_cell])


def _difference(g: Lattice, field: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the 4-point difference of a field [b, px, py, pz] along an axis.

    It wraps around the block, so values near the edge of a halo are not valid.
    """

    def shifted(cells: int) -> tf.Tensor:
        return tf.roll(field, -cells, axis + 1)

    total = 8 * (shifted(1) - shifted(-1)) - (shifted(2) - shifted(-2))
    return total * cast_float(g.per_cell[axis] / 12, field.dtype)


def _force(g: Lattice, potential: tf.Tensor) -> tf.Tensor:
    return -tf.stack([_difference(g, potential, axis) for axis in range(3)], axis=-1)


def _force_vjp(g: Lattice, dforce: tf.Tensor) -> tf.Tensor:
    """Returns the adjoint of `_force`. It is the difference itself, which is antisymmetric.

    dforce is 0 where the difference wraps around a halo.
    """
    return tf.add_n([_difference(g, dforce[..., axis], axis) for axis in range(3)])


def _sum(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64), axis=[1, 2, 3, 4])


def _spread(factor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(factor, [-1, 1, 1, 1, 1])


def _paint(g: Lattice, s: tf.Tensor, weights: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    ones = tf.ones([*s.shape[:4], 1], s.dtype)
    values = ones if weights is None else weights[..., tf.newaxis]
    mesh = _Corners(g, s, 0).scatter(values)[..., 0]
    cells = tf.abs(s) * _per_cell(g, s.dtype)
    largest = tf.reduce_max(tf.where(tf.math.is_finite(s), cells, 0), axis=[0, 1, 2, 3])
    finite = tf.reduce_all(tf.math.is_finite(s))
    return mesh, tf.where(finite, largest, tf.constant(float("inf"), s.dtype))


def _paint_vjp(
    g: Lattice,
    s: tf.Tensor,
    weights: tf.Tensor | None,
    dmesh: tf.Tensor,
    add: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    corners, fields = _Corners(g, s, 0), dmesh[..., tf.newaxis]
    ones = tf.ones([*s.shape[:4], 1], s.dtype)
    values = ones if weights is None else weights[..., tf.newaxis]
    ds = corners.outside(corners.slope(fields, values), 0)
    ds = ds if add is None else add + ds
    if weights is None:
        return ds, None
    return ds, corners.outside(corners.gather(fields), 0)[..., 0]


def _read(g: Lattice, fields: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
    return _Corners(g, s, 0).gather(fields)


def _read_vjp(
    g: Lattice, fields: tf.Tensor, s: tf.Tensor, dvalues: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    corners = _Corners(g, s, 0)
    ds = corners.outside(corners.slope(fields, dvalues), float("nan"))
    return corners.scatter(dvalues), ds


def _read_gradient(g: Lattice, potential: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
    return _Corners(g, s, 2).gather(_force(g, potential))


def _read_gradient_vjp(
    g: Lattice, potential: tf.Tensor, s: tf.Tensor, dforce: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    corners = _Corners(g, s, 2)
    ds = corners.outside(corners.slope(_force(g, potential), dforce), float("nan"))
    return _force_vjp(g, corners.scatter(dforce)), ds


def _kick(
    g: Lattice,
    field: tf.Tensor,
    s: tf.Tensor,
    v: tf.Tensor,
    factors: tf.Tensor,
) -> tf.Tensor:
    reading = _read if field.shape.rank == 5 else _read_gradient
    return _spread(factors[:, 0]) * v + _spread(factors[:, 1]) * reading(g, field, s)


def _kick_vjp(
    g: Lattice,
    field: tf.Tensor,
    s: tf.Tensor,
    v_after: tf.Tensor,
    dv: tf.Tensor,
    ds: tf.Tensor,
    factors: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    before, by = _spread(factors[:, 0]), _spread(factors[:, 1])
    spectral = field.shape.rank == 5
    force = (_read if spectral else _read_gradient)(g, field, s)
    dfield, more = (_read_vjp if spectral else _read_gradient_vjp)(g, field, s, by * dv)
    v_before = (v_after - by * force) / before
    sums = tf.stack([_sum(dv, v_before), _sum(dv, force)], axis=-1)
    return dfield, ds + more, v_before, sums


def _linear(x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    return x + _spread(factor) * y


def _drift_vjp(
    x_after: tf.Tensor, v: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor, factor: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    by = _spread(factor)
    return x_after - by * v, dv + by * dx, _sum(dx, v)


def _friends(x: tf.Tensor, links: tf.Tensor) -> tf.Tensor:
    places, count = x.numpy() * links.numpy(), x.shape[0]
    pairs = cKDTree(places).query_pairs(1.0, output_type="ndarray")
    joined = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), (count, count))
    groups, group = connected_components(joined, directed=False)
    first = np.full(groups, count, np.int32)
    np.minimum.at(first, group, np.arange(count, dtype=np.int32))
    return tf.constant(first[group], tf.int32)


def _paint_points(
    mesh: tf.Tensor, x: tf.Tensor, weights: tf.Tensor | None, order: int
) -> tf.Tensor:
    sums, at = mesh.numpy().copy(), x.numpy()
    below = np.floor(at + 0.5 * (order == 3))
    first = np.clip(below - (order > 2), 0, np.array(sums.shape) - order).astype(np.int64)
    d = at - below
    e = 1 - d
    shares = {
        2: (e, d),
        3: (0.5 * (0.5 - d) ** 2, 0.75 - d**2, 0.5 * (0.5 + d) ** 2),
        4: (e**3 / 6, (4 - 6 * d**2 + 3 * d**3) / 6, (4 - 6 * e**2 + 3 * e**3) / 6, d**3 / 6),
    }[order]
    for i, j, k in itertools.product(range(order), repeat=3):
        share = shares[i][:, 0] * shares[j][:, 1] * shares[k][:, 2]
        share = share if weights is None else share * weights.numpy()
        cells = np.ravel_multi_index((first + (i, j, k)).T, sums.shape)
        np.add.at(sums.reshape(-1), cells, share)
    return tf.constant(sums)


_KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_paint, _paint_vjp, _read, _read_vjp, _read_gradient, _read_gradient_vjp),
        *(_kick, _kick_vjp, _linear, _drift_vjp),
    )
}


@functools.cache
def _jit(function: Callable[..., Any], lattice: Lattice | None = None) -> Any:
    """Returns a compiled kernel; with a lattice, for all sizes of its cells.

    The first argument is then the sides of a cell.
    """

    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    if lattice is None:
        return compiled(function)
    return compiled(
        lambda cell, **arguments: function(
            dataclasses.replace(lattice, cell=tf.unstack(cell)), **arguments
        )
    )


class Portable(Kernels):
    """The kernels on any device that XLA compiles for.

    Args:
        xla: whether to compile each kernel for its lattice and dtype at the first call. Otherwise
            TensorFlow's operations run one by one.
    """

    name = "portable"

    def __init__(self, xla: bool = True) -> None:
        self._xla = xla

    def _call(
        self, kernel: str, geometry: Lattice | Slabs | Ball | None = None, **arguments: Any
    ) -> Any:
        if isinstance(geometry, (Slabs, Ball)):
            # Not compiled: the slabs and the particles in view differ from call to call.
            paint = portable_sky.paint_vjp if "dout" in arguments else portable_sky.paint
            return paint(geometry, **arguments)
        if kernel == "friends":
            return _friends(**arguments)
        if kernel == "paint_points":
            return _paint_points(**arguments)
        function = _KERNELS[kernel]
        if not self._xla:
            return function(*([] if geometry is None else [geometry]), **arguments)
        if geometry is None:
            return _jit(function)(**arguments)
        cell = tf.stack([cast_float(side, tf.float64) for side in geometry.cell])
        return _jit(function, dataclasses.replace(geometry, cell=()))(cell, **arguments)
