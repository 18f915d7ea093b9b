"""Periodic halo exchange and its adjoint, the halo reduce.

A block [nx, ny, ...] becomes [nx + 2 hx, ny + 2 hy, ...]: its neighbours' planes around it, corners
included, because y is exchanged after x was. The reduce sends every halo plane back to its owner
and adds it there, y before x. A halo may be wider than a block: it then takes as many hops as it
needs. Each hop and axis is one message that carries both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from meshimpl.collectives import Communicator
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor

SUFFIX = "_halo"


def _planes(x: tf.Tensor, axis: int, begin: int, size: int) -> tf.Tensor:
    start = [0] * x.shape.rank
    length = x.shape.as_list()
    start[axis], length[axis] = begin, size
    return tf.slice(x, start, length)


def _hops(width: int, block: int) -> Iterator[tuple[int, int]]:
    """(distance, planes) of each hop that a halo of `width` takes over blocks of `block` planes."""
    for distance in range(1, -(-width // block) + 1):
        yield distance, min(block, width - (distance - 1) * block)


def pad_axis(x: tf.Tensor, axis: int, width: int, group: Communicator) -> tf.Tensor:
    """`width` planes of the neighbours along one axis, on both sides.

    Args:
        x: this rank's block.
        axis: of the block.
        width: planes.
        group: the line of ranks along which the axis is split.
    """
    block = x.shape[axis]
    left: list[tf.Tensor] = []
    right: list[tf.Tensor] = []
    for distance, planes in _hops(width, block):
        first = _planes(x, axis, 0, planes)
        last = _planes(x, axis, block - planes, planes)
        from_previous, from_next = group.exchange_neighbours(first, last, distance)
        left.insert(0, from_previous)
        right.append(from_next)
    return tf.concat([*left, x, *right], axis)


def fold_axis(x: tf.Tensor, axis: int, width: int, group: Communicator) -> tf.Tensor:
    """The adjoint of `pad_axis`: add the halo planes to the blocks that own them."""
    block = x.shape[axis] - 2 * width
    core = _planes(x, axis, width, block)
    for distance, planes in _hops(width, block):
        inner = width - (distance - 1) * block
        to_previous = _planes(x, axis, inner - planes, planes)
        to_next = _planes(x, axis, width + block * distance, planes)
        from_previous, from_next = group.exchange_neighbours(to_previous, to_next, distance)
        core = _add_at_edges(core, axis, from_previous, from_next)
    return core


def _add_at_edges(x: tf.Tensor, axis: int, first: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    block, planes = x.shape[axis], first.shape[axis]
    if 2 * planes <= block:
        middle = _planes(x, axis, planes, block - 2 * planes)
        start = _planes(x, axis, 0, planes) + first
        end = _planes(x, axis, block - planes, planes) + last
        return tf.concat([start, middle, end], axis)
    rest = [[0, 0] for _ in x.shape]
    rest[axis] = [0, block - planes]
    x = x + tf.pad(first, rest)
    rest[axis] = [block - planes, 0]
    return x + tf.pad(last, rest)


def padded_shape(shape: Any, widths: Mapping[str, int], impl: HvdSimdMeshImpl) -> Any:
    """The shape whose blocks are those of `shape` with halos; names gain the suffix `_halo`."""
    dims = []
    for dim in shape:
        if dim.name in widths:
            axis = impl.tensor_dimension_to_mesh_axis(dim)
            blocks = 1 if axis is None else impl.shape[axis].size
            wide = mtf.Dimension(dim.name + SUFFIX, dim.size + 2 * widths[dim.name] * blocks)
            if blocks > 1 and impl.tensor_dimension_to_mesh_axis(wide) != axis:
                raise ValueError(
                    f"the layout must split {wide.name} over {impl.shape[axis].name}, as it splits "
                    f"{dim.name}"
                )
            dim = wide
        dims.append(dim)
    return mtf.Shape(dims)


class HaloOperation(mtf.Operation):
    """Halo exchange, or with `reduce` its adjoint."""

    def __init__(
        self, x: Any, shape: Any, widths: Mapping[str, int], reduce: bool, name: str | None = None
    ) -> None:
        super().__init__([x], name=name or ("halo_reduce" if reduce else "halo_exchange"))
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]
        self._widths, self._reduce = dict(widths), reduce

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """The other of the two."""
        shape = self.inputs[0].shape
        return [HaloOperation(grad_ys[0], shape, self._widths, not self._reduce).outputs[0]]

    def lower(self, lowering: Any) -> None:
        """One message a hop and axis."""
        impl = lowering.mesh_impl(self)
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        plain = (self.outputs if self._reduce else self.inputs)[0].shape
        axes = [
            (i, self._widths[dim.name], impl.tensor_dimension_to_mesh_axis(dim))
            for i, dim in enumerate(plain)
            if self._widths.get(dim.name, 0)
        ]
        change = fold_axis if self._reduce else pad_axis
        for axis, width, mesh_axis in reversed(axes) if self._reduce else axes:
            names = [] if mesh_axis is None else [impl.mesh.names[mesh_axis]]
            value = change(value, axis, width, impl.mesh.communicator(*names))
        lowering.set_tensor_lowering(self.outputs[0], LaidOutTensor([value]))


def _check_widths(widths: Mapping[str, int], shape: Any) -> None:
    for name, width in widths.items():
        if name not in shape.dimension_names:
            raise ValueError(f"halo of {name!r}: the tensor's dimensions are {shape}")
        if width < 0:
            raise ValueError(f"halo of {name!r} is {width}; it must not be negative")


def halo_exchange(x: Any, widths: Mapping[str, int], name: str | None = None) -> Any:
    """Each block with its neighbours' planes around it, periodic.

    Args:
        x: mtf tensor of a mesh function.
        widths: dimension name -> planes on each side; 0 only renames the dimension.
        name: of the operation.

    Returns:
        mtf tensor whose named dimensions are called `<name>_halo`, of size n + 2 width * blocks;
        the layout must split them as it splits the dimensions without halo.

    Raises:
        ValueError: no such dimension, a negative width, or a layout that does not fit.
    """
    _check_widths(widths, x.shape)
    shape = padded_shape(x.shape, widths, x.mesh.impl)
    return HaloOperation(x, shape, widths, False, name).outputs[0]


def halo_reduce(x: Any, shape: Any, widths: Mapping[str, int], name: str | None = None) -> Any:
    """Add every halo plane to the cell it stands for: the adjoint of `halo_exchange`.

    Args:
        x: mtf tensor with halos.
        shape: `mtf.Shape` without them, as it was given to `halo_exchange`.
        widths: as there.
        name: of the operation.

    Raises:
        ValueError: `x` does not have the shape that the exchange would give.
    """
    _check_widths(widths, shape)
    expected = padded_shape(shape, widths, x.mesh.impl)
    if x.shape != expected:
        raise ValueError(f"halo_reduce: expected a tensor of {expected}, got {x.shape}")
    return HaloOperation(x, shape, widths, True, name).outputs[0]
