"""Operations that each rank carries out on its own blocks, with explicit adjoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor

Adjoint = Callable[[list[Any], list[Any]], list[Any]]
"""A function from (inputs, cotangents of the outputs) to the cotangents of the inputs.

They are mtf tensors or None. An output that nothing depends on has the cotangent None.
"""


class LocalOperation(mtf.Operation):
    """An operation that applies `function` to this rank's blocks."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        outputs: Sequence[tuple[Any, tf.DType]],
        adjoint: Adjoint | None,
        name: str,
    ) -> None:
        super().__init__(list(inputs), name=name)
        self._outputs = [mtf.Tensor(self, shape, dtype) for shape, dtype in outputs]
        self._function, self._adjoint = function, adjoint

    @property
    def has_gradient(self) -> bool:
        """Whether an adjoint was given."""
        return self._adjoint is not None

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """Returns the cotangents of the inputs, from the adjoint that was given."""
        assert self._adjoint is not None
        return self._adjoint(self.inputs, grad_ys)

    def lower(self, lowering: Any) -> None:
        """Lowers to the function itself, without communication."""
        impl = lowering.mesh_impl(self)
        blocks = [lowering.tensors[x].to_laid_out_tensor().one_slice for x in self.inputs]
        results = self._function(*blocks)
        results = results if isinstance(results, (tuple, list)) else [results]
        for output, result in zip(self.outputs, results, strict=True):
            block = tf.reshape(result, impl.slice_shape(output.shape))
            lowering.set_tensor_lowering(output, LaidOutTensor([block]))


def local(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[tuple[Any, tf.DType]],
    *,
    adjoint: Adjoint | None = None,
    name: str = "local",
) -> list[Any]:
    """Applies a TensorFlow function to each rank's blocks.

    Args:
        function: a function from blocks to one block or several, with as many elements as those of
            the outputs.
        inputs: mtf tensors.
        outputs: the shape and the dtype of each result.
        adjoint: the adjoint; without it, the operation has no gradient.
        name: the name of the operation.

    Returns:
        mtf tensors.
    """
    return list(LocalOperation(function, inputs, outputs, adjoint, name).outputs)


class LayerGradientOperation(mtf.Operation):
    """The vector-Jacobian product of a layer, for every floating input.

    If an input is whole where the layer's work is split, such as a kernel, its product is a sum
    over those ranks. The sum is left as a `mtf.LazyAllreduceSum`, so that several can be reduced in
    one message.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        shape: Any,
        cotangent: Any,
        name: str,
    ) -> None:
        super().__init__([*inputs, cotangent], name=name)
        self._function, self._shape = function, shape
        self._wrt = [i for i, x in enumerate(inputs) if x.dtype.is_floating]
        self._outputs = [mtf.Tensor(self, inputs[i].shape, inputs[i].dtype) for i in self._wrt]

    @property
    def has_gradient(self) -> bool:
        """False: there are first derivatives only."""
        return False

    def lower(self, lowering: Any) -> None:
        """Lowers to the products of this rank; sums over ranks stay lazy."""
        impl = lowering.mesh_impl(self)
        *blocks, cotangent = (
            lowering.tensors[x].to_laid_out_tensor().one_slice for x in self.inputs
        )
        wrt = [blocks[i] for i in self._wrt]
        with tf.GradientTape() as tape:
            tape.watch(wrt)
            result = self._function(*blocks)
        cotangent = tf.reshape(cotangent, result.shape)
        worked = _split_axes([self._shape], impl)
        for output, g in zip(self.outputs, tape.gradient(result, wrt, cotangent), strict=True):
            block = LaidOutTensor([tf.reshape(g, impl.slice_shape(output.shape))])
            axes = sorted(worked - _split_axes([output.shape], impl))
            lowered = mtf.LazyAllreduceSum(impl, block, axes) if axes else block
            lowering.set_tensor_lowering(output, lowered)


def _split_axes(shapes: Sequence[Any], impl: HvdSimdMeshImpl) -> set[int]:
    """Returns the mesh axes over which any dimension of any of the shapes is split."""
    layouts = [impl.tensor_layout(shape) for shape in shapes]
    sizes = [dim.size for dim in impl.shape]
    return {a for layout in layouts for a in layout if a is not None and sizes[a] > 1}


def layer(function: Callable[..., Any], inputs: Sequence[Any], shape: Any, *, name: str) -> Any:
    """Applies a differentiable function to each rank's blocks, such as a layer of a network.

    Args:
        function: a function from blocks to one block, without communication, which TensorFlow
            differentiates. The gradient computes intermediate values again, unless TensorFlow
            recognises them as the same.
        inputs: mtf tensors. A mesh axis that splits one of them must also split the result. Other
            inputs, such as kernels, may be whole along it.
        shape: the `mtf.Shape` of the result, which has the first input's dtype.
        name: the name of the operation.

    Raises:
        ValueError: if an input is split over a mesh axis and the result is not.
    """
    impl = inputs[0].mesh.impl
    lost = _split_axes([x.shape for x in inputs], impl) - _split_axes([shape], impl)
    if lost:
        axes = ", ".join(impl.shape[a].name for a in sorted(lost))
        raise ValueError(f"{name}: an input is split over {axes}, but the result {shape} is not")

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        (dy,) = cotangents
        operation = LayerGradientOperation(function, inputs, shape, dy, f"{name}_gradient")
        found = iter(operation.outputs)
        return [next(found) if x.dtype.is_floating else None for x in inputs]

    return local(function, inputs, [(shape, inputs[0].dtype)], adjoint=adjoint, name=name)[0]


class TogetherOperation(mtf.Operation):
    """An operation that carries out pending sums of tensors over ranks, in few messages."""

    def __init__(self, tensors: Sequence[Any], largest: int, name: str | None = None) -> None:
        super().__init__(list(tensors), name=name or "together")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype) for x in tensors]
        self._largest = largest

    def lower(self, lowering: Any) -> None:
        """Lowers to one message for all small tensors with the same ranks and dtype.

        The last of the large tensors is sent first: it is that of the last layer, whose gradient is
        known while those of the others are still being computed.
        """
        impl = lowering.mesh_impl(self)
        groups: dict[Any, list[tuple[Any, tf.Tensor]]] = {}
        for x, output in reversed(list(zip(self.inputs, self.outputs, strict=True))):
            lowered = lowering.tensors[x]
            small = x.shape.size * x.dtype.size <= self._largest
            if small and isinstance(lowered, mtf.LazyAllreduceSum) and not lowered._reduced:
                key = tuple(lowered.mesh_axes), x.dtype
                block = lowered.laid_out_input.one_slice
                groups.setdefault(key, []).append((output, block))
            else:
                lowering.set_tensor_lowering(output, lowered.to_laid_out_tensor())
        for (axes, _), members in groups.items():
            flat = tf.concat([tf.reshape(block, [-1]) for _, block in members], axis=0)
            total = impl.allreduce(LaidOutTensor([flat]), axes, "SUM").one_slice
            sizes = [block.shape.num_elements() for _, block in members]
            for (output, block), part in zip(members, tf.split(total, sizes), strict=True):
                whole = LaidOutTensor([tf.reshape(part, block.shape)])
                lowering.set_tensor_lowering(output, whole)


def together(tensors: Sequence[Any], largest: int = 2**20) -> list[Any]:
    """Returns the same tensors with pending sums over ranks carried out, small ones together.

    Args:
        tensors: mtf tensors, such as the gradients of all weights.
        largest: the size up to which a tensor is sent together with others [bytes].
    """
    return list(TogetherOperation(tensors, largest).outputs)


class MaximumOperation(mtf.Operation):
    """The maximum over all ranks, element by element, of a block that differs between ranks."""

    def __init__(self, x: Any, name: str | None = None) -> None:
        super().__init__([x], name=name or "maximum_over_ranks")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    @property
    def has_gradient(self) -> bool:
        """False: the maximum is used in checks only."""
        return False

    def lower(self, lowering: Any) -> None:
        """Lowers to one small allreduce."""
        impl = lowering.mesh_impl(self)
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        largest = impl.mesh.world.allreduce(value, "max")
        lowering.set_tensor_lowering(self.outputs[0], LaidOutTensor([largest]))


def maximum_over_ranks(x: Any) -> Any:
    """Returns the maximum over all ranks, element by element, whatever the layout of `x`."""
    return MaximumOperation(x).outputs[0]
