"""Operations that each rank carries out on its own blocks, with an adjoint given beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor

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
