"""A gradient in two parts: what tapes keep, and what they refuse."""

import weakref

import pytest
import tensorflow as tf

from meshimpl.graph_guards import in_two_parts, with_gradient


def squared(x, alive=None):
    """x^2, whose gradient begins from the result, as that of an evolution does."""
    leave = in_two_parts("squared", x)
    result = tf.stop_gradient(x) ** 2
    if alive is not None:
        alive += [weakref.ref(x), weakref.ref(result)]
    del x

    def begin(dy):
        end = [result]
        return lambda: [2 * tf.sqrt(end.pop()) * dy]

    return leave([result], begin)[0]


@pytest.mark.parametrize("graph", [False, True])
def test_gradient(graph):
    def slopes(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = squared(x * 2) + x
            two = y * 3.0
        return tape.gradient(y, x), tape.gradient(two, x), tape.gradient(y, x)

    found = (tf.function(slopes) if graph else slopes)(tf.constant([1.0, 3.0]))
    for slope, factor in zip(found, (1, 3, 1), strict=True):
        assert slope.numpy() == pytest.approx([factor * 9, factor * 25])


@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_tape_keeps(persistent):
    """Neither the input, nor, after the first part, the result; nor what a function returned."""
    alive = []

    @with_gradient
    def watched(x):
        def gradient(dy):
            alive.append(alive[1]() is not None)
            return [dy]

        return [x + 0.0], gradient

    x = tf.constant([1.0, 3.0])
    with tf.GradientTape(persistent=persistent) as tape:
        tape.watch(x)
        y = tf.reduce_sum(squared(*watched(x * 2), alive))
    assert alive[0]() is None
    assert alive[1]() is not None
    assert tape.gradient(y, x).numpy() == pytest.approx([8.0, 24.0])
    assert alive[2] is persistent


@pytest.mark.parametrize("loss", ["linear", "squared"])
@pytest.mark.parametrize("by", ["input", "cotangent"])
def test_a_second_derivative_is_refused(loss, by):
    x, weight = tf.constant([1.0, 3.0]), tf.constant(2.0)
    with tf.GradientTape() as outer:
        outer.watch(x if by == "input" else weight)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = squared(x)
            y = weight * tf.reduce_sum(y if loss == "linear" else y * y)
        slope = inner.gradient(y, x)
    with pytest.raises(LookupError, match="squared has no second derivative"):
        outer.gradient(slope, x if by == "input" else weight)
