"""Arithmetic for formulas: NumPy's where all values are known numbers, TensorFlow's on tensors.

TensorFlow takes tens of microseconds for an operation on a few numbers, and NumPy takes one.
Formulas of these functions and of Python's operators are therefore cheap for a cosmology of plain
numbers, and can be differentiated for a cosmology of tensors. TensorFlow is loaded when the first
tensor is made: run files are checked without it.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from flowpm_dist.options import in_unit

if TYPE_CHECKING:
    import tensorflow as tf

LARGEST = 2**16
"""Values of an array beyond which TensorFlow, which uses several threads, computes with it."""

P = ParamSpec("P")
_nested = ContextVar("nested", default=False)


def _tensorflow() -> Any:
    return importlib.import_module("tensorflow")


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor or a variable."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, (tf.Tensor, tf.Variable))


def known(value: Any) -> Any:
    """The array behind a value; None if it is a tensor that a graph has yet to compute."""
    if not is_tensor(value):
        return np.asarray(value)
    if hasattr(value, "read_value"):
        value = value.read_value()
    return _tensorflow().get_static_value(value)


def plain_numbers(values: Mapping[str, Any], taker: str) -> dict[str, float]:
    """Returns numbers and tensors as plain numbers, by name.

    Args:
        values: by name.
        taker: who takes them, for the message.

    Raises:
        ValueError: a tensor has no value yet.
    """
    numbers = {name: known(value) for name, value in values.items()}
    for name, number in numbers.items():
        if number is None:
            raise ValueError(f"{name} has no value yet: {taker} takes plain numbers")
    return {name: float(number) for name, number in numbers.items()}


def as_float64(value: Any, name: str = "value", unit: str = "") -> tf.Tensor:
    """`value` (number, array or tensor of any shape) as a float64 tensor, differentiably.

    Args:
        value: the value; a quantity is converted or refused.
        name, unit: see `options.in_unit`.
    """
    tf = _tensorflow()
    if is_tensor(value):
        return tf.cast(value, tf.float64)
    return tf.constant(np.asarray(in_unit(name, value, unit), dtype=np.float64))


def as_array(value: Any, name: str = "value", unit: str = "") -> Any:
    """`value` as float64: a tensor where it is one or is larger than `LARGEST`, else an array.

    Args:
        value: the value; a quantity is converted or refused.
        name, unit: see `options.in_unit`.
    """
    if is_tensor(value):
        return _tensorflow().cast(value, np.float64)
    array = np.asarray(in_unit(name, value, unit), dtype=np.float64)
    return array if array.size <= LARGEST else _tensorflow().constant(array)


@contextmanager
def arrays_within() -> Iterator[None]:
    """Makes functions that are marked by `gives_tensor` return arrays where they can."""
    token = _nested.set(True)
    try:
        with np.errstate(all="ignore"):  # as TensorFlow does
            yield
    finally:
        _nested.reset(token)


def gives_tensor(function: Callable[P, Any]) -> Callable[P, tf.Tensor]:
    """Makes a function return a float64 tensor; functions of its kind that call it get arrays."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        if _nested.get():
            return function(*args, **kwargs)
        with arrays_within():
            value = function(*args, **kwargs)
        return as_float64(value)

    return call


def _either(name: str, of_arrays: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a function of arrays, which calls TensorFlow's of this name for tensors."""
    of_tensors = operator.attrgetter(name)

    def call(*values: Any) -> Any:
        if any(map(is_tensor, values)):
            return of_tensors(_tensorflow())(*values, **options)
        return of_arrays(*values)

    return call


exp = _either("exp", np.exp)
log = _either("math.log", np.log)
sqrt = _either("sqrt", np.sqrt)
square = _either("square", np.square)
sin = _either("sin", np.sin)
sinh = _either("sinh", np.sinh)
cos = _either("cos", np.cos)
cosh = _either("cosh", np.cosh)
arccos = _either("acos", np.arccos)
floor = _either("floor", np.floor)
minimum = _either("minimum", np.minimum)
maximum = _either("maximum", np.maximum)
clip = _either("clip_by_value", np.clip)
where = _either("where", np.where)
reshape = _either("reshape", np.reshape)
transposed = _either("transpose", np.transpose)
product = _either("linalg.matmul", lambda x, y: np.einsum("ij,jk->ik", x, y))
"""The product of two matrices; of arrays it is computed without BLAS, see `solve`."""
zeros_like = _either("zeros_like", np.zeros_like)
ones_like = _either("ones_like", np.ones_like)
stop_gradient = _either("stop_gradient", lambda value: value)
total = _either("reduce_sum", lambda x: np.sum(x, axis=-1), axis=-1)
"""The sum along the last axis."""


def largest(value: Any, axis: int) -> Any:
    """Returns the largest elements along an axis."""
    return _tensorflow().reduce_max(value, axis) if is_tensor(value) else np.max(value, axis)


def chosen(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """Returns what one of two functions returns; in a graph, both are parts of it."""
    if is_tensor(condition):
        return _tensorflow().cond(condition, yes, no)
    return yes() if condition else no()


def repeated(step: Callable[[Any], Any], value: Any, times: int) -> Any:
    """Returns a value after steps that are not differentiated; in a graph they are a loop."""
    if is_tensor(value) and not _tensorflow().executing_eagerly():
        tf = _tensorflow()
        (value,) = tf.while_loop(
            lambda _: True, lambda x: (step(x),), (value,), maximum_iterations=times
        )
        return tf.stop_gradient(value)
    for _ in range(times):
        value = stop_gradient(step(value))
    return value


def stacked(values: Sequence[Any], axis: int) -> Any:
    """Returns arrays or tensors of one shape along a new axis."""
    return (_tensorflow().stack if any(map(is_tensor, values)) else np.stack)(values, axis=axis)


def joined(values: Sequence[Any], axis: int) -> Any:
    """Returns arrays or tensors one after another along an axis."""
    tensors = any(map(is_tensor, values))
    return (_tensorflow().concat if tensors else np.concatenate)(values, axis=axis)


def solve(matrix: Any, right: Any) -> Any:
    """Returns the solution x [n, m] of matrix x = right."""
    tf = _tensorflow()
    if is_tensor(matrix) or is_tensor(right):
        return tf.linalg.solve(matrix, right)
    # Not NumPy's: the threads of its BLAS keep cores busy while they wait.
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.linalg.solve(matrix, right).numpy()


def taken(table: np.ndarray, numbers: Any) -> Any:
    """Returns the rows of a table [n, ...] at whole numbers, as their shape and a row's."""
    if is_tensor(numbers):
        tf = _tensorflow()
        return tf.gather(table, tf.cast(numbers, tf.int32))
    return table[numbers.astype(np.int64)]
