"""Gradients against central differences."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf


def slope_at_zero(function, step):
    """The slope of a function of one number, by a fourth-order central difference."""
    values = [float(function(n * step)) for n in (-2, -1, 1, 2)]
    return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)


def check_derivative(function, value, step, rtol=1e-6):
    """The gradient of a scalar function along a random direction, by central differences.

    The direction is the same in every run, whichever tests ran before.
    """
    value = np.asarray(value, np.float64)
    direction = np.random.default_rng(12).normal(size=value.shape)
    with tf.GradientTape() as tape:
        variable = tf.constant(value)
        tape.watch(variable)
        result = function(variable)
    gradient = tf.convert_to_tensor(tape.gradient(result, variable))
    along = float(tf.reduce_sum(gradient * direction))
    ahead, behind = (float(function(value + sign * step * direction)) for sign in (1, -1))
    assert along == pytest.approx((ahead - behind) / (2 * step), rel=rtol)
