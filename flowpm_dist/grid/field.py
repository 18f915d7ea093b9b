"""Fields that live on a box: each rank holds its block."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, check_same_box
from flowpm_dist.grid.options import Scheme
from flowpm_dist.options import in_unit, keep_in_units
from flowpm_dist.options.html import as_html
from meshimpl.graph_guards import check_eager
from meshimpl.mesh_function import block_of
from meshimpl.process_mesh import ProcessMesh

_NO_MEAN = 1e-6
"""If the mean divided by the root mean square is smaller, it is rounding: not a density."""


Method = Callable[["Field", Any], "Field"]


def _both_ways(
    operation: Callable[[Any, Any], Any], kept: tuple[bool, bool, bool] = (True, True, False)
) -> tuple[Method, Method]:
    """Returns the operators of a field with another operand, which is on its right or its left.

    Args:
        operation: a function of two numbers.
        kept: whether the result keeps the painting window, in three cases: the other operand is a
            number on the right, a number on the left, or a field with the same window.
    """
    right, left, of_fields = kept
    return (
        lambda field, other: field._with(operation, other, right, of_fields),
        lambda field, other: field._with(lambda a, b: operation(b, a), other, left, of_fields),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Field:
    """A scalar or vector field: this rank's block of it, and the box it lives in.

    `+ - * / **` work cell by cell, without communication, and gradients flow to both operands. The
    other operand is a field of the same box, where a scalar field acts on each component of a
    vector. It can also be a number, one number for each universe of this rank's batch, or three
    components for a vector field. An array or tensor holds either the whole field or this rank's
    block. The result has the field's dtype.

    `numpy.asarray(field)` and numpy's functions gather the whole array on every rank, so all ranks
    must call them. TensorFlow's functions work on `field.block`. Fields are compared and hashed by
    identity.

    Attributes:
        block: tensor of shape [..., nx/row, ny/col, nz] or, for a vector, [..., 3].
        box: grid, size and ranks.
        window: the scheme by which the field was painted, "cic", "tsc" or "pcs"; spectra divide its
            window out. Sums of such fields keep it, and products with numbers; other results have
            none.
    """

    block: tf.Tensor
    box: Box
    window: Scheme | None = None

    __array_priority__ = 100  # so that numpy leaves `array * field` to the field

    def __post_init__(self) -> None:
        if not isinstance(self.block, tf.Tensor):
            keep_in_units(self, block="")
        space = self.box.local_batch + self.box.block
        shape = tuple(self.block.shape)
        if shape[: len(space)] != space or len(shape) > len(space) + 1:
            raise ValueError(
                f"a block of shape {shape} does not fit the box, whose blocks are {space}"
            )

    @property
    def _trailing(self) -> tuple[int, ...]:
        return tuple(self.block.shape[len(self.box.local_batch) + 3 :])

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        batch = () if self.box.batch is None else (self.box.batch,)
        return batch + self.box.grid + self._trailing

    @property
    def offset(self) -> tuple[int, ...]:
        """The first index of the block in the whole array, along each axis."""
        batch = () if self.box.batch is None else (self.box.batch_offset,)
        return batch + self.box.offset + (0,) * len(self._trailing)

    @property
    def mesh(self) -> ProcessMesh:
        """The ranks."""
        return self.box.mesh

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the values."""
        return self.block.dtype

    def on(self, box: Box) -> Field:
        """Returns this field in the layout and the precision of another box.

        Only real numbers are rounded. Where the layouts differ, cells move between ranks. All ranks
        must call this together. Differentiable.

        Args:
            box: a box with the same grid and batch, on a mesh of the same ranks, of any size.

        Raises:
            ValueError: the box has another grid, batch or set of ranks.
        """
        here = self.box
        kinds = [(b.grid, b.batch, b.mesh.world.ranks) for b in (here, box)]
        if kinds[0] != kinds[1]:
            described = (
                f"grid {b.grid}, {'one universe' if b.batch is None else f'a batch of {b.batch}'}, "
                f"mesh {b.mesh} of the ranks {', '.join(map(str, b.mesh.world.ranks))}"
                for b in (here, box)
            )
            raise ValueError("a field of {} cannot be laid out as {}".format(*described))
        block = _moved(self.block, here, box)
        if block.dtype.is_floating:
            block = tf.cast(block, box.dtype)
        return Field(block, box, self.window)

    def numpy(self) -> np.ndarray:
        """The whole array, gathered on every rank; the grid must fit into one rank's memory."""
        return self.box.whole(self.block, self._whole_shape)

    def delta(self) -> Field:
        """Returns the overdensity of a density or of counts, field / mean - 1 [1], differentiable.

        Each universe is divided by its own mean. All ranks must call this together.

        Raises:
            ValueError: a vector field, or a field whose mean is not above 0, such as an
                overdensity.
        """
        if self._trailing:
            raise ValueError("the overdensity of a vector field: a scalar field is needed")
        check_eager("Field.delta")
        cells = float(self.box.cells)
        mean = _total(self.block, self.box) / cells
        square = _total(tf.stop_gradient(self.block) ** 2, self.box) / cells
        if not np.all(mean > _NO_MEAN * np.sqrt(square)):
            raise ValueError(
                f"the overdensity of a field whose mean is {mean.numpy()}: a density or counts, "
                "with a mean above 0, are needed"
            )
        return self / mean - 1.0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the whole array of a Field is gathered: it cannot be had uncopied")
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"Field({'vector, ' if self._trailing else ''}{self.box})"

    def _repr_html_(self) -> str:
        kind = "vector" if self._trailing else "scalar"
        return as_html(self, lambda: {"kind": kind, **self.box.facts(), "window": self.window})

    __add__, __radd__ = _both_ways(operator.add, (True, True, True))
    __sub__, __rsub__ = _both_ways(operator.sub, (True, True, True))
    __mul__, __rmul__ = _both_ways(operator.mul)
    __truediv__, __rtruediv__ = _both_ways(operator.truediv, (True, False, False))
    __pow__, __rpow__ = _both_ways(operator.pow, (False, False, False))

    def __neg__(self) -> Field:
        return Field(-self.block, self.box, self.window)

    @property
    def _whole_shape(self) -> Any:
        return self.box.vector_shape if self._trailing else self.box.shape

    def _with(
        self, operation: Callable[[Any, Any], Any], other: Any, by_number: bool, by_field: bool
    ) -> Field:
        """Returns the field of an operation, cell by cell, with another operand.

        Args:
            operation: of this field's and the other's values.
            other: the other operand.
            by_number, by_field: whether the result has this field's window, if the other operand is
                a number, or a field of the same window.

        Raises:
            ValueError: the operands do not fit together.
        """
        if isinstance(other, Field):
            check_same_box(self.box, other.box, "the two fields")
            operands = self.block, tf.cast(other.block, self.dtype)
            if len(self._trailing) != len(other._trailing):
                fields = zip(operands, (self, other), strict=True)
                operands = tuple(b if f._trailing else b[..., tf.newaxis] for b, f in fields)
            window = self.window if by_field and other.window == self.window else None
            return Field(operation(*operands), self.box, window)
        operand = self._operand(other)
        if operand is NotImplemented:
            return NotImplemented
        cells = operand.shape[len(self.box.local_batch) :].num_elements()
        window = self.window if by_number and cells <= len("xyz") else None
        return Field(operation(self.block, operand), self.box, window)

    def _operand(self, value: Any) -> Any:
        """Returns an operand that is no field as a tensor that broadcasts to the block.

        Returns:
            NotImplemented if the operand is neither a number nor an array of numbers.

        Raises:
            ValueError: it has none of the shapes that `Field` names.
        """
        if not isinstance(value, (tf.Tensor, tf.Variable)):
            value = np.asarray(in_unit("operand", value))
            if value.dtype.kind not in "biuf":
                return NotImplemented
        elif not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
            return NotImplemented
        shape, batch = tuple(value.shape), self.box.local_batch
        per_universe, per_component = shape == batch, shape == self._trailing
        if per_universe and per_component and shape:
            raise ValueError(
                f"shape {shape} may be one number for each universe or for each component: combine "
                "it with field.block, in a shape that says which"
            )
        if shape == () or per_component:
            return tf.cast(value, self.dtype)
        if per_universe:
            ones = [1] * (3 + len(self._trailing))
            return tf.reshape(tf.cast(value, self.dtype), [*shape, *ones])
        if isinstance(value, np.ndarray):
            value = value.astype(self.dtype.as_numpy_dtype)
        else:
            value = tf.cast(value, self.dtype)
        return block_of(self.box.impl, "the other operand", value, self._whole_shape, self.dtype)


def project(field: Field, cells: int) -> np.ndarray | None:
    """Returns the mean of a field over the first `cells` layers of z. All ranks call it together.

    Each rank averages its own block, so that ranks send maps only.

    Args:
        field: [nx, ny, nz].
        cells: thickness of the slab, from 1 to nz.

    Returns:
        [nx, ny], float64, on rank 0; None on the others.

    Raises:
        ValueError: the field has fewer layers than `cells`, or `cells` is below 1.
    """
    if not 1 <= cells <= field.grid[2]:
        raise ValueError(f"a slab of {cells} cells; the field has {field.grid[2]} along z")
    part = np.asarray(field.block[:, :, :cells], dtype=np.float64).mean(axis=2)
    parts = field.mesh.gather_to_root(part)
    places = field.mesh.gather_to_root(np.asarray(field.offset[:2], dtype=np.int64))
    if parts is None or places is None:
        return None
    whole = np.empty(tuple(field.grid[:2]))
    for (x, y), values in zip(places, parts, strict=True):
        whole[x : x + values.shape[0], y : y + values.shape[1]] = values
    return whole


def _no_tensor(value: Field, *_: Any, **__: Any) -> Any:
    raise TypeError(
        "a Field is not a tensor: take field.block, this rank's part, or field.numpy(), the whole"
    )


# Else TensorFlow would take the whole array, gathered and without a gradient.
tf.register_tensor_conversion_function(Field, _no_tensor)


def _total(block: tf.Tensor, box: Box) -> tf.Tensor:
    """Returns the sum over the cells of each universe, float64 [...], differentiable."""
    ranks = box.mesh.communicator(*(name for name in box.mesh.names if name != "replica"))

    @tf.custom_gradient
    def over_ranks(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return ranks.allreduce(x), lambda dy: ranks.allreduce(dy)

    along_z = tf.cast(tf.reduce_sum(block, axis=-1), tf.float64)
    return over_ranks(tf.reduce_sum(along_z, axis=[-2, -1]))


def _moved(block: tf.Tensor, source: Box, target: Box) -> tf.Tensor:
    """Returns this rank's block in the target's layout, from all ranks' blocks in the source's."""
    ranks = range(source.mesh.size)
    before, after = ([box.place_of(r) for r in ranks] for box in (source, target))
    if before == after:
        return tf.convert_to_tensor(block)
    target.check_equal("a field on another mesh", its_mesh=str(source.mesh))
    me = source.mesh.rank

    @tf.custom_gradient
    def move(block: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        values = block.numpy()
        sent = [values[_common(before[me], place, before[me])].ravel() for place in after]
        counts = tf.constant([piece.size for piece in sent], tf.int32)
        arrived = source.mesh.world.alltoallv(tf.constant(np.concatenate(sent)), counts).numpy()
        trailing = values.shape[len(before[me]) :]
        moved = np.empty([*(s.stop - s.start for s in after[me]), *trailing], values.dtype)
        for place in before:
            cells = _common(place, after[me], after[me])
            piece = moved[cells]
            moved[cells] = arrived[: piece.size].reshape(piece.shape)
            arrived = arrived[piece.size :]
        return tf.constant(moved), lambda dy: _moved(dy, target, source)

    return move(block)


def _common(
    one: tuple[slice, ...], other: tuple[slice, ...], origin: tuple[slice, ...]
) -> tuple[slice, ...]:
    """Returns the cells that two places share, counted from the first cell of `origin`."""
    begins = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    ends = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(
        slice(b - o.start, max(b, e) - o.start)
        for b, e, o in zip(begins, ends, origin, strict=True)
    )
