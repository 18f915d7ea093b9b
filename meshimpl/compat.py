"""What mesh_tensorflow 0.1.21 misses on today's TensorFlow, and two mends of its gradients.

Every other module of this package takes Mesh TensorFlow from here::

    from meshimpl.compat import mtf

Each shim names the version that would end it.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

try:
    import tensorflow as tf
except ImportError as error:  # the CPU and the CUDA distribution exclude each other: the user chooses
    raise ImportError(
        "TensorFlow is not installed; install this project with `pip install .[cpu]` "
        "or `pip install .[gpu]`"
    ) from error


def _install_estimator() -> None:
    """`tf.compat.v1.estimator`, removed in TensorFlow 2.16; mesh_tensorflow only subclasses two hooks.

    Ends with a mesh_tensorflow later than 0.1.21 that no longer imports the estimator.
    """
    if hasattr(tf.compat.v1, "estimator"):
        return
    estimator: Any = types.ModuleType("tensorflow.compat.v1.estimator")
    estimator.CheckpointSaverListener = tf.compat.v1.train.CheckpointSaverListener
    estimator.SessionRunHook = tf.compat.v1.train.SessionRunHook
    sys.modules["tensorflow.compat.v1.estimator"] = estimator
    tf.compat.v1.estimator = estimator


def _install_conversion_registry() -> None:
    """`ops.register_tensor_conversion_function`, which moved to its own module in TensorFlow 2.13.

    Ends with a mesh_tensorflow later than 0.1.21 that imports it from there.
    """
    from tensorflow.python.framework import ops, tensor_conversion_registry

    if not hasattr(ops, "register_tensor_conversion_function"):
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function
        )


_install_estimator()
_install_conversion_registry()

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow import ops as mtf_ops  # noqa: E402


def _lower_generic_grad(op: Any, lowering: Any) -> None:
    """Lower a `GenericGradOperation` so that its outputs are whole gradients.

    TensorFlow differentiates the slice-wise function on each rank. Two things are added to upstream
    (0.1.21): an output that is still a lazy sum is reduced first, and the gradient of an input that
    is replicated over a mesh axis over which an output is split is summed over that axis, since
    each rank has seen only its slice of the output.
    """
    forward = op._forward_op
    mesh_impl = lowering.mesh_impl(op)

    def slices(tensor: Any) -> list[Any]:
        return lowering.tensors[tensor].to_laid_out_tensor().tensor_list

    columns = [
        zip(*[slices(t) for t in group], strict=True)
        for group in (forward.outputs, forward.inputs, op._grad_ys)
    ]
    per_slice = [
        tf.gradients(
            ys=list(ys),
            xs=list(xs),
            grad_ys=list(grad_ys),
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        for ys, xs, grad_ys in zip(*columns, strict=True)
    ]
    split_axes = {
        axis for y in forward.outputs for axis in mesh_impl.tensor_layout(y) if axis is not None
    }
    for output, x, grad_slices in zip(
        op.outputs, forward.inputs, zip(*per_slice, strict=True), strict=True
    ):
        gradient = mesh_impl.LaidOutTensor.from_tensor_list(list(grad_slices))
        missing = sorted(split_axes - set(mesh_impl.tensor_layout(x)))
        if missing and x.dtype.is_floating:
            gradient = mesh_impl.allreduce(gradient, missing, "SUM")
        lowering.set_tensor_lowering(output, gradient)


mtf_ops.GenericGradOperation.lower = _lower_generic_grad

__all__ = ["mtf", "mtf_ops"]
