"""Shims that mesh_tensorflow 0.1.21 needs on recent TensorFlow, and fixes of its operations.

Every other module of this package takes Mesh TensorFlow from here::

    from meshimpl.compat import mtf

The docstring of each shim names the version that makes it obsolete.
"""

from __future__ import annotations

import collections
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

from meshimpl.imports import without_keras

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

try:
    with without_keras():
        import tensorflow as tf
except ImportError as error:  # the CPU and CUDA distributions exclude each other: a user chooses
    raise ImportError(
        "TensorFlow is not installed; install this project with `pip install .[cpu]` "
        "or `pip install .[gpu]`"
    ) from error


def _install_estimator() -> None:
    """Installs `tf.compat.v1.estimator`, removed in TensorFlow 2.16, with what is needed of it.

    Obsolete with a mesh_tensorflow later than 0.1.21 that no longer imports the estimator.
    """
    if hasattr(tf.compat.v1, "estimator"):
        return
    estimator: Any = types.ModuleType("tensorflow.compat.v1.estimator")
    estimator.CheckpointSaverListener = tf.compat.v1.train.CheckpointSaverListener
    estimator.SessionRunHook = tf.compat.v1.train.SessionRunHook
    estimator.ModeKeys = types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer")
    sys.modules["tensorflow.compat.v1.estimator"] = estimator
    tf.compat.v1.estimator = estimator


def _install_conversion_registry() -> None:
    """Installs `ops.register_tensor_conversion_function`, which TensorFlow 2.13 moved.

    Obsolete with a mesh_tensorflow later than 0.1.21 that imports it from its new module.
    """
    from tensorflow.python.framework import ops, tensor_conversion_registry

    if not hasattr(ops, "register_tensor_conversion_function"):
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function
        )


def _drop_reports() -> None:
    """Drops mesh_tensorflow's reports about each graph, which TensorFlow prints in notebooks."""

    def is_wanted(record: logging.LogRecord) -> bool:
        from_mesh_tensorflow = Path(record.pathname).parent.name == "mesh_tensorflow"
        return record.levelno > logging.INFO or not from_mesh_tensorflow

    tf.get_logger().addFilter(is_wanted)


_install_estimator()
_install_conversion_registry()
_drop_reports()

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow import ops as mtf_ops  # noqa: E402

from meshimpl.graph_guards import in_order  # noqa: E402


def _lower_generic_grad(op: Any, lowering: Any) -> None:
    """Lowers a `GenericGradOperation` so that its outputs are complete, and partial, gradients.

    TensorFlow differentiates the slice-wise function on each rank. Added to upstream (0.1.21):

    * An input or output that is still a lazy sum is reduced first.
    * If a mesh axis splits an output and an input is replicated over it, the gradient of the input
      is summed over that axis, since each rank uses only its slice of the output.
    * `stop_gradients`: for `f(a, b)` where b depends on a, only the partial derivatives of `f` are
      taken here. Mesh TensorFlow follows the other path itself. TensorFlow would differentiate
      through collectives.
    * Outputs that are not floating have no gradient.
    """
    forward, mesh_impl = op._forward_op, lowering.mesh_impl(op)

    def laid_out(tensors: Any) -> list[Any]:
        return [lowering.tensors[tensor].to_laid_out_tensor() for tensor in tensors]

    outputs_split_alike = collections.defaultdict(list)
    for y, grad_y in zip(forward.outputs, op._grad_ys, strict=True):
        if y.dtype.is_floating:
            outputs_split_alike[_split_axes(mesh_impl, y)].append((y, grad_y))
    totals: list[Any] = [None] * len(forward.inputs)
    for split, pairs in outputs_split_alike.items():

        def gradients(*slices: Any, count: int = len(pairs)) -> tuple[Any, ...]:
            values = list(slices)
            xs, ys, grad_ys = values[: -2 * count], values[-2 * count : -count], values[-count:]
            zero = tf.UnconnectedGradients.ZERO
            return tuple(
                tf.gradients(ys, xs, grad_ys, stop_gradients=xs, unconnected_gradients=zero)
            )

        ys, grad_ys = zip(*pairs, strict=True)
        tensors = laid_out([*forward.inputs, *ys, *grad_ys])
        for i, part in enumerate(mesh_impl.slicewise(gradients, *tensors)):
            x, known = forward.inputs[i], totals[i]
            missing = sorted(split - _split_axes(mesh_impl, x))
            if missing and x.dtype.is_floating:
                part = mesh_impl.allreduce(part, missing, "SUM")
            totals[i] = part if known is None else mesh_impl.slicewise(tf.add, known, part)
    for output, total in zip(op.outputs, totals, strict=True):
        lowering.set_tensor_lowering(output, total)


def _split_axes(mesh_impl: Any, tensor: Any) -> frozenset[int]:
    return frozenset(axis for axis in mesh_impl.tensor_layout(tensor) if axis is not None)


def _gradient_with_zeros(operation: Any) -> None:
    """Gives unused outputs cotangents of zeros, where upstream (0.1.21) meets a None."""
    original = operation.gradient

    def gradient(op: Any, grad_ys: list[Any]) -> Any:
        pairs = zip(op.outputs, grad_ys, strict=True)
        return original(op, [mtf_ops.zeros_like(y) if dy is None else dy for y, dy in pairs])

    operation.gradient = gradient


def _min_max_gradient(op: Any, grad_ys: list[Any]) -> list[Any]:
    """Returns the gradient of `MinMaxOperation`, in the shape of each input.

    Upstream's (0.1.21) has the shape of the output.
    """
    (dy,) = grad_ys
    return [
        mtf_ops.reduce_sum(
            dy * mtf_ops.cast(mtf_ops.equal(x, op.outputs[0]), dy.dtype), output_shape=x.shape
        )
        for x in op.inputs
    ]


def _lower_depend(op: Any, lowering: Any) -> None:
    """Lowers a `Depend` whose dependency may be a lazy sum, which upstream (0.1.21) cannot."""
    for dependency in op._dependencies:
        if isinstance(dependency, mtf_ops.Tensor):
            _reduce_now(lowering, dependency)
    _upstream_lower_depend(op, lowering)


def _reduce_now(lowering: Any, tensor: Any) -> None:
    if tensor in lowering.tensors:
        lowering.tensors[tensor] = lowering.tensors[tensor].to_laid_out_tensor()


def _init_while_loop(
    op: Any, cond_fn: Any, body_fn: Any, inputs: list[Any], tf_kwargs: Any = None, **kwargs: Any
) -> None:
    """Initialises a `WhileLoopOperation` that may communicate. Added to upstream (0.1.21):

    * Iterations run one at a time, since a collective has one name and may be in flight only once.
    * Loop variables are reduced in each iteration; upstream passes partial sums to the next.
    * A single loop variable stays in a list, which TensorFlow would remove by default.
    """

    def body(*args: Any) -> list[Any]:
        outputs = list(body_fn(*args))
        return [mtf_ops.identity(t) for t in outputs[: len(inputs)]] + outputs[len(inputs) :]

    options = {"parallel_iterations": 1, "return_same_structure": True, **(tf_kwargs or {})}
    _upstream_init_while_loop(op, cond_fn, body, inputs, tf_kwargs=options, **kwargs)


def _lower_while_loop(op: Any, lowering: Any) -> None:
    """Lowers a loop after the lazy sums that it reads, so that they are reduced outside it."""
    for inner in op._cond_ops + op._body_ops:
        for tensor in inner.inputs:
            _reduce_now(lowering, tensor)

    def build() -> list[Any]:
        _upstream_lower_while_loop(op, lowering)
        lowered = [lowering.tensors[t] for t in op.outputs]
        # A sum stays lazy: it may be added to another one before ranks add it up.
        return [getattr(x, "laid_out_input", x).tensor_list[0] for x in lowered]

    in_order(build)


def _lower_reshape(op: Any, lowering: Any) -> None:
    """Lowers a `ReshapeOperation`: changes the layout of the old shape, then reshapes each slice.

    Upstream (0.1.21) may split a dimension over one mesh axis while it is still split over another
    that is moved later, as in [x:row, y:col] to [y:row, x:col]. The pieces are then in a wrong
    order. Here a dimension is split only when it is whole. Where two axes wait for each other, one
    is gathered. A split that the old shape cannot express is made after the reshape. A mesh axis of
    one rank moves nothing; upstream loses track of it among dimensions of size 1.
    """
    mesh_impl = lowering.mesh_impl(op)
    old, new = op.inputs[0].shape, op.outputs[0].shape
    before = mesh_impl.tensor_layout(old).mesh_axis_to_tensor_axis(mesh_impl.ndims)
    after = mesh_impl.tensor_layout(new).mesh_axis_to_tensor_axis(mesh_impl.ndims)
    ranks = [dim.size for dim in mesh_impl.shape]
    place = {axis: at for axis, at in enumerate(before) if ranks[axis] > 1}
    moves: dict[int, int | None] = {}
    late: list[int] = []
    for axis, (start, end) in enumerate(
        zip(mesh_impl.mesh_axis_to_cumprod(old), mesh_impl.mesh_axis_to_cumprod(new), strict=True)
    ):
        if start == end or ranks[axis] == 1:
            continue
        target = None if end is None else old.cumprod_to_tensor_axis(end)
        if target is not None and old[target].size % mesh_impl.shape[axis].size:
            target = None
        if end is not None and target is None:
            late.append(axis)
        if (place[axis], target) != (None, None):
            moves[axis] = target
    slices = _relayout(mesh_impl, lowering.tensors[op.inputs[0]], place, moves)
    slice_shape = mesh_impl.slice_shape(new)
    for axis in late:
        slice_shape[after[axis]] *= mesh_impl.shape[axis].size
    slices = mesh_impl.slicewise_delay_allreduce(lambda x: tf.reshape(x, slice_shape), slices)
    for axis in late:
        slices = mesh_impl.allsplit(slices, axis, after[axis])
    lowering.set_tensor_lowering(op.outputs[0], slices)


def _relayout(
    mesh_impl: Any, slices: Any, place: dict[int, int | None], moves: dict[int, int | None]
) -> Any:
    """Moves each mesh axis of `moves` to another tensor axis or None, from that in `place`."""

    def is_free(axis: int) -> bool:
        return moves[axis] is None or moves[axis] not in place.values()

    def communication(axis: int) -> int:
        return 0 if place[axis] is None else 2 if moves[axis] is None else 1

    while moves:
        free = sorted(filter(is_free, moves), key=communication)
        axis = free[0] if free else min(moves)
        source, target = place[axis], moves[axis] if free else None
        if source is None:
            slices = mesh_impl.allsplit(slices, axis, target)
        elif target is None:
            slices = mesh_impl.allconcat(slices, axis, source)
        else:
            slices = mesh_impl.alltoall(slices, axis, target, source)
        place[axis] = target
        if free:
            del moves[axis]
    return slices


def _lower_with_split_channels(operation: Any) -> None:
    """Replaces the lowering of a transposed convolution, whose output channels may be split.

    Upstream (0.1.21) asks each slice for all output channels.
    """
    original = operation.lower

    def lower(op: Any, lowering: Any) -> None:
        whole = op._out_dim
        (size,) = lowering.mesh_impl(op).slice_shape(mtf_ops.Shape([whole]))
        op._out_dim = mtf_ops.Dimension(whole.name, size)
        try:
            original(op, lowering)
        finally:
            op._out_dim = whole

    operation.lower = lower


_upstream_lower_depend = mtf_ops.Depend.lower
_upstream_init_while_loop = mtf_ops.WhileLoopOperation.__init__
_upstream_lower_while_loop = mtf_ops.WhileLoopOperation.lower

mtf_ops.GenericGradOperation.lower = _lower_generic_grad
mtf_ops.MinMaxOperation.gradient = _min_max_gradient
mtf_ops.Depend.lower = _lower_depend
mtf_ops.WhileLoopOperation.__init__ = _init_while_loop
mtf_ops.WhileLoopOperation.lower = _lower_while_loop
mtf_ops.ReshapeOperation.lower = _lower_reshape
for _operation in (mtf_ops.SlicewiseOperation, mtf_ops.UnstackOperation):
    _gradient_with_zeros(_operation)
for _operation in (mtf_ops.Conv2dTransposeOperation, mtf_ops.Conv3dTransposeOperation):
    _lower_with_split_channels(_operation)

__all__ = ["mtf", "mtf_ops"]
