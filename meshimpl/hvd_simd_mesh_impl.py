"""`HvdSimdMeshImpl`: Mesh TensorFlow's mesh contract on the ranks of a `ProcessMesh`.

Every rank lowers the same graph and holds one slice of each tensor. Values that differ between
ranks enter the graph through a fence (see `meshimpl.graph_guards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import philox
from meshimpl.collectives import Communicator
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence, separate_chain
from meshimpl.process_mesh import ProcessMesh

_REDUCTIONS = {"SUM": "sum", "MAX": "max", "MIN": "min"}


class LaidOutTensor:
    """This rank's slice of a laid-out tensor."""

    def __init__(self, tensor_list: Sequence[tf.Tensor]) -> None:
        (self.one_slice,) = tensor_list

    @classmethod
    def from_tensor_list(cls, tensor_list: Sequence[tf.Tensor]) -> LaidOutTensor:
        """The inverse of `tensor_list`."""
        return cls(tensor_list)

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The slices in this process: one."""
        return [self.one_slice]

    all_slices = tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """Static shape of the slice."""
        return self.one_slice.shape.as_list()

    def to_laid_out_tensor(self) -> LaidOutTensor:
        """Itself."""
        return self

    def __repr__(self) -> str:
        return f"LaidOutTensor({self.one_slice})"


Slice = LaidOutTensor
"""The same class under a name that the attribute of `HvdSimdMeshImpl` does not hide."""


class LaidOutVariable:
    """This rank's slice of a variable, and the operations that copy it to and from the master.

    The master is the whole array, on every rank. Checkpoints hold the master, so a checkpoint of
    one mesh can be restored on any other. The initialiser sets the first values of the master and
    may draw other values on each rank. Copying the master to the slices therefore takes the values
    of rank 0. Copying the slices to the master gathers them on every rank.
    """

    def __init__(self, variable: Any, mesh_impl: HvdSimdMeshImpl) -> None:
        self._variable, self._mesh_impl = variable, mesh_impl
        shape = variable.shape
        slice_shape = mesh_impl.slice_shape(shape)
        # Created as the master was, by the graph's own rules: mesh functions lift variables out.
        self.slice = tf.compat.v1.Variable(
            lambda: tf.zeros(slice_shape, variable.slice_dtype),
            trainable=variable.trainable,
            dtype=variable.slice_dtype,
            name=variable.name + "_slice",
            use_resource=True,
        )
        value = mesh_impl.remember(f"variable {variable.name}", lambda: tf.identity(self.slice))
        self._laid_out_tensor = LaidOutTensor([value])

    @property
    def copy_master_to_slices(self) -> Any:
        """A new operation in the current graph: copies the master to the slices."""
        variable, impl = self._variable, self._mesh_impl
        with separate_chain():
            master = impl.mesh.world.broadcast(tf.identity(variable.get_master()))
            mine = impl.slice(tf.cast(master, variable.slice_dtype), variable.shape).one_slice
            to_slice = self.slice.assign(mine, read_value=False)
            return tf.group(variable.assign_to_master(master), to_slice)

    @property
    def copy_slices_to_master(self) -> Any:
        """A new operation in the current graph: copies the slices to the master."""
        variable = self._variable
        with separate_chain():
            value = tf.cast(tf.identity(self.slice), variable.master_dtype)
            return variable.assign_to_master(self._mesh_impl.gather(value, variable.shape))

    @property
    def laid_out_tensor(self) -> LaidOutTensor:
        """The value of this rank's slice."""
        return self._laid_out_tensor

    def assign_to_slices(
        self,
        assign_fn: Callable[..., Any],
        values: Sequence[tf.Tensor],
        assign_to_tensor_list: Sequence[Any] | None = None,
    ) -> Any:
        """Applies `assign_fn(mtf variable, slice variable, value)` to this rank's slice.

        Whatever else the graph computes from the variable uses its value before the assignment.
        """
        (target,) = assign_to_tensor_list or [self.slice]
        (value,) = values
        with tf.control_dependencies([self._laid_out_tensor.one_slice]):
            return assign_fn(self._variable, target, value)


class HvdSimdMeshImpl(mtf.MeshImpl):
    """Single program, multiple data: one slice on each rank, messages by Horovod process sets.

    Args:
        mesh: the ranks.
        layout: which tensor dimension is split over which mesh axis, such as `"x:row;y:col"`, in
            any form that `mtf.convert_to_layout_rules` takes.
        seed: the seed of all values that `random` draws.

    Raises:
        ValueError: the layout names an axis that the mesh does not have.
    """

    LaidOutTensor = LaidOutTensor
    LaidOutVariable = LaidOutVariable

    def __init__(self, mesh: ProcessMesh, layout: Any = "", seed: int = 0) -> None:
        shape = mtf.Shape([mtf.Dimension(name, size) for name, size in mesh.axes])
        super().__init__(shape, layout)
        self.mesh = mesh
        unknown = sorted({axis for _, axis in self.layout_rules._pairs} - set(mesh.names))
        if unknown:
            raise ValueError(
                f"the layout {layout!r} names the mesh axis {unknown[0]!r}, but the mesh is {mesh}"
            )
        self._seed = seed
        self._random_calls: list[tf.Variable] = []
        self.begin_build()

    def begin_build(self, remembered: Mapping[str, tf.Tensor] | None = None) -> None:
        """Prepares for lowering a new graph.

        Args:
            remembered: the values (`readings`) that an evaluation of a graph with the same
                operations has read. The new graph uses these values instead of reading new ones. So
                it differentiates exactly that evaluation.
        """
        self._random_operations = 0
        self._remembered = remembered or {}
        self.readings: dict[str, tf.Tensor] = {}
        """What the graph reads of the state that evaluations change: the values of variables, and
        how often each random operation was evaluated."""

    def remember(self, name: str, read: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the value remembered under this name, or else the result of `read()`."""
        value = self._remembered[name] if name in self._remembered else read()
        graph = tf.compat.v1.get_default_graph()
        if graph._get_control_flow_context() is None:  # what a loop reads has no single value
            self.readings[name] = value
        return value

    def _random_stream(self) -> tuple[int, tf.Tensor]:
        """Returns the number of a random operation and the number of its evaluation."""
        number = self._random_operations
        self._random_operations += 1
        if number == len(self._random_calls):
            with tf.init_scope():
                # A mesh function keeps one variable for each name.
                calls = tf.Variable(
                    0, dtype=tf.int64, trainable=False, name=f"random_calls_{number}"
                )
            self._random_calls.append(calls)
        calls = self._random_calls[number]

        def count() -> tf.Tensor:
            return tf.identity(calls.assign_add(1))

        return number, self.remember(f"random operation {number}", count)

    def _axes(self, mesh_axes: Sequence[int]) -> Communicator:
        return self.mesh.communicator(*[self.mesh.names[axis] for axis in mesh_axes])

    def slicewise(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Applies `fn` to this rank's slices; see `mtf.MeshImpl.slicewise`."""
        converted = mtf.convert_args_to_laid_out_tensors(inputs)
        result = fn(*[x.one_slice if isinstance(x, LaidOutTensor) else x for x in converted])
        if isinstance(result, tuple):
            return tuple(LaidOutTensor([tf.convert_to_tensor(t)]) for t in result)
        return LaidOutTensor([tf.convert_to_tensor(result)])

    def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> Any:
        """Reduce by `"SUM"`, `"MAX"` or `"MIN"` over any number of mesh axes, in one message."""
        if reduction_fn_string not in _REDUCTIONS:
            raise ValueError(
                f"reduction {reduction_fn_string!r} is not one of {', '.join(_REDUCTIONS)}"
            )
        if not mesh_axes:
            return x
        value = x.to_laid_out_tensor().one_slice
        reduction = _REDUCTIONS[reduction_fn_string]
        return LaidOutTensor([self._axes(mesh_axes).allreduce(value, reduction)])

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int, stack: bool = False) -> Any:
        """Joins the slices of a mesh axis along a tensor axis (a new one with `stack`)."""
        value = x.to_laid_out_tensor().one_slice
        gathered = self._axes([mesh_axis]).allgather(value, axis=concat_axis, stack=stack)
        return LaidOutTensor([gathered])

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> Any:
        """Splits each slice along a tensor axis, exchanges the pieces, joins them along another."""
        value = x.to_laid_out_tensor().one_slice
        group = self._axes([mesh_axis])
        if group.size == 1:
            return LaidOutTensor([value])
        pieces = tf.stack(tf.split(value, group.size, axis=split_axis))
        moved = tf.unstack(group.alltoall(pieces))
        return LaidOutTensor([tf.concat(moved, axis=concat_axis)])

    def receive(self, x: Any, mesh_axis: int, source_pcoord: Sequence[int | None]) -> Any:
        """In each line, place k receives from place `source_pcoord[k]`, or zeros if it is None."""
        value = x.to_laid_out_tensor().one_slice
        return LaidOutTensor([self._axes([mesh_axis]).permute(value, source_pcoord)])

    def laid_out_pnum(self) -> Slice:
        """Returns the rank, an int32 scalar."""
        return LaidOutTensor([fence(tf.constant(self.mesh.rank, tf.int32))])

    def laid_out_pcoord(self, mesh_axis: int) -> Slice:
        """Returns the coordinate along a mesh axis, an int32 scalar."""
        return LaidOutTensor([fence(tf.constant(self.mesh.coordinates[mesh_axis], tf.int32))])

    def slice_begin_tensor(self, tensor_shape: Any) -> tf.Tensor:
        """Returns the first indices of this rank's slice, int32 [ndims], behind a fence."""
        begin = np.array(self.slice_begin(tensor_shape, self.mesh.rank), np.int32)
        return fence(tf.constant(begin, tf.int32, shape=[tensor_shape.ndims]))

    def slice(self, tf_tensor: tf.Tensor, tensor_shape: Any) -> Slice:
        """Returns this rank's slice of a whole tensor."""
        if self.tensor_layout(tensor_shape).is_fully_replicated:
            return LaidOutTensor([tf_tensor])
        size = self.slice_shape(tensor_shape)
        return LaidOutTensor([tf.slice(tf_tensor, self.slice_begin_tensor(tensor_shape), size)])

    def gather(self, tf_slice: tf.Tensor, tensor_shape: Any) -> tf.Tensor:
        """Returns the whole tensor, on every rank, from the ranks' slices."""
        for tensor_axis, mesh_axis in enumerate(self.tensor_layout(tensor_shape)):
            if mesh_axis is not None:
                tf_slice = self._axes([mesh_axis]).allgather(tf_slice, axis=tensor_axis)
        return tf_slice

    def import_tf_tensor(self, x: Any, tf_x: tf.Tensor) -> Slice:
        """Lay out a tensor that is whole and the same on every rank."""
        return self.slice(tf_x, x.shape)

    def export_to_tf_tensor(self, x: Any, laid_out_x: Any) -> tf.Tensor:
        """Returns the whole tensor, on every rank; split dimensions are gathered."""
        return self.gather(laid_out_x.to_laid_out_tensor().one_slice, x.shape)

    def ranks_over(self, tensor_dimension: Any) -> Communicator:
        """Returns the ranks over which a dimension is split; this rank alone if it is whole."""
        axis = self.tensor_dimension_to_mesh_axis(tensor_dimension)
        return self._axes([] if axis is None else [axis])

    def replicated_axes(self, tensor_shape: Any) -> list[int]:
        """Returns the mesh axes along which all slices of a tensor of this shape are equal."""
        split = set(self.tensor_layout(tensor_shape))
        return [axis for axis in range(self.ndims) if axis not in split]

    def Print(self, x: Any, data: Sequence[Any], message: str, **kwargs: Any) -> Any:
        """Prints the slices of `data`, with the rank, when `x` is computed.

        Args:
            x, data, message: as for `mtf.Print`.
            **kwargs: `summarize` and `first_n` as for `tf.compat.v1.Print`.
        """
        text = f"[rank {self.mesh.rank}/{self.mesh.size}] {message}"
        return self.slicewise(
            lambda value, *rest: tf.compat.v1.Print(value, list(rest), text, **kwargs), x, *data
        )

    def random(self, shape: Any, tf_fn: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Draws random values that depend on the place in the tensor, but not on mesh or layout.

        Each evaluation draws new values. The key of a value has four parts: the seed of this mesh,
        the number of the random operation on this mesh, the number of the evaluation, and the place
        of the element.

        Args:
            shape: shape of the whole tensor.
            tf_fn: `tf.random.uniform`, `tf.random.normal` or `tf.random.truncated_normal`.
            kwargs: arguments of that function, without a seed.

        Raises:
            NotImplementedError: another distribution.
        """
        number, stream = self._random_stream()
        size = self.slice_shape(shape)
        begin = tf.unstack(self.slice_begin_tensor(shape), num=shape.ndims)
        index = philox.global_index(shape.to_integer_list, begin, size)
        seed = (self._seed << 20) + number
        return LaidOutTensor([philox.draw(tf_fn, index, stream, seed, **kwargs)])
