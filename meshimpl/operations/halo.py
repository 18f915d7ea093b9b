"""Halo exchange and its adjoint, the halo reduce.

The exchange extends a block [nx, ny, ...] to [before + nx + after, ...] by its neighbours' planes.
Corners are included, because y is exchanged after x. The reduce sends every halo plane back to its
owner and adds it there, y before x. The box is periodic, or zero beyond its edges. A halo wider
than a block takes several hops. Each hop along an axis is one message for both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import tensorflow as tf

from meshimpl.collectives import Communicator
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl
from meshimpl.operations.local import on_blocks

SUFFIX = "_halo"
EDGES = ("periodic", "zero")

Edges = Literal["periodic", "zero"]
Widths = Mapping[str, int | tuple[int, int]]
"""Dimension name -> planes on both sides, or (before, after)."""


def _both(width: int | tuple[int, int]) -> tuple[int, int]:
    return (width, width) if isinstance(width, int) else width


def _planes(x: tf.Tensor, axis: int, begin: int, size: int) -> tf.Tensor:
    start = [0] * x.shape.rank
    length = x.shape.as_list()
    start[axis], length[axis] = begin, size
    return tf.slice(x, start, length)


def _hops(width: int, block: int) -> Iterator[tuple[int, int]]:
    """Yields (distance, planes) of each hop of a halo of `width` over blocks of `block` planes."""
    for distance in range(1, -(-width // block) + 1):
        yield distance, min(block, width - (distance - 1) * block)


def _exchanged(
    first: tf.Tensor, last: tf.Tensor, distance: int, group: Communicator, edges: Edges, half: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the planes from `distance` blocks away, or zeros beyond an edge of the box."""
    from_previous, from_next = group.exchange_neighbours(first, last, distance, half=half)
    if edges == "periodic":
        return from_previous, from_next
    place = group.per_rank(range(group.size))
    zeros = tf.zeros_like(from_previous)
    return (
        tf.where(place >= distance, from_previous, zeros),
        tf.where(place + distance < group.size, from_next, zeros),
    )


def pad_axis(
    x: tf.Tensor,
    axis: int,
    widths: tuple[int, int],
    group: Communicator,
    edges: Edges,
    half: bool = False,
) -> tf.Tensor:
    """Returns a block with its neighbours' planes on both sides along one axis.

    Args:
        x: this rank's block.
        axis: the axis of the block.
        widths: the number of planes before and after it.
        group: the line of ranks along which the axis is split.
        edges: "periodic", or "zero" beyond the edges of the box.
        half: whether the planes travel as float16, see `Communicator.exchange_neighbours`.
    """
    before, after = widths
    if group.size == 1 and edges == "zero":
        # Not tf.pad: in float32 TensorFlow on CPUs merges it wrongly with the convolution after it.
        shape = [size if i != axis else 1 for i, size in enumerate(x.shape)]
        plane = tf.zeros(shape, x.dtype)
        return tf.concat([*[plane] * before, x, *[plane] * after], axis)
    block, widest = x.shape[axis], max(widths)
    left: list[tf.Tensor] = []
    right: list[tf.Tensor] = []
    for distance, planes in _hops(widest, block):
        first = _planes(x, axis, 0, planes)
        last = _planes(x, axis, block - planes, planes)
        from_previous, from_next = _exchanged(first, last, distance, group, edges, half)
        done = (distance - 1) * block
        lower, upper = (max(0, min(planes, width - done)) for width in widths)
        left.insert(0, _planes(from_previous, axis, planes - lower, lower))
        right.append(_planes(from_next, axis, 0, upper))
    return tf.concat([*left, x, *right], axis)


def fold_axis(
    x: tf.Tensor,
    axis: int,
    widths: tuple[int, int],
    group: Communicator,
    edges: Edges,
    half: bool = False,
) -> tf.Tensor:
    """Adds the halo planes to the blocks that own them: the adjoint of `pad_axis`."""
    before, after = widths
    block, widest = x.shape[axis] - before - after, max(widths)
    if group.size == 1 and edges == "zero":
        return _planes(x, axis, before, block)
    left = _with_zeros(_planes(x, axis, 0, before), axis, widest - before, 0)
    right = _with_zeros(_planes(x, axis, before + block, after), axis, 0, widest - after)
    for distance, planes in _hops(widest, block):
        done = (distance - 1) * block
        to_previous = _planes(left, axis, widest - done - planes, planes)
        to_next = _planes(right, axis, done, planes)
        arrived = _exchanged(to_previous, to_next, distance, group, edges, half)
        x, before = _with_edges_added(x, axis, before, block, *arrived), 0
    return x


def _with_zeros(x: tf.Tensor, axis: int, before: int, after: int) -> tf.Tensor:
    if before == after == 0:
        return x
    paddings = [[0, 0] for _ in x.shape]
    paddings[axis] = [before, after]
    return tf.pad(x, paddings)


def _with_edges_added(
    x: tf.Tensor, axis: int, begin: int, block: int, first: tf.Tensor, last: tf.Tensor
) -> tf.Tensor:
    """Returns the block that begins at a plane of `x`, with planes added at both of its edges."""
    planes = first.shape[axis]
    if 2 * planes <= block:
        start = _planes(x, axis, begin, planes) + first
        middle = _planes(x, axis, begin + planes, block - 2 * planes)
        end = _planes(x, axis, begin + block - planes, planes) + last
        return tf.concat([start, middle, end], axis)
    core = _planes(x, axis, begin, block)
    core += _with_zeros(first, axis, 0, block - planes)
    return core + _with_zeros(last, axis, block - planes, 0)


def padded_shape(shape: Any, widths: Widths, impl: HvdSimdMeshImpl) -> Any:
    """Returns the shape whose blocks have halos around the blocks of `shape`; `<name>_halo`."""
    for name, width in widths.items():
        if name not in shape.dimension_names:
            raise ValueError(f"halo of {name!r}: the tensor's dimensions are {shape}")
        if min(_both(width)) < 0:
            raise ValueError(f"halo of {name!r} is {width}; it must not be negative")
    dims = []
    for dim in shape:
        if dim.name in widths:
            ranks = impl.ranks_over(dim)
            size = dim.size + sum(_both(widths[dim.name])) * ranks.size
            wide = mtf.Dimension(dim.name + SUFFIX, size)
            if ranks.size > 1 and impl.ranks_over(wide) != ranks:
                axis = impl.tensor_dimension_to_mesh_axis(dim)
                raise ValueError(
                    f"the layout must split {wide.name} over {impl.shape[axis].name}, as it splits "
                    f"{dim.name}"
                )
            dim = wide
        dims.append(dim)
    return mtf.Shape(dims)


def _moved(x: Any, shape: Any, widths: Widths, edges: Edges, half: bool, reduce: bool) -> Any:
    """Returns the halo exchange of a tensor, or its adjoint, in one message a hop and axis."""
    if edges not in EDGES:
        raise ValueError(f"edges {edges!r} is not one of {', '.join(map(repr, EDGES))}")
    plain = shape if reduce else x.shape

    def lower(impl: HvdSimdMeshImpl, block: tf.Tensor) -> tf.Tensor:
        axes = [
            (i, _both(widths[dim.name]), impl.ranks_over(dim))
            for i, dim in enumerate(plain)
            if any(_both(widths.get(dim.name, 0)))
        ]
        change = fold_axis if reduce else pad_axis
        for axis, width, ranks in reversed(axes) if reduce else axes:
            block = change(block, axis, width, ranks, edges, half)
        return block

    def gradient(_: list[Any], cotangents: list[Any]) -> list[Any]:
        return [_moved(cotangents[0], x.shape, widths, edges, half, not reduce)]

    name = "halo_reduce" if reduce else "halo_exchange"
    return on_blocks(lower, [x], [(shape, x.dtype)], adjoint=gradient, name=name)[0]


def halo_exchange(x: Any, widths: Widths, edges: Edges = "periodic", *, half: bool = False) -> Any:
    """Returns a tensor whose blocks have their neighbours' planes around them.

    Args:
        x: mtf tensor of a mesh function.
        widths: the widths of the halo; 0 only renames the dimension.
        edges: "periodic", or "zero" beyond the edges of the box.
        half: whether planes, also in the adjoint, travel as float16 (x is float32), see
            `Communicator.alltoall`.

    Returns:
        mtf tensor whose named dimensions are called `<name>_halo`, of size n + (before + after)
        blocks. The layout must split them as it splits the dimensions without halo.

    Raises:
        ValueError: if there is no such dimension, a width is negative, or the layout does not fit.
    """
    return _moved(x, padded_shape(x.shape, widths, x.mesh.impl), widths, edges, half, reduce=False)


def halo_reduce(
    x: Any, shape: Any, widths: Widths, edges: Edges = "periodic", *, half: bool = False
) -> Any:
    """Adds every halo plane to the cells it is a copy of: the adjoint of `halo_exchange`.

    Args:
        x: mtf tensor with halos.
        shape: the `mtf.Shape` without halos, as the input of `halo_exchange` has it.
        widths, edges, half: as for `halo_exchange`.

    Raises:
        ValueError: if `x` does not have the shape of the result of the exchange.
    """
    expected = padded_shape(shape, widths, x.mesh.impl)
    if x.shape != expected:
        raise ValueError(f"halo_reduce: expected a tensor of {expected}, got {x.shape}")
    return _moved(x, shape, widths, edges, half, reduce=True)
