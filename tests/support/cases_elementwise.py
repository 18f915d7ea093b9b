"""Cases: operations on each element, broadcasting, reductions, and gradients made by TensorFlow."""

from typing import Any

import tensorflow as tf
from conformance import Cases, Input, shape

from meshimpl.compat import mtf

cases = Cases()
X = shape(x=8, y=4, z=3)
FIELD = Input(X)
POSITIVE = Input(X, low=0.5, high=2.0)
ROW = Input(shape(y=4))
COUNTS = Input(X, "int32", -5, 6)


@cases(POSITIVE)
def unary(mesh: Any, a: Any) -> list[Any]:
    functions = [
        mtf.sin,
        mtf.cos,
        mtf.square,
        mtf.sqrt,
        mtf.rsqrt,
        mtf.log,
        mtf.exp,
        mtf.sigmoid,
        mtf.tanh,
        mtf.reciprocal,
        mtf.softplus,
        mtf.relu,
        mtf.negative,
        mtf.abs,
        mtf.gelu,
        mtf.elu,
        mtf.swish,
    ]
    return [sum_of([f(a) for f in functions]), mtf.sign(a), mtf.pow(a, 1.5)]


def sum_of(terms: list[Any]) -> Any:
    total = terms[0]
    for i, term in enumerate(terms[1:]):
        total = total + term * (1.0 + 0.1 * i)
    return total


@cases(FIELD, Input(shape(k=5)), Input(shape()))
def slicewise_with_a_table_and_a_scalar(mesh: Any, a: Any, table: Any, scalar: Any) -> Any:
    """Gradients of replicated inputs: each rank sees only its slice of the output."""
    return mtf.slicewise(
        lambda u, t, s: tf.sin(u * s) * tf.reduce_sum(t**2) + t[1],
        [a, table, scalar],
        splittable_dims=a.shape.dims,
    )


@cases(FIELD, ROW)
def slicewise_partly_replicated(mesh: Any, a: Any, row: Any) -> Any:
    return mtf.slicewise(
        lambda u, r: u**2 * tf.sin(r)[:, tf.newaxis], [a, row], splittable_dims=a.shape.dims
    )


@cases(FIELD, Input(shape(k=5)))
def slicewise_of_split_and_replicated_outputs(mesh: Any, a: Any, table: Any) -> Any:
    """A replicated output's part of a gradient is whole on each rank and must not be summed."""
    return mtf.slicewise(
        lambda u, t: (u * tf.reduce_sum(tf.sin(t)), t**3),
        [a, table],
        output_shape=[a.shape, table.shape],
        output_dtype=[tf.float64] * 2,
        splittable_dims=a.shape.dims,
    )


@cases(FIELD)
def slicewise_with_an_output_ignored(mesh: Any, a: Any) -> Any:
    first, _, _ = mtf.slicewise(
        lambda u: (u**2, u**3, tf.cast(u, tf.int32)),
        [a],
        output_shape=[a.shape] * 3,
        output_dtype=[tf.float64, tf.float64, tf.int32],
        splittable_dims=a.shape.dims,
    )
    return first


@cases(FIELD)
def slicewise_of_inputs_that_depend_on_each_other(mesh: Any, a: Any) -> Any:
    """TensorFlow must not differentiate the second input back to the first itself."""
    total = mtf.reduce_sum(mtf.square(a))
    scaled = mtf.slicewise(lambda u, t: u * t, [a, total], splittable_dims=a.shape.dims)
    return [mtf.cwise(lambda u, v: u * v, [a, mtf.sin(a)]), scaled]


@cases(FIELD, Input(shape(y=4, k=3)))
def function_of_a_lazy_sum(mesh: Any, a: Any, w: Any) -> Any:
    """The gradient of sin meets a product that is not yet summed."""
    product = mtf.einsum([mtf.sin(a), w], output_shape=shape(x=8, z=3, k=3))
    return [mtf.cos(product), mtf.square(mtf.reduce_sum(a, output_shape=shape(x=8)))]


@cases(FIELD)
def function_with_its_own_gradient(mesh: Any, a: Any) -> Any:
    return mtf.cwise(tf.exp, [a], grad_function=lambda op, dy: [dy * op.outputs[0]])


@cases(FIELD)
def scalars(mesh: Any, a: Any) -> Any:
    return [a * 3.0 + 2.0, 1.0 - a / 4.0]


@cases(COUNTS, Input(shape(y=4), "int32", 1, 4), gradient=False)
def comparisons(mesh: Any, a: Any, b: Any) -> Any:
    signs = [
        f(a, b)
        for f in (
            mtf.less,
            mtf.greater,
            mtf.less_equal,
            mtf.greater_equal,
            mtf.equal,
            mtf.not_equal,
        )
    ]
    both = mtf.logical_and(signs[0], mtf.logical_not(signs[4]))
    return [*signs, both, mtf.logical_or(signs[0], signs[4]), mtf.floordiv(a, b), mtf.mod(a, b)]


@cases(FIELD, ROW, Input(shape(z=3, y=4)))
def broadcasting_arithmetic(mesh: Any, a: Any, row: Any, plane: Any) -> Any:
    return [
        a + row,
        row - a,
        a * plane,
        a / (row * row + 1.0),
        mtf.add(row, plane, shape(y=4, z=3)),
    ]


@cases(FIELD, ROW, Input(shape(x=8)))
def minimum_and_maximum_with_broadcast(mesh: Any, a: Any, row: Any, col: Any) -> Any:
    return [mtf.maximum(a, row), mtf.minimum(row, col, output_shape=shape(x=8, y=4))]


@cases(FIELD, ROW)
def where(mesh: Any, a: Any, row: Any) -> Any:
    return mtf.where(mtf.less(a, 0.0), a, row, output_shape=a.shape)


@cases(ROW, Input(shape(x=8)))
def broadcast(mesh: Any, row: Any, col: Any) -> Any:
    return [mtf.broadcast(row, shape(x=8, y=4)), mtf.broadcast(col, shape(z=3, y=4, x=8))]


@cases(FIELD)
def reductions(mesh: Any, a: Any) -> Any:
    found = []
    for kept in (shape(), shape(x=8), shape(z=3, y=4), shape(y=4)):
        found += [
            f(a, output_shape=kept)
            for f in (mtf.reduce_sum, mtf.reduce_mean, mtf.reduce_max, mtf.reduce_min)
        ]
    return found


@cases(COUNTS, gradient=False)
def reductions_of_truth_values_and_integers(mesh: Any, a: Any) -> Any:
    truth = mtf.less(a, 0)
    kept = shape(y=4)
    return [
        mtf.reduce_all(truth, output_shape=kept),
        mtf.reduce_any(truth, output_shape=kept),
        mtf.reduce_sum(a, output_shape=kept),
        mtf.reduce_max(a, output_shape=kept),
        mtf.reduce_min(a),
    ]


@cases(FIELD)
def normalised_exponentials(mesh: Any, a: Any) -> Any:
    return [
        mtf.softmax(a, a.shape[1]),
        mtf.log_softmax(a, a.shape[0]),
        mtf.reduce_logsumexp(a, a.shape[1]),
    ]


@cases(FIELD, Input(shape(y=4), "int32", 0, 8), Input(shape(y=4, x=8)))
def one_hot_and_gather(mesh: Any, a: Any, index: Any, rows: Any) -> Any:
    hot = mtf.one_hot(index, a.shape[0], on_value=2.0, off_value=-1.0, dtype=tf.float64)
    return [hot * rows, mtf.gather(a, index, a.shape[0])]


@cases(FIELD, smooth=False)
def casts(mesh: Any, a: Any) -> Any:
    half = mtf.cast(mtf.to_bfloat16(a), tf.float64)
    sine = mtf.cast(mtf.sin(mtf.to_float(a)), tf.float64)
    return [sine, mtf.to_int32(a), mtf.stop_gradient(half)]


@cases(Input(X, "float32"), Input(shape(y=4, k=3), "float32"))
def single_precision(mesh: Any, a: Any, w: Any) -> Any:
    product = mtf.einsum([a, w], output_shape=shape(x=8, z=3, k=3))
    return [mtf.softmax(product, product.shape[0]), mtf.reduce_sum(mtf.sin(a))]


@cases(Input(X, "bfloat16"), Input(shape(y=4), "bfloat16"), smooth=False)
def half_precision(mesh: Any, a: Any, row: Any) -> Any:
    return [a * row, mtf.reduce_max(a, output_shape=shape(x=8))]
