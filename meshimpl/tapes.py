"""What `tf.GradientTape` records, keeps and refuses.

A tape keeps the tensors that the gradient of a recorded function refers to. What is here refers to
little, and refuses derivatives that nobody computes instead of returning wrong ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record


def is_watched(tensors: Sequence[tf.Tensor | tf.Variable]) -> bool:
    """Returns whether a `tf.GradientTape` records what is computed from these tensors."""
    return bool(record.should_record_backprop([tf.convert_to_tensor(t) for t in tensors]))


def loses_gradients(tensors: Sequence[tf.Tensor], ends: Sequence[tf.Tensor]) -> bool:
    """Returns whether a tape may ask for gradients of tensors other than those to some ends.

    Args:
        tensors: the tensors.
        ends: tensors that no tape sees, to which gradients flow; needed where a graph is built.
    """
    in_graph = not tf.executing_eagerly()
    return is_watched(tensors) or (in_graph and reaches_arguments(tensors, ends))


def reaches_arguments(tensors: Sequence[tf.Tensor], ends: Sequence[tf.Tensor]) -> bool:
    """Returns whether gradients of a function's tensors flow to floating arguments of the function.

    A tape around the function may watch those, which nobody knows while the graph is built. What
    the function has captured from outside of all graphs does not count: `is_watched` knows it.

    Args:
        tensors: tensors of the graph under construction.
        ends: tensors to which gradients may flow, and beyond which nothing is asked.
    """
    visited, waiting = {_key(x) for x in ends}, [x for x in tensors if _is_symbolic(x)]
    while waiting:
        tensor = waiting.pop()
        dtype = tensor.dtype
        carries = dtype.is_floating or dtype.is_complex or dtype in (tf.variant, tf.resource)
        if not carries or _key(tensor) in visited or tensor.op.type == "StopGradient":
            continue
        visited.add(_key(tensor))
        outside: list[Any] = []
        if tensor.op.type == "Placeholder":
            captures = getattr(tensor.graph, "captures", ())
            outside = [x for x, inside in captures if _key(inside) == _key(tensor)]
            if not outside and (dtype.is_floating or dtype.is_complex):
                return True
        waiting += [x for x in (*outside, *tensor.op.inputs) if _is_symbolic(x)]
    return False


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and not isinstance(x, tf.__internal__.EagerTensor)


def _key(x: tf.Tensor) -> tuple[int, str]:
    return id(x.graph), x.name


def not_recorded() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which no `tf.GradientTape` records anything."""
    return record.stop_recording()


def with_gradient(function: Callable[..., Any]) -> Callable[..., list[tf.Tensor]]:
    """Returns a function with a gradient of its own, as `tf.custom_gradient` does.

    Outside of graphs, tapes keep only what the gradient refers to; with `tf.custom_gradient` they
    keep the outputs, too.

    Args:
        function: a function of tensors that returns two things: a sequence of tensors, and the
            function from their cotangents to the cotangents of the inputs. What it computes must be
            hidden from tapes.

    Raises:
        TypeError: from the function, if it uses variables that are watched and not among the
            inputs: it has no gradient to them.
    """
    in_graphs = tf.custom_gradient(function)

    def recorded(*inputs: Any) -> list[tf.Tensor]:
        if not tf.executing_eagerly():
            return list(in_graphs(*inputs))
        of_inputs = {id(x) for x in inputs}
        with record.VariableWatcher() as watcher:
            results, gradient = function(*inputs)
        if others := [v.name for v in watcher.watched_variables() if id(v) not in of_inputs]:
            raise TypeError(
                f"{function.__name__} uses variables that are not among its inputs, and has no "
                f"gradient to them: {', '.join(others)}"
            )
        inputs = tuple(tf.convert_to_tensor(x) for x in inputs)
        outputs = [tf.identity(result) for result in results]
        record.record_operation(function.__name__, outputs, inputs, gradient)
        return outputs

    return recorded


def not_differentiable(function: Callable[..., Any], message: str) -> Callable[..., Any]:
    """Returns a function, itself hidden from tapes, whose gradient is refused.

    Args:
        function: function of tensors.
        message: message of the LookupError that a gradient raises.
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
        function: function of tensors.
        name: name of the function that it differentiates, for the LookupError that a second
            derivative raises. tf.autodiff.ForwardAccumulator asks for one, too.
    """
    return not_differentiable(function, _only_once(name))


def _only_once(name: str) -> str:
    return (
        f"{name} has no second derivative, and none in forward mode; take differences of gradients "
        "for the former; a simulation has flowpm_dist.jacobian in place of the latter"
    )


Begin = Callable[..., Callable[[], Sequence[tf.Tensor]]]
"""From the cotangents of outputs to a function that returns the cotangents of the inputs."""


class InTwoParts:
    """A function on tapes that keep neither its inputs nor what its gradient has used.

    TensorFlow keeps the cotangents of a function while its gradient runs. So the tape has two
    functions, and the gradient two parts. The first part takes the cotangents and lets a tape that
    is not persistent forget the outputs; the second computes the cotangents of the inputs.

    Args:
        name: see `once_differentiable`.
        inputs: the inputs. The caller may forget them at once.
    """

    def __init__(self, name: str, *inputs: Any) -> None:
        self._name = name
        tensors = [tf.convert_to_tensor(x) for x in inputs]
        # A tape that begins later may watch them, if they are still there.
        self._inputs = [weakref.ref(x) for x in tensors]
        self._second_part: list[tuple[Callable[[], Sequence[tf.Tensor]], tf.Tensor]] = []

        @with_gradient
        def first(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            return [tf.zeros([])], self._finish

        (self._between,) = first(*tensors)

    def outputs(self, outputs: Sequence[tf.Tensor], begin: Begin) -> list[tf.Tensor]:
        """Returns the outputs as a tape sees them; to be called once.

        Args:
            outputs: the outputs, hidden from tapes.
            begin: begins the gradient; it is called once for each gradient that a tape asks for,
                and what it returns is, too.
        """

        @with_gradient
        def second(_: tf.Tensor) -> tuple[Sequence[tf.Tensor], Callable[..., Any]]:
            def gradient(*cotangents: tf.Tensor) -> list[tf.Tensor]:
                alive = [x for ref in self._inputs if (x := ref()) is not None]
                watched = [self._between, *alive, *cotangents]
                of_watched = once_differentiable(lambda *_: tf.zeros([]), self._name)(*watched)
                finish = begin(*map(tf.stop_gradient, cotangents))
                self._second_part[:] = [(finish, of_watched)]
                return [tf.zeros([])]

            return outputs, gradient

        return second(self._between)

    def _finish(self, _: tf.Tensor) -> list[tf.Tensor]:
        if not self._second_part:  # forward mode asks at once
            raise LookupError(_only_once(self._name))
        finish, of_watched = self._second_part.pop()
        return list(once_differentiable(lambda _: tuple(finish()), self._name)(of_watched))
