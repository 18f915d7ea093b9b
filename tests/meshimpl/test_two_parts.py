"""A gradient in two parts: what tapes keep, and what they refuse."""

import weakref

import pytest
import tensorflow as tf

from meshimpl.tapes import InTwoParts, with_gradient


def squared(x, alive=None):
    """x^2, with a gradient that begins from the result, as for an evolution."""
    parts = InTwoParts("squared", x)
    result = tf.stop_gradient(x) ** 2
    if alive is not None:
        alive += [weakref.ref(x), weakref.ref(result)]
    del x

    def begin(dy):
        end = [result]
        return lambda: [2 * tf.sqrt(end.pop()) * dy]

    return parts.outputs([result], begin)[0]


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


def test_several_under_one_tape():
    """Each takes its own cotangents, in whatever order the tape comes to them."""
    x, y = tf.constant([1.0, 3.0]), tf.constant([2.0, 5.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        loss = squared(x * 2) * squared(y) + squared(squared(x))
    for _ in range(2):
        by_x, by_y = tape.gradient(loss, [x, y])
        assert by_x.numpy() == pytest.approx([8 * 1 * 4 + 4, 8 * 3 * 25 + 4 * 27])
        assert by_y.numpy() == pytest.approx([2 * 2 * 4, 2 * 5 * 36])


@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_tape_keeps(persistent):
    """Neither the input nor, after the first part, the result."""
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


def test_what_a_function_returned_is_not_kept():
    alive = []

    @with_gradient
    def doubled(x):
        results = [x * 2]
        alive.append(weakref.ref(results[0]))
        return results, lambda dy: [2 * dy]

    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(doubled(x)[0])
    assert alive[0]() is None
    assert tape.gradient(y, x).numpy() == pytest.approx([2.0, 2.0])


def test_variables():
    """They may be inputs; others would have no gradient."""
    x, weight = tf.Variable([1.0, 3.0]), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(squared(x))
    assert tape.gradient(y, x).numpy() == pytest.approx([2.0, 6.0])

    @with_gradient
    def doubled(x):
        return [2 * tf.stop_gradient(x)], lambda dy: [2 * dy]

    with tf.GradientTape() as tape:
        y = tf.reduce_sum(doubled(x)[0])
    assert tape.gradient(y, x).numpy() == pytest.approx([2.0, 2.0])

    @with_gradient
    def weighted(x):
        return [x * weight], lambda dy: [dy * weight]

    with tf.GradientTape(), pytest.raises(TypeError, match="weighted uses variables that are not"):
        weighted(tf.constant([1.0]))


def test_a_gradient_that_fails_leaves_nothing_behind():
    x, fails = tf.constant([1.0, 3.0]), [True]

    def begin(dy):
        def finish():
            if fails:
                raise FloatingPointError(fails.pop())
            return [3 * x**2 * dy]

        return finish

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        parts = InTwoParts("cubed", x)
        y = tf.reduce_sum(parts.outputs([x**3], begin)[0])
    with pytest.raises(FloatingPointError):
        tape.gradient(y, x)
    assert tape.gradient(y, x).numpy() == pytest.approx([3.0, 27.0])
    assert not parts._second_part


def test_a_gradient_that_fails_between_the_parts():
    """Another one of the same tape fails once: what was begun gives way to the next."""
    x, fails = tf.constant([1.0, 3.0]), [True]

    def begin(dy):
        if len(begun) == 1 and fails:
            raise FloatingPointError(fails.pop())
        begun.append(True)
        return lambda: [3 * x**2 * dy]

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        parts = [InTwoParts(name, x) for name in "ab"]
        y = tf.reduce_sum(sum(each.outputs([x**3], begin)[0] for each in parts))
    for works in (False, True):
        begun = []
        if works:
            assert tape.gradient(y, x).numpy() == pytest.approx([6.0, 54.0])
        else:
            with pytest.raises(FloatingPointError):
                tape.gradient(y, x)
    assert not any(each._second_part for each in parts)


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


def test_a_tape_that_begins_after_it_is_refused():
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(squared(x))
    with tf.GradientTape() as later:
        later.watch(x)
        slope = tape.gradient(y, x)
    with pytest.raises(LookupError, match="squared has no second derivative"):
        later.gradient(slope, x)


def test_forward_mode_is_refused():
    x = tf.constant([1.0, 3.0])
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
        with pytest.raises(LookupError, match="none in forward mode"):
            squared(x)
