"""Operations that each rank carries out on its own blocks, with an adjoint given beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor

Adjoint = Callable[[list[Any], list[Any]], list[Any]]
"""(inputs, cotangents of the outputs) to cotangents of the inputs; mtf tensors, or None.

An output that nothing depends on has the cotangent None.
"""


class LocalOperation(mtf.Operation):
    """`function` of this rank's blocks."""

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
        """The adjoint that was given."""
        assert self._adjoint is not None
        return self._adjoint(self.inputs, grad_ys)

    def lower(self, lowering: Any) -> None:
        """No communication."""
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
    """Apply a TensorFlow function to each rank's blocks.

    Args:
        function: blocks to one block, or several, of as many elements as the outputs' have.
        inputs: mtf tensors.
        outputs: shape and dtype of each result.
        adjoint: without it, no gradient passes.
        name: of the operation.

    Returns:
        mtf tensors.
    """
    return list(LocalOperation(function, inputs, outputs, adjoint, name).outputs)


class LayerGradientOperation(mtf.Operation):
    """The vector-Jacobian product of a layer, for every floating input.

    That of an input which is whole where the layer's work is split, such as a kernel, is a sum over
    those ranks. It is left as a `mtf.LazyAllreduceSum`, so that several may travel together.
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
        """First derivatives only."""
        return False

    def lower(self, lowering: Any) -> None:
        """No communication yet."""
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
    """The mesh axes over which some dimension of some of the shapes is split."""
    layouts = [impl.tensor_layout(shape) for shape in shapes]
    sizes = [dim.size for dim in impl.shape]
    return {a for layout in layouts for a in layout if a is not None and sizes[a] > 1}


def layer(function: Callable[..., Any], inputs: Sequence[Any], shape: Any, *, name: str) -> Any:
    """A differentiable function of each rank's blocks, such as a layer of a network.

    Args:
        function: blocks to one block, without communication. TensorFlow differentiates it; where
            the gradient needs what the function computes on the way, that is computed again, unless
            TensorFlow sees that it has it.
        inputs: mtf tensors. A mesh axis over which one of them is split must split the result, too;
            others may be whole there, as kernels are.
        shape: `mtf.Shape` of the result, of the first input's dtype.
        name: of the operation.

    Raises:
        ValueError: an input is split over a mesh axis and the result is not.
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
    """Tensors that still have to be added over ranks, added in few messages."""

    def __init__(self, tensors: Sequence[Any], largest: int, name: str | None = None) -> None:
        super().__init__(list(tensors), name=name or "together")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype) for x in tensors]
        self._largest = largest

    def lower(self, lowering: Any) -> None:
        """One message for all small tensors that want the same ranks and dtype.

        Of the large ones the last goes first: it is that of the last layer, whose gradient is known
        while those of the others are still worked on.
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
    """The same tensors; sums over ranks that are still due are carried out, small ones as one.

    Args:
        tensors: such as the gradients of all weights.
        largest: bytes of a tensor up to which it travels with others.
    """
    return list(TogetherOperation(tensors, largest).outputs)


class MaximumOperation(mtf.Operation):
    """The largest of a block of numbers that each rank has for itself, on every rank."""

    def __init__(self, x: Any, name: str | None = None) -> None:
        super().__init__([x], name=name or "maximum_over_ranks")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    @property
    def has_gradient(self) -> bool:
        """None: it is for checks."""
        return False

    def lower(self, lowering: Any) -> None:
        """One small message."""
        impl = lowering.mesh_impl(self)
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        largest = impl.mesh.world.allreduce(value, "max")
        lowering.set_tensor_lowering(self.outputs[0], LaidOutTensor([largest]))


def maximum_over_ranks(x: Any) -> Any:
    """Element by element the largest over all ranks, whatever the layout says of `x`."""
    return MaximumOperation(x).outputs[0]
