"""Cloud-in-cell paint and read of particles that stay with the rank of their Lagrangian cell.

A particle of lattice cell i at displacement s lies at i + s / cell. A rank's particles are painted
on its block with a halo around it, which is then added to the neighbours' blocks; fields are read
from a block with halo. An axis that is not split has no halo and wraps around in place.

These kernels are portable: compiled by XLA on CPUs and GPUs. A particle beyond the halo would be
lost, so `reach` is checked before every paint by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.fields import Box
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.halo import halo_exchange, halo_reduce, padded_shape

Corner = tuple[tf.Tensor, tf.Tensor]


def halo_widths(box: Box, halo: int) -> dict[str, int]:
    """Planes of halo along x and y: none where the axis is not split."""
    return {name: halo if ranks > 1 else 0 for name, ranks in box.split.items()}


def _corners(displacement: tf.Tensor, box: Box, widths: Mapping[str, int]) -> list[list[Corner]]:
    """For each axis, the two planes a particle touches in the padded block, and their weights."""
    result = []
    for axis, (name, cells) in enumerate(zip("xyz", box.block, strict=True)):
        width = widths.get(name, 0)
        lattice = tf.range(cells, dtype=tf.int32) + width
        lattice = tf.reshape(lattice, [-1 if i == axis else 1 for i in range(3)])
        offset = displacement[..., axis] / tf.constant(box.cell[axis], displacement.dtype)
        lower = tf.floor(offset)
        weight = offset - lower
        plane = lattice + tf.cast(lower, tf.int32)
        split = box.split.get(name, 1) > 1
        planes = [plane, plane + 1] if split else [plane % cells, (plane + 1) % cells]
        result.append([(planes[0], 1 - weight), (planes[1], weight)])
    return result


def _cells_and_weights(
    displacement: tf.Tensor, box: Box, widths: Mapping[str, int]
) -> list[Corner]:
    """The eight cells of the padded block that a particle touches, and their weights."""
    _, ny, nz = _padded_block(box, widths)
    x, y, z = _corners(displacement, box, widths)
    return [
        ((ix * ny + iy) * nz + iz, wx * wy * wz) for ix, wx in x for iy, wy in y for iz, wz in z
    ]


def _padded_block(box: Box, widths: Mapping[str, int]) -> tuple[int, int, int]:
    x, y, z = (n + 2 * widths.get(d, 0) for d, n in zip("xyz", box.block, strict=True))
    if x * y * z >= 2**31:
        raise ValueError(
            f"a rank's block with its halo is {x} x {y} x {z} cells, more than 32-bit indices can "
            "number; use more ranks"
        )
    return x, y, z


def paint(displacement: Any, box: Box, halo: int) -> Any:
    """Cloud-in-cell density of unit particles.

    Args:
        displacement: mtf tensor [x, y, z, component] [Mpc/h].
        box: grid, size and ranks.
        halo: planes; every |displacement| along a split axis must be below it [cells].

    Returns:
        mtf tensor [x, y, z], mean 1.
    """
    widths = halo_widths(box, halo)
    padded = padded_shape(box.shape, widths, box.impl)
    block = _padded_block(box, widths)

    @tf.function(jit_compile=True)
    def local(s: tf.Tensor) -> tf.Tensor:
        density = tf.zeros([block[0] * block[1] * block[2]], s.dtype)
        for cell, weight in _cells_and_weights(s, box, widths):
            indices = tf.reshape(cell, [-1, 1])
            density = tf.tensor_scatter_nd_add(density, indices, tf.reshape(weight, [-1]))
        return tf.reshape(density, block)

    painted = mtf.slicewise(
        local,
        [displacement],
        output_shape=padded,
        splittable_dims=padded.dims + displacement.shape.dims,
        name="paint",
    )
    return halo_reduce(painted, box.shape, widths)


def _read_cells(rows: tf.Tensor, s: tf.Tensor, box: Box, widths: Mapping[str, int]) -> tf.Tensor:
    """Cloud-in-cell mean of [cell, component] rows at the particles."""
    total = tf.zeros_like(s)
    for cell, weight in _cells_and_weights(s, box, widths):
        total += tf.gather(rows, cell) * weight[..., tf.newaxis]
    return total


def read_vector(vector: Any, displacement: Any, box: Box, halo: int) -> Any:
    """Cloud-in-cell values of a vector field at the particles.

    Args:
        vector: mtf tensor [x, y, z, component].
        displacement: mtf tensor [x, y, z, component] [Mpc/h].
        box, halo: as for `paint`.

    Returns:
        mtf tensor [x, y, z, component].
    """
    widths = halo_widths(box, halo)

    @tf.function(jit_compile=True)
    def local(padded: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        return _read_cells(tf.reshape(padded, [-1, 3]), s, box, widths)

    return _slicewise_read(local, vector, displacement, widths)


def read_gradient(potential: Any, displacement: Any, box: Box, halo: int) -> Any:
    """Minus the 4-point finite-difference gradient of a potential, read at the particles.

    (8 (f_+1 - f_-1) - (f_+2 - f_-2)) / (12 h), whose symbol is i (8 sin kh - sin 2kh) / (6h)
    (Feng and others 2016). Differenced on the padded block: one field is exchanged, with two more
    planes.

    Args:
        potential: mtf tensor [x, y, z].
        displacement, box, halo: as for `paint`.

    Returns:
        mtf tensor [x, y, z, component], per [Mpc/h].
    """
    widths = halo_widths(box, halo)
    wider = {name: width + 2 if width else 0 for name, width in widths.items()}

    @tf.function(jit_compile=True)
    def local(padded: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        margins = [2 if wider.get(name, 0) else 0 for name in "xyz"]
        parts = [
            _difference(padded, axis, margins) / tf.constant(-12 * box.cell[axis], s.dtype)
            for axis in range(3)
        ]
        return _read_cells(tf.reshape(tf.stack(parts, axis=-1), [-1, 3]), s, box, widths)

    return _slicewise_read(local, potential, displacement, wider)


def _difference(padded: tf.Tensor, axis: int, margins: list[int]) -> tf.Tensor:
    """8 (f_+1 - f_-1) - (f_+2 - f_-2) along an axis; margins are cut off, or wrapped where 0."""
    inner = [n - 2 * m for n, m in zip(padded.shape, margins, strict=True)]

    def shifted(cells: int) -> tf.Tensor:
        begin = list(margins)
        if margins[axis]:
            begin[axis] += cells
            return tf.slice(padded, begin, inner)
        return tf.roll(tf.slice(padded, begin, inner), -cells, axis)

    return 8 * (shifted(1) - shifted(-1)) - (shifted(2) - shifted(-2))


def _slicewise_read(local: Any, field: Any, displacement: Any, widths: Mapping[str, int]) -> Any:
    padded = halo_exchange(field, widths)
    return mtf.slicewise(
        local,
        [padded, displacement],
        output_shape=displacement.shape,
        output_dtype=displacement.dtype,
        splittable_dims=padded.shape.dims + displacement.shape.dims,
        name="read",
    )


def _reach_function(box: Box) -> MeshFunction:
    """`f(displacement)`: largest |displacement| along x, y and z over all ranks [cells], [3].

    NaN, wherever it is, comes out as infinity.
    """
    axes = mtf.Shape([mtf.Dimension("axis", 3)])

    @tf.function(jit_compile=True)
    def local(s: tf.Tensor) -> tf.Tensor:
        cells = tf.abs(s) / tf.constant(box.cell, s.dtype)
        infinite = tf.constant(float("inf"), s.dtype)
        largest = tf.where(tf.math.is_nan(cells), infinite, cells)
        return tf.reduce_max(largest, axis=[0, 1, 2])

    def build(graph_mesh: Any, displacement: Any) -> Any:
        impl = graph_mesh.impl
        names = [d.name for d in displacement.shape.dims[:2]]
        own = mtf.Shape([mtf.Dimension(n, box.split[n]) for n in names] + axes.dims)

        def each(s: tf.Tensor) -> tf.Tensor:
            return tf.reshape(local(s), impl.slice_shape(own))

        maxima = mtf.slicewise(
            each,
            [displacement],
            output_shape=own,
            splittable_dims=own.dims + displacement.shape.dims[:2],
            grad_function=0,
        )
        return mtf.reduce_max(maxima, output_shape=axes)

    return box.function(build, displacement=box.vector_shape)


class Reach:
    """How far particles stray from their lattice sites along the axes that are split.

    Args:
        box: grid, size and ranks.
    """

    def __init__(self, box: Box) -> None:
        self._function = _reach_function(box)
        self._split = [box.split.get(name, 1) > 1 for name in "xyz"]

    def __call__(self, displacement: tf.Tensor) -> float:
        """Largest |displacement| along a split axis, over all ranks [cells].

        Infinite where any component of any displacement is not finite; 0 where nothing is split.
        """
        along = self._function(tf.stop_gradient(displacement)).numpy()
        if not np.isfinite(along).all():
            return math.inf
        return float(max(along[self._split], default=0.0))
