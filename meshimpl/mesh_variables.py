"""The `mtf` variables of a mesh function: each rank has its slice, and none the whole.

Mesh TensorFlow asks TensorFlow for each variable's whole array, its master. A mesh function gives
it a `Master` instead, which has a name and an initialiser and no values.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from meshimpl.collectives import Communicator
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutVariable
from meshimpl.rendezvous import build_together, succeed_together

_GRAPH, _VALUE = "_CHECKPOINTABLE_OBJECT_GRAPH", "VARIABLE_VALUE"  # of TensorFlow's checkpoints
_CHUNK = 2**24
"""Elements that a rank sends at a time."""
_V1 = tf.compat.v1


class Master(NamedTuple):
    """Replaces the whole array of a variable.

    Attributes:
        name: as TensorFlow writes it.
        initializer: called with the whole shape and a dtype.
    """

    name: str
    initializer: Any
    device: str = ""

    @classmethod
    def get(
        cls, getter: Any, name: str, dtype: Any = None, initializer: Any = None, **unused: Any
    ) -> Master:
        """Returns a master in place of a variable: a getter of `tf.compat.v1.get_variable`."""
        del getter, unused
        if initializer is None:  # TensorFlow's own choice
            floating = tf.as_dtype(dtype).is_floating
            initializer = _V1.glorot_uniform_initializer if floating else _V1.zeros_initializer
        return cls(f"{name}:0", initializer() if isinstance(initializer, type) else initializer)


class MeshVariables:
    """The variables of one mesh function.

    Args:
        name: name of the function, for messages.
        impl: layout to which it is lowered.
        variables: variables of its lowering.
    """

    def __init__(
        self, name: str, impl: HvdSimdMeshImpl, variables: Mapping[Any, LaidOutVariable]
    ) -> None:
        self._name, self._impl = name, impl
        self._declared = {variable.name: variable for variable in variables}
        self.slices = {variable.name: slices.slice for variable, slices in variables.items()}
        """This rank's slice of each variable, by name."""

    def initialise(self) -> None:
        """Gives every slice its first value.

        An initialiser that gives all elements the same value makes each slice where it is. Any
        other is called on rank 0 alone, in a graph, and rank 0 sends the others their slices, one
        variable after the other. The eager generators of all ranks stay alike: each gives one
        number, which seeds the graph if `tf.random.set_seed` was called.

        Raises:
            CollectiveError: an initialiser fails on rank 0, where its own exception is raised.
            ValueError: it makes another shape.
        """
        for name, variable in self._declared.items():
            initializer = variable.get_master().initializer
            if _is_constant(initializer):
                shape = self._impl.slice_shape(variable.shape)
                value = initializer(shape, dtype=variable.master_dtype)
                self.slices[name].assign(tf.cast(value, variable.slice_dtype))
            else:
                groups = self._impl.mesh.world.meetings
                activity = f"{self._name}, where variable {name} gets its first value,"
                seed = int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))
                draw = functools.partial(self._first_value, name, seed)
                self._lay_out(name, build_together(groups, activity, draw))

    def _first_value(self, name: str, seed: int) -> tf.Tensor | None:
        """Returns a variable's whole initial value on rank 0."""
        if self._impl.mesh.rank != 0:
            return None
        variable = self._declared[name]
        shape = variable.shape.to_integer_list
        initializer = variable.get_master().initializer
        value = _in_graph(lambda: initializer(shape, dtype=variable.master_dtype), seed)
        value = tf.convert_to_tensor(value)
        if value.shape.as_list() != shape:
            raise ValueError(
                f"the initialiser of {name} makes shape {value.shape.as_list()}, not {shape}"
            )
        return value

    def _lay_out(self, name: str, whole: tf.Tensor | None) -> None:
        """Gives each slice its part of a value that rank 0 holds."""
        variable = self._declared[name]
        value = None if whole is None else tf.cast(whole, variable.slice_dtype).numpy()
        self.slices[name].assign(scatter(self._impl, value, variable.shape, variable.slice_dtype))

    def masters(self) -> dict[str, tf.Variable]:
        """Returns each variable's whole array, gathered on every rank, by name.

        They are the caller's, such as for `tf.train.Checkpoint`; the function keeps slices only.
        """
        masters = {}
        for name, variable in self._declared.items():
            master_slice = tf.cast(self.slices[name], variable.master_dtype)
            whole = self._impl.gather(master_slice, variable.shape)
            masters[name] = tf.Variable(whole, trainable=variable.trainable, name=name)
        return masters

    def take(self, masters: Mapping[str, Any]) -> None:
        """Takes whole arrays, by name, such as a checkpoint was restored to; rank 0's count.

        Raises:
            ValueError: the names differ from those that the variables have, or a shape differs.
        """
        self._check({name: value.shape for name, value in masters.items()}, "given")
        for name in self._declared:
            rank_zero = self._impl.mesh.rank == 0
            self._lay_out(name, tf.convert_to_tensor(masters[name]) if rank_zero else None)

    def _check(self, shapes: Mapping[str, Any], where: str) -> None:
        unlike = set(shapes) ^ set(self._declared)
        if unlike:
            raise ValueError(
                f"the variables of {self._name} are {_listed(self._declared)}; {where} are "
                f"{_listed(shapes)}"
            )
        for name, variable in self._declared.items():
            shape = list(shapes[name])
            if shape != variable.shape.to_integer_list:
                raise ValueError(
                    f"the variable {name} of {self._name} has shape "
                    f"{variable.shape.to_integer_list}; {where} is {shape}"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the files of `tf.train.Checkpoint(**whole arrays).write(path)`, slice by slice.

        Args:
            path: prefix of the files, in a folder that all ranks see.

        Raises:
            CollectiveError: another rank cannot write a file; that rank raises its own exception.
                Parts that were written are removed.
        """
        mesh, parts = self._impl.mesh, Path(f"{path}_parts")
        groups, activity = mesh.world.meetings, f"saving the variables of {self._name}"
        try:
            wrote = succeed_together(groups, activity, lambda: self._write(parts))
            ranks = np.flatnonzero(mesh.world.allgather(tf.constant([wrote])))

            def merge() -> None:
                if mesh.rank == 0:
                    tf.raw_ops.MergeV2Checkpoints(
                        checkpoint_prefixes=[str(parts / str(rank)) for rank in ranks],
                        destination_prefix=str(path),
                        delete_old_dirs=True,
                    )

            succeed_together(groups, f"{activity}, merged", merge)
        except Exception:
            if mesh.rank == 0:
                shutil.rmtree(parts, ignore_errors=True)
            raise

    def _write(self, parts: Path) -> bool:
        """Writes this rank's parts to a file; returns whether there are any."""
        mesh, keys = self._impl.mesh, {name: _key(name) for name in self._declared}
        parts.mkdir(parents=True, exist_ok=True)
        names, specs, values = [], [], []
        if mesh.rank == 0:
            names, specs, values = [_GRAPH], [""], [tf.constant(_object_graph(keys))]
        for name, variable in self._declared.items():
            if any(mesh.coordinates[a] for a in self._impl.replicated_axes(variable.shape)):
                continue  # another rank has the same
            names.append(keys[name])
            specs.append(self._spec(name))
            values.append(tf.cast(self.slices[name], variable.master_dtype))
        if names:
            tf.raw_ops.SaveV2(
                prefix=str(parts / str(mesh.rank)),
                tensor_names=names,
                shape_and_slices=specs,
                tensors=values,
            )
        return bool(names)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Reads this rank's slices from a checkpoint of whole arrays, on any mesh.

        Args:
            path: as given to `save`, or to `tf.train.Checkpoint(**whole arrays).write`.

        Raises:
            ValueError: it is no such checkpoint, or has other variables or shapes.
            CollectiveError: that is so on another rank; nothing has changed.
        """
        activity = f"restoring the variables of {self._name}"
        values = succeed_together(
            self._impl.mesh.world.meetings, activity, lambda: self._read(path)
        )
        for name, value in values.items():
            self.slices[name].assign(value)

    def _read(self, path: str | os.PathLike[str]) -> dict[str, tf.Tensor]:
        """Returns this rank's slices as a checkpoint has them."""
        try:
            reader = tf.train.load_checkpoint(str(path))
            graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
                reader.get_tensor(_GRAPH)
            )
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(f"{path} is no checkpoint that can be read: {error}") from None
        keys = {
            child.local_name: attribute.checkpoint_key
            for child in graph.nodes[0].children
            for attribute in graph.nodes[child.node_id].attributes
            if attribute.name == _VALUE and child.local_name in self._declared
        }
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        self._check({name: shapes[key] for name, key in keys.items()}, f"in {path}")
        values = {}
        for name, key in keys.items():
            (value,) = tf.raw_ops.RestoreV2(
                prefix=str(path),
                tensor_names=[key],
                shape_and_slices=[self._spec(name)],
                dtypes=[dtypes[key]],
            )
            values[name] = tf.cast(value, self._declared[name].slice_dtype)
        return values

    def _spec(self, name: str) -> str:
        """Returns where this rank's slice lies in the whole, as TensorFlow's checkpoints say it."""
        shape = self._declared[name].shape
        sizes = self._impl.slice_shape(shape)
        if sizes == shape.to_integer_list:
            return ""
        begins = self._impl.slice_begin(shape, self._impl.mesh.rank)
        places = [f"{begin},{size}" for begin, size in zip(begins, sizes, strict=True)]
        return f"{' '.join(map(str, shape.to_integer_list))} {':'.join(places)}"


def scatter(
    impl: HvdSimdMeshImpl, whole: np.ndarray | None, shape: Any, dtype: tf.DType
) -> tf.Tensor:
    """Returns each rank's slice of an array that rank 0 has.

    It goes along one axis of the mesh after the other, so that no rank but 0 has more than it sends
    on.

    Args:
        impl: the layout.
        whole: the array on rank 0, None elsewhere.
        shape: `mtf.Shape` of the array.
        dtype: dtype of the array.
    """
    mesh, sizes, block = impl.mesh, shape.to_integer_list, whole
    layout = list(impl.tensor_layout(shape))
    for axis, (name, ranks) in enumerate(mesh.axes):
        if axis in layout:
            sizes[layout.index(axis)] //= ranks
        if ranks == 1 or any(mesh.coordinates[axis + 1 :]):  # these receive along a later axis
            continue
        line = mesh.communicator(name)
        if axis in layout:
            block = _split(line, block, layout.index(axis), sizes, dtype)
        else:
            block = line.broadcast(tf.zeros(sizes, dtype) if block is None else block).numpy()
    return tf.constant(block, dtype)


def _split(
    line: Communicator, block: np.ndarray | None, dimension: int, sizes: list[int], dtype: tf.DType
) -> np.ndarray:
    """Returns the piece of this rank from the first of its line, which has the block."""
    rows: list[np.ndarray] = []
    if line.index == 0 and block is not None:
        rows = [piece.reshape(-1) for piece in np.split(block, line.size, dimension)]
    length, step = math.prod(sizes), max(1, _CHUNK // line.size)
    moved = []
    for begin in range(0, length, step):
        sent = np.concatenate([row[begin : begin + step] for row in rows]) if rows else np.empty(0)
        counts = [min(step, length - begin) if rows else 0] * line.size
        moved.append(line.alltoallv(tf.constant(sent, dtype), tf.constant(counts)).numpy())
    return np.concatenate(moved).reshape(sizes)


def _in_graph(make: Callable[[], Any], seed: int) -> Any:
    """Returns the result of a call in a separate graph, so that it draws no eager random numbers.

    Args:
        make: returns a tensor, or what can become one.
        seed: seed of the graph, if the program has set one.
    """
    values: list[Any] = []

    def made() -> Any:
        graph = _V1.get_default_graph()
        if graph.seed is not None:
            _V1.set_random_seed(seed)
        values.append(make())
        # No constant of the graph, which could not have 2 GiB.
        return values[0] if tf.is_symbolic_tensor(values[0]) else ()

    drawn = _V1.wrap_function(made, [])()
    return drawn if tf.is_symbolic_tensor(values[0]) else values[0]


def _is_constant(initializer: Any) -> bool:
    """Returns whether an initialiser gives all elements one value."""
    same = _V1.zeros_initializer, _V1.ones_initializer, tf.zeros_initializer, tf.ones_initializer
    constant = _V1.constant_initializer, tf.constant_initializer
    return type(initializer) in same or (
        type(initializer) in constant and np.ndim(initializer.value) == 0
    )


def _key(name: str) -> str:
    """Returns the key of a variable's value, as `tf.train.Checkpoint` writes it."""
    return f"{name.replace('.', '..').replace('/', '.S')}/.ATTRIBUTES/{_VALUE}"


def _object_graph(keys: Mapping[str, str]) -> bytes:
    """Returns the object graph of a checkpoint with these variables."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    root = graph.nodes.add()
    for number, (name, key) in enumerate(keys.items(), 1):
        root.children.add(node_id=number, local_name=name)
        graph.nodes.add().attributes.add(name=_VALUE, full_name=name, checkpoint_key=key)
    for node in graph.nodes:
        node.has_checkpoint_values.value = True
    text: bytes = graph.SerializeToString()
    return text


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
