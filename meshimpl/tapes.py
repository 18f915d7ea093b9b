"""What a `tf.GradientTape` sees of functions whose gradient is not TensorFlow's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf


def is_watched(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Returns whether a `tf.GradientTape` records what is computed from these tensors."""
    from tensorflow.python.eager import record

    return bool(record.should_record_backprop([tf.convert_to_tensor(t) for t in tensors]))


def not_recorded() -> AbstractContextManager[None]:
    """Returns a context in which no `tf.GradientTape` records anything."""
    from tensorflow.python.eager import record

    return record.stop_recording()


def not_differentiable(function: Callable[..., Any], message: str) -> Callable[..., Any]:
    """Returns a function, itself hidden from tapes, whose gradient is refused.

    Args:
        function: of tensors.
        message: of the LookupError that a gradient raises.
    """

    def refuse(*_: tf.Tensor) -> Any:
        raise LookupError(message)

    @tf.custom_gradient
    def hidden(*inputs: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
        return function(*[tf.stop_gradient(x) for x in inputs]), refuse

    return hidden


def once_differentiable(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function that computes gradients, itself hidden from tapes.

    Args:
        function: of tensors.
        name: of the function that it differentiates, for the LookupError that a second derivative
            raises.
    """
    message = f"{name} has no second derivative; take differences of gradients instead"
    return not_differentiable(function, message)
