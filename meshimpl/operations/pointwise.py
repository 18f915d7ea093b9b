"""Functions of fields, point by point, each compiled into one pass over the rank's blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.operations.local import local

Function = Callable[..., Any]


def pointwise(function: Function, *fields: Any, outputs: Sequence[Any] | None = None) -> Any:
    """Applies a function to this rank's blocks; the function and its gradient are compiled.

    Args:
        function: a function of as many blocks as there are fields. Its value at a point must depend
            on the fields there only, or on a whole dimension that no layout splits. It is compiled
            once for each object and shape, so pass the same object again.
        fields: mtf tensors of floating values, split alike.
        outputs: the `mtf.Shape` of each of several results. By default there is one, of the first
            field's shape. The results have its dtype.

    Returns:
        An mtf tensor, or a list of them if `outputs` is given.
    """
    forward, backward = _compiled(function, len(fields))
    shapes = [fields[0].shape] if outputs is None else outputs

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        known = [
            mtf.zeros(fields[0].mesh, shape, fields[0].dtype) if dy is None else dy
            for dy, shape in zip(cotangents, shapes, strict=True)
        ]
        return local(backward, [*inputs, *known], [(x.shape, x.dtype) for x in inputs])

    results = local(
        forward,
        fields,
        [(shape, fields[0].dtype) for shape in shapes],
        adjoint=adjoint,
        name="pointwise",
    )
    return results[0] if outputs is None else results


@functools.lru_cache(maxsize=256)
def _compiled(function: Function, count: int) -> tuple[Function, Function]:
    """Returns the function of `count` blocks and its vector-Jacobian product, compiled.

    The arguments of the product are those blocks, followed by the cotangents.
    """

    def backward(*blocks: tf.Tensor) -> list[tf.Tensor]:
        inputs, cotangents = list(blocks[:count]), list(blocks[count:])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            results = function(*inputs)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(results, inputs, cotangents, unconnected_gradients=zero)

    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    return compiled(function), compiled(backward)


def after(x: Any, other: Any) -> Any:
    """Returns `x`, available only once `other` has been computed, which limits memory use."""

    def wait(value: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([first]):
            return tf.identity(value)

    return local(
        wait, [x, other], [(x.shape, x.dtype)], adjoint=lambda _, dys: [dys[0], None], name="after"
    )[0]


def combine(factors: Sequence[Any], terms: Sequence[Any]) -> Any:
    """Returns sum_n factors[n] terms[n], computed in one pass.

    Args:
        factors: mtf tensors with leading dimensions of the terms' shape, such as scalars.
        terms: mtf tensors of one shape and dtype.
    """
    shape, dtype = terms[0].shape, terms[0].dtype

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        (dy,) = cotangents
        by_factor = [
            mtf.reduce_sum(dy * x, output_shape=f.shape)
            for f, x in zip(inputs[: len(factors)], terms, strict=True)
        ]
        return by_factor + [combine([f], [dy]) for f in factors]

    inputs = [*factors, *terms]
    return local(sum_of_products, inputs, [(shape, dtype)], adjoint=adjoint, name="combine")[0]


@tf.function(jit_compile=True, autograph=False)
def sum_of_products(*blocks: tf.Tensor) -> tf.Tensor:
    """Returns the sum of products of `combine` on one rank.

    Args:
        blocks: those of the factors, followed by as many of the terms.
    """
    count = len(blocks) // 2
    total = None
    for factor, term in zip(blocks[:count], blocks[count:], strict=True):
        missing = term.shape.rank - factor.shape.rank
        part = tf.reshape(factor, factor.shape.as_list() + [1] * missing) * term
        total = part if total is None else total + part
    return total


def vector(parts: Sequence[Any]) -> Any:
    """Returns components [...] as one mtf tensor [..., component]."""
    shape = mtf.Shape([*parts[0].shape.dims, mtf.Dimension("component", len(parts))])
    return pointwise(_stack, *parts, outputs=[shape])[0]


def _stack(*blocks: tf.Tensor) -> tf.Tensor:
    return tf.stack(blocks, axis=-1)
