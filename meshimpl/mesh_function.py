"""A function on the mesh: built with Mesh TensorFlow, lowered once, called with eager tensors.

::

    @mesh_function(mesh, "x:row;y:col", density=([("x", 64), ("y", 64), ("z", 64)], tf.float32))
    def mean_square(graph_mesh, density):
        return mtf.reduce_mean(mtf.square(density))

    mean_square(block)          # this rank's block, or the whole array on every rank

Gradients: `tf.GradientTape` sees a mesh function as one operation. `mtf.gradients` makes its
vector-Jacobian product. This product evaluates the function again, with the random values and the
values of variables that the call had. On several ranks the loss is the sum of the parts that the
ranks compute. The gradient on a rank is the derivative of this sum with respect to the tensor on
that rank. Therefore the cotangents of a replicated output are added over its replicas, and each
replica of an input receives a share of the gradient. With these rules mesh functions can be
composed. A parameter that has one value for all ranks must pass through `replicated`, which adds up
the shares. A loss that is itself a replicated output counts once for each rank, unless it is
divided by the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.graph_guards import (
    Stopwatch,
    check_eager,
    last_collective,
    timed,
)
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor
from meshimpl.mesh_graph import MeshGraph, check_place
from meshimpl.mesh_variables import Master, MeshVariables
from meshimpl.process_mesh import ProcessMesh
from meshimpl.tapes import once_differentiable, with_gradient

Spec = tuple[Any, tf.DType]


class LaidOutMesh(mtf.Mesh):
    """The `mtf.Mesh` of a mesh function: it knows the `HvdSimdMeshImpl` it will be lowered to."""

    def __init__(self, graph: Any, impl: HvdSimdMeshImpl) -> None:
        super().__init__(graph, "mesh")
        self.impl = impl


def mesh_function(
    mesh: ProcessMesh, layout: Any, *, seed: int = 0, **inputs: Spec
) -> Callable[[Callable[..., Any]], MeshFunction]:
    """Returns a decorator that makes a `MeshFunction` with these arguments."""
    return lambda build: MeshFunction(build, mesh, layout, inputs, seed=seed)


_keep_shares = False


@contextlib.contextmanager
def shares_of_gradients() -> Iterator[None]:
    """Lets each rank keep its share of the gradients of replicated tensors.

    The caller adds up the shares. The sum is complete even if a parameter did not go through
    `replicated`, and counts nothing twice if it did.
    """
    global _keep_shares
    outer, _keep_shares = _keep_shares, True
    try:
        yield
    finally:
        _keep_shares = outer


def whole_tensor(x: Any) -> tf.Tensor:
    """Returns an input of a mesh function as a TensorFlow tensor.

    For the functions of models that import their data themselves, by `mtf.import_tf_tensor`.

    Args:
        x: mtf tensor that `build` was given, of which no dimension is split.

    Raises:
        ValueError: a dimension is split, so that no rank has the whole tensor.
    """
    for dimension, axis in zip(x.shape, x.mesh.impl.tensor_layout(x.shape), strict=True):
        if axis is not None:
            name = x.mesh.impl.shape[axis].name
            raise ValueError(f"{dimension.name} is split over {name}: no rank has the whole {x}")
    return x.operation._laid_out_tensor.one_slice


def replicated(mesh: ProcessMesh, value: Any) -> tf.Tensor:
    """Returns a tensor that is the same on every rank, such as a cosmological parameter.

    The function is the identity. Its gradient is summed over all ranks, so each rank receives the
    complete gradient, except within `shares_of_gradients`.
    """
    if _keep_shares:
        return tf.identity(value)

    @tf.custom_gradient
    def shared(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda dy: mesh.world.allreduce(dy)

    return shared(tf.convert_to_tensor(value))


class MeshFunction:
    """A lowered Mesh TensorFlow graph with eager inputs and outputs.

    Args:
        build: a function `build(graph_mesh, *inputs)` that gets mtf tensors and returns one or
            several. If it assigns to `mtf` variables, each call makes these assignments.
        mesh: mesh of ranks.
        layout: which tensor dimension is split over which mesh axis, as for `HvdSimdMeshImpl`.
        inputs: name -> (shape of the whole tensor as `mtf.Shape` or pairs, dtype).
        seed: seed of random operations.
        stopwatch: measures the time that the collectives take.

    Raises:
        ValueError: a dimension is not divisible by the size of its mesh axis, or the layout names
            an axis that the mesh does not have.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        mesh: ProcessMesh,
        layout: Any,
        inputs: Mapping[str, Spec],
        *,
        seed: int = 0,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._build, self._stopwatch = build, stopwatch
        self.mesh = mesh
        self.impl = HvdSimdMeshImpl(mesh, layout, seed)
        self.inputs = {name: (_shape(s), tf.as_dtype(d)) for name, (s, d) in inputs.items()}
        for name, (shape, _) in self.inputs.items():
            check_divisible(shape, self.impl, name)
        self.output_shapes: list[Any] = []
        self._variables: dict[str, tf.Variable] = {}
        self._differentiable = with_gradient(self._forward_and_gradient)
        self.__name__ = getattr(build, "__name__", "mesh function")
        self.__doc__ = build.__doc__

    def _signature(self, specs: Sequence[Spec]) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(self.impl.slice_shape(shape), dtype) for shape, dtype in specs]

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> Any:
        """Returns the one variable of a name, for all graphs of this function.

        Which are trained is Mesh TensorFlow's business: a tape need not watch them.
        """
        name = kwargs["name"]
        if name not in self._variables:
            self._variables[name] = next_creator(**{**kwargs, "trainable": False})
        return self._variables[name]

    @contextlib.contextmanager
    def _lowering(self) -> Iterator[None]:
        """The context in which the graphs of this function are built."""
        without_masters = tf.compat.v1.variable_scope(
            "", custom_getter=Master.get, auxiliary_name_scope=False
        )
        with tf.variable_creator_scope(self._create_variable), without_masters:
            with timed(self._stopwatch):
                yield

    def _built(self, slices: Sequence[tf.Tensor]) -> tuple[Any, list[Any], list[Any], bool]:
        graph = mtf.Graph()
        graph_mesh = LaidOutMesh(graph, self.impl)
        args = [
            mtf.import_laid_out_tensor(graph_mesh, LaidOutTensor([x]), shape, name=name)
            for x, (name, (shape, _)) in zip(slices, self.inputs.items(), strict=True)
        ]
        result = self._build(graph_mesh, *args)
        single = isinstance(result, mtf.Tensor)
        # `mtf.gradients` loses a cotangent of a tensor that is returned twice.
        outputs = [mtf.identity(t) for t in ([result] if single else result)]
        return graph_mesh, args, outputs, single

    def _fetch(self, lowering: Any, tensors: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        slices = [lowering.tensors[t].to_laid_out_tensor().one_slice for t in tensors]
        last = last_collective()
        with tf.control_dependencies([*after, *([] if last is None else [last])]):
            return [tf.identity(s) for s in slices]

    def _lowered(self, slices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Lowers the function into the graph under construction; returns its outputs."""
        self.impl.begin_build()
        with self._lowering():
            graph_mesh, _, outputs, self._single = self._built(slices)
            lowering = mtf.Lowering(graph_mesh.graph, {graph_mesh: self.impl}, autostack=False)
        self.output_shapes = [t.shape for t in outputs]
        self.output_dtypes = [t.dtype for t in outputs]
        self._declared = lowering.variables
        return self._fetch(lowering, outputs, list(lowering.operations.values()))

    @functools.cached_property
    def _forward(self) -> MeshGraph:
        def trace(*slices: tf.Tensor) -> list[tf.Tensor]:
            fetched = self._lowered(slices)
            graph = tf.compat.v1.get_default_graph()
            readings = {k: x for k, x in self.impl.readings.items() if x.graph is graph}
            self._readings = {k: tf.TensorSpec(x.shape, x.dtype) for k, x in readings.items()}
            return [*fetched, *map(tf.identity, readings.values())]

        signature = self._signature(list(self.inputs.values()))
        function = MeshGraph(trace, self.mesh, signature, self.__name__)
        if self._declared:
            self._mesh_variables.initialise()
        return function

    @functools.cached_property
    def _differentiated(self) -> list[int]:
        return [i for i, (_, dtype) in enumerate(self.inputs.values()) if dtype.is_floating]

    @property
    def _floating_outputs(self) -> list[int]:
        return [i for i, dtype in enumerate(self.output_dtypes) if dtype.is_floating]

    @functools.cached_property
    def _vjp(self) -> Callable[..., list[tf.Tensor]]:
        specs, of = list(self.inputs.values()), self._floating_outputs

        def trace(*tensors: tf.Tensor) -> list[tf.Tensor]:
            count = len(specs) + len(of)
            self.impl.begin_build(dict(zip(self._readings, tensors[count:], strict=True)))
            with self._lowering():
                graph_mesh, args, outputs, _ = self._built(tensors[: len(specs)])
                cotangents = []
                for i, dy in zip(of, tensors[len(specs) : count], strict=True):
                    shape = self.output_shapes[i]
                    replicas = self.impl.replicated_axes(shape)
                    total = self.impl.allreduce(LaidOutTensor([dy]), replicas, "SUM")
                    cotangents.append(
                        mtf.import_laid_out_tensor(graph_mesh, total, shape, name="cotangent")
                    )
                wrt = self._differentiated
                gradients = mtf.gradients(
                    [outputs[i] for i in of], [args[i] for i in wrt], cotangents
                )
                gradients = [
                    mtf.zeros_like(args[i]) if g is None else g * self._share(specs[i][0])
                    for i, g in zip(wrt, gradients, strict=True)
                ]
                lowering = mtf.Lowering(graph_mesh.graph, {graph_mesh: self.impl}, autostack=False)
            return self._fetch(lowering, gradients, [])

        signature = self._signature(
            specs + [(self.output_shapes[i], self.output_dtypes[i]) for i in of]
        ) + list(self._readings.values())
        name = f"gradient of {self.__name__}"
        in_words = f"the gradient of the mesh function {self.__name__}"
        graph = MeshGraph(trace, self.mesh, signature, name, in_words)
        if self._declared:  # what assigns to them was lowered again, and is left out
            graph.without_assignments(len(signature))
        return once_differentiable(graph, f"the mesh function {self.__name__}")

    def _share(self, shape: Any) -> float:
        """One over the number of replicas of a tensor."""
        return 1 / math.prod(self.impl.shape[a].size for a in self.impl.replicated_axes(shape))

    def _forward_and_gradient(self, *slices: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
        # The lowered function itself is hidden from the tape, which would differentiate through the
        # collectives.
        hidden = [tf.stop_gradient(x) for x in slices]
        # A mesh of one rank calls its own graph from within another.
        is_eager = tf.executing_eagerly()
        is_part = not (is_eager or self.mesh.size == 1)
        results = self._part_of_a_graph(hidden) if is_part else self._forward(*hidden)
        outputs, readings = results[: len(self.output_shapes)], results[len(self.output_shapes) :]

        def gradient(*dys: tf.Tensor) -> Any:
            if is_part:
                raise LookupError(f"{self.__name__}: a part of a program has no gradient")
            if is_eager:
                check_eager(f"the gradient of the mesh function {self.__name__}")
            cotangents = [dys[i] for i in self._floating_outputs]
            slopes = self._vjp(*slices, *cotangents, *readings)
            by_number = dict(zip(self._differentiated, slopes, strict=True))
            return [by_number.get(i) for i in range(len(slices))]

        return outputs, gradient

    def _part_of_a_graph(self, slices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        outputs = self._lowered(slices)
        if self._declared or self.impl.readings:
            raise RuntimeError(
                f"the mesh function {self.__name__} has variables or random values: call it "
                "eagerly, not within a graph"
            )
        return outputs

    def block_of(self, name: str, value: Any) -> tf.Tensor:
        """Returns this rank's block of an input, given as the block or as the whole array.

        Raises:
            ValueError: the value has neither of these two shapes, or another dtype.
        """
        shape, dtype = self.inputs[name]
        try:
            return block_of(self.impl, name, value, shape, dtype)
        except ValueError as error:
            raise ValueError(f"{self.__name__}: {error}") from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the function.

        Args:
            *args, **kwargs: the inputs, by place or by name; each is this rank's block (a tensor or
                an array) or the whole array.

        Returns:
            This rank's block of the output, or a tuple of them.

        Raises:
            CollectiveError: raised at the first call, if another rank could not build the function,
                or if the ranks built different collectives.
            RuntimeError: it is called inside a `tf.function`, and the job has several ranks.
        """
        check_place(f"the mesh function {self.__name__}", self.mesh)
        names = list(self.inputs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or set(arguments) != set(names):
            raise TypeError(
                f"{self.__name__} takes {', '.join(names) or 'nothing'}; got {len(args)} by place "
                f"and {', '.join(kwargs) or 'none'} by name"
            )
        slices = [self.block_of(name, arguments[name]) for name in names]
        outputs = self._differentiable(*slices)
        return outputs[0] if self._single else tuple(outputs)

    def gather(self, block: Any, output: int = 0) -> np.ndarray:
        """Returns the whole array of output number `output`, on every rank, from all blocks."""
        self._forward  # noqa: B018  (the output shapes are known once it is lowered)
        return self.impl.gather(tf.convert_to_tensor(block), self.output_shapes[output]).numpy()

    @functools.cached_property
    def _mesh_variables(self) -> MeshVariables:
        return MeshVariables(self.__name__, self.impl, self._declared)

    @property
    def variables(self) -> MeshVariables:
        """This rank's slices of the `mtf` variables; they can be saved and restored."""
        self._forward  # noqa: B018
        return self._mesh_variables


def _shape(shape: Any) -> Any:
    if isinstance(shape, mtf.Shape):
        return shape
    return mtf.Shape([mtf.Dimension(name, size) for name, size in shape])


def block_of(
    impl: HvdSimdMeshImpl, name: str, value: Any, shape: Any, dtype: tf.DType
) -> tf.Tensor:
    """Returns this rank's block of a tensor given as the block or as the whole array.

    Args:
        impl: the layout.
        name: name of the tensor, for messages.
        value: tensor or array; only the block is read from a memory-mapped file.
        shape: `mtf.Shape` of the whole tensor.
        dtype: required dtype; an array is converted.

    Raises:
        ValueError: the value has neither the shape of the block nor of the whole array, or it is a
            tensor of another dtype.
    """
    block, whole = impl.slice_shape(shape), shape.to_integer_list
    tensor = isinstance(value, (tf.Tensor, tf.Variable))
    value = value if tensor else np.asanyarray(value)
    value_shape = list(value.shape)
    if value_shape == whole and whole != block:
        begin = impl.slice_begin(shape, impl.mesh.rank)
        value = value[tuple(slice(b, b + n) for b, n in zip(begin, block, strict=True))]
    elif value_shape != block:
        raise ValueError(
            f"{name} has shape {value_shape}; this rank's block is {block} and the whole array "
            f"{whole}"
        )
    if not tensor:
        value = np.asarray(value, dtype=dtype.as_numpy_dtype)
    value = tf.convert_to_tensor(value)
    if value.dtype != dtype:
        raise ValueError(f"{name} is {value.dtype.name}, it must be {dtype.name}: use tf.cast")
    return value


def check_divisible(shape: Any, impl: HvdSimdMeshImpl, name: str = "tensor") -> None:
    """Raises a `ValueError` that names a dimension which its mesh axis does not divide."""
    for dimension, axis in zip(shape, impl.tensor_layout(shape), strict=True):
        if axis is not None and dimension.size % impl.shape[axis].size:
            raise ValueError(
                f"{name}: dimension {dimension.name}={dimension.size} does not divide by the mesh "
                f"axis {impl.shape[axis].name}:{impl.shape[axis].size}"
            )
