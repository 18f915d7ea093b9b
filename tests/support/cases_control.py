"""Cases: loops, dependencies, custom gradients, what is watched and printed."""

from typing import Any

import tensorflow as tf
from conformance import Cases, Input, shape

from meshimpl.compat import mtf

cases = Cases()
FIELD = Input(shape(x=8, y=4))


def counted_loop(mesh: Any, times: int, body: Any, *values: Any, **kwargs: Any) -> Any:
    """`body(i, *values)` several times; the last values."""
    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
        lambda i, *_: mtf.less(i, times),
        lambda i, *v: (i + 1, *body(i, *v)),
        [zero, *values],
        **kwargs,
    )[1:]


@cases(FIELD, gradient=False)
def loop_that_moves_data(mesh: Any, a: Any) -> Any:
    return counted_loop(mesh, 3, lambda i, v: [mtf.shift(mtf.sin(v), 1, v.shape[0], True) + v], a)


@cases(FIELD, gradient=False)
def loop_whose_iterations_are_independent(mesh: Any, a: Any) -> Any:
    """Each iteration reduces something of its own: two must not be in flight under one name."""

    def body(i: Any, v: Any) -> Any:
        return [v + mtf.reduce_sum(mtf.cast(i, tf.float64) * mtf.ones_like(a))]

    return counted_loop(mesh, 12, body, a)


@cases(FIELD, gradient=False)
def loop_over_a_sum(mesh: Any, a: Any) -> Any:
    """The next iteration must see the whole sum, not this rank's part."""
    one = mtf.constant(mesh, 1.0, dtype=tf.float64)
    return counted_loop(mesh, 3, lambda i, s: [mtf.reduce_sum(mtf.sin(a * s))], one)


@cases(FIELD, gradient=False)
def loop_that_reads_a_sum_made_before(mesh: Any, a: Any) -> Any:
    total = mtf.reduce_sum(a)
    return [*counted_loop(mesh, 3, lambda i, v: [v + total], a), mtf.sin(total)]


@cases(FIELD, gradient=False)
def loop_until_a_sum_is_reached(mesh: Any, a: Any) -> Any:
    """How often is decided by all ranks together."""
    positive = mtf.abs(a) + 0.1
    return mtf.while_loop(
        lambda v: mtf.less(mtf.reduce_sum(v), 500.0), lambda v: [v * 1.5], [positive]
    )


@cases(FIELD, gradient=False)
def loop_with_accumulators(mesh: Any, a: Any) -> Any:
    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
        lambda i: mtf.less(i, 3),
        lambda i: [i + 1, mtf.reduce_sum(a * mtf.cast(i + 1, tf.float64), output_shape=shape(y=4))],
        [zero],
        has_accumulators=True,
    )[1]


@cases(FIELD)
def dependencies(mesh: Any, a: Any) -> Any:
    """On a sum that is not made yet, and on a tensor."""
    return mtf.depend(mtf.sin(a), [mtf.reduce_sum(a), a])


@cases(FIELD)
def recomputed(mesh: Any, a: Any) -> Any:
    def body(x: Any) -> Any:
        return mtf.shift(mtf.sin(x), 1, x.shape[0], True) * mtf.reduce_sum(x)

    return mtf.recompute_grad(body, [a])


@cases(FIELD)
def with_its_gradient_given(mesh: Any, a: Any) -> Any:
    def grad_fn(explicit_inputs: Any, output_grads: Any, **_: Any) -> Any:
        return [output_grads[0] * mtf.cos(explicit_inputs[0])]

    return mtf.custom_gradient(mtf.sin, grad_fn, [a])


@cases(FIELD)
def watched_and_printed(mesh: Any, a: Any) -> Any:
    printed = mtf.Print(mtf.square(a), [mtf.reduce_sum(a)], "a sum:", first_n=0)
    total = mtf.reduce_sum(printed)
    return [printed, mtf.scalar_summary("total", total).outputs[0]]
