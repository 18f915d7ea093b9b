"""Differentiable statistics as parts of a `tf.function` on one rank."""

import numpy as np
import pytest
import tensorflow as tf

from flowpm_dist import statistics
from flowpm_dist.grid.box import Box
from meshimpl import ProcessMesh

EDGES = [0.0, 0.8, 1.1, 1.6, 3.0]
STATISTICS = {
    "power": statistics.binned_power,
    "multipoles": statistics.binned_multipoles,
    "wedges": lambda field, box: statistics.binned_wedges(field, box, wedges=[0.0, 1.0]),
    "cross power": lambda field, box: statistics.binned_compare(field, field[::-1], box).cross,
    "bispectrum": statistics.binned_bispectrum,
    "histogram": lambda field, box: statistics.soft_histogram(field, box, EDGES)[1:] ** 2,
}


@pytest.mark.parametrize("name", STATISTICS)
def test_value_and_gradient_are_those_of_eager_calls(name):
    """The graph comes first, of a box that no other test has: nothing is known from before."""
    n = 6 + 2 * list(STATISTICS).index(name)
    box = Box((n, n, n), (40.0, 40.0, 40.0), ProcessMesh("row:1"), tf.float64)
    field = 1 + 0.3 * tf.random.stateless_normal([n, n, n], [1, 2], dtype=tf.float64)

    def value_and_gradient(field):
        with tf.GradientTape() as tape:
            tape.watch(field)
            value = STATISTICS[name](field, box)
            loss = tf.reduce_sum(value)
        return value, tape.gradient(loss, field)

    graph = tf.function(value_and_gradient, autograph=False)
    for one, other in zip(graph(field), value_and_gradient(field), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13 * np.abs(other).max())
