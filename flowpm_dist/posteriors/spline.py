"""Monotonic rational-quadratic splines (Gregory and Delbourgo 1982; arXiv:1906.04032)."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

REACH = 5.0
"""A spline bends values from -REACH to REACH and leaves those beyond as they are."""
LEAST_SHARE = 1e-3
"""Of a bin in width and height, over 2 REACH."""
LEAST_SLOPE = 1e-3

Knots = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Left and lower ends of the bins, and slopes there: [..., bin + 1] each."""


def spline_parameters(bins: int) -> int:
    """Returns how many numbers determine a spline of so many bins."""
    return 3 * bins - 1


def parameters_of_spline(raw: tf.Tensor, bins: int) -> Knots:
    """Returns the knots that any numbers [..., spline_parameters(bins)] stand for; 0: identity."""
    widths, heights, slopes = tf.split(raw, [bins, bins, bins - 1], axis=-1)
    one = tf.constant(np.log(np.expm1(1 - LEAST_SLOPE)), raw.dtype)  # a slope of 1 at 0
    inner = LEAST_SLOPE + tf.nn.softplus(slopes + one)
    end = tf.ones_like(raw[..., :1])
    return _ends(widths, bins), _ends(heights, bins), tf.concat([end, inner, end], axis=-1)


def _ends(raw: tf.Tensor, bins: int) -> tf.Tensor:
    shares = LEAST_SHARE + (1 - LEAST_SHARE * bins) * tf.nn.softmax(raw)
    inner = 2 * REACH * tf.cumsum(shares, axis=-1)[..., :-1] - REACH
    end = REACH * tf.ones_like(raw[..., :1])
    return tf.concat([-end, inner, end], axis=-1)


def _bin_of(values: tf.Tensor, ends: tf.Tensor, knots: Knots) -> list[tf.Tensor]:
    """Returns left, width, lower end, height and both slopes of the bin that holds each value."""
    number = tf.reduce_sum(tf.cast(values[..., tf.newaxis] >= ends[..., 1:-1], tf.int32), axis=-1)
    here = tf.one_hot(number, ends.shape[-1] - 1, dtype=values.dtype)

    def at(numbers: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(here * numbers, axis=-1)

    x, y, slopes = knots
    left, lower = at(x[..., :-1]), at(y[..., :-1])
    width, height = at(x[..., 1:]) - left, at(y[..., 1:]) - lower
    return [left, width, lower, height, at(slopes[..., :-1]), at(slopes[..., 1:])]


def spline(values: tf.Tensor, knots: Knots) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the spline of values [...], and the logarithm of its slope [...]."""
    inside = tf.abs(values) < REACH
    kept = tf.clip_by_value(values, -REACH, REACH)
    left, width, lower, height, begin, end = _bin_of(kept, knots[0], knots)
    mean = height / width
    share = (kept - left) / width
    both = share * (1 - share)
    below = mean + (begin + end - 2 * mean) * both
    found = lower + height * (mean * share**2 + begin * both) / below
    above = end * share**2 + 2 * mean * both + begin * (1 - share) ** 2
    log_slope = 2 * tf.math.log(mean) + tf.math.log(above) - 2 * tf.math.log(below)
    return tf.where(inside, found, values), tf.where(inside, log_slope, tf.zeros_like(values))


def inverse_spline(values: tf.Tensor, knots: Knots) -> tf.Tensor:
    """Returns what the spline takes to the values [...]."""
    inside = tf.abs(values) < REACH
    kept = tf.clip_by_value(values, -REACH, REACH)
    left, width, lower, height, begin, end = _bin_of(kept, knots[1], knots)
    mean = height / width
    offset = kept - lower
    bend = offset * (begin + end - 2 * mean)
    a, b, c = height * (mean - begin) + bend, height * begin - bend, -mean * offset
    root = tf.sqrt(tf.maximum(b**2 - 4 * a * c, 0.0))
    share = 2 * c / (-b - root)
    return tf.where(inside, left + share * width, values)
