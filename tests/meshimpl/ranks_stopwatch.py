"""The time of collectives, taken inside a graph."""

import time

import numpy as np
import pytest
import tensorflow as tf
from ranks import RANK, SIZE

from meshimpl.compat import mtf
from meshimpl.graph_guards import Stopwatch
from meshimpl.mesh_function import MeshFunction

pytestmark = pytest.mark.ranks(1, 2)


def test_waiting_for_a_late_rank_is_counted(line):
    watch = Stopwatch()
    shape = mtf.Shape([mtf.Dimension("x", SIZE)])
    build = lambda _, x: [mtf.reduce_sum(x), mtf.reduce_max(x)]  # noqa: E731
    function = MeshFunction(build, line, "x:row", {"x": (shape, tf.float64)}, stopwatch=watch)
    x = np.arange(float(SIZE))
    total, largest = function(x)
    assert (float(total), float(largest)) == (sum(range(SIZE)), SIZE - 1)
    watch.lap()
    line.barrier()
    if RANK == 0:
        time.sleep(0.3)
    function(x)
    seconds = watch.lap()
    assert seconds["alltoall"] == seconds["broadcast"] == 0
    if SIZE == 1:
        assert seconds["allreduce"] == 0
    else:
        assert seconds["allreduce"] > (0.0 if RANK == 0 else 0.25)
    assert watch.lap() == dict.fromkeys(seconds, 0.0)


def test_collectives_of_the_gradient_are_counted(line):
    watch = Stopwatch()
    shape = mtf.Shape([mtf.Dimension("x", SIZE)])
    build = lambda _, x: mtf.square(mtf.reduce_sum(x))  # noqa: E731
    function = MeshFunction(build, line, "x:row", {"x": (shape, tf.float64)}, stopwatch=watch)
    x = function.block_of("x", np.arange(float(SIZE)))
    for late in (False, True):  # built, then timed
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        line.barrier()
        watch.lap()
        if late and RANK == 0:
            time.sleep(0.3)
        tape.gradient(y, x)
    assert watch.lap()["allreduce"] > (0.25 if RANK else 0.0) or SIZE == 1


def test_without_a_stopwatch_graphs_have_no_clock(line):
    shape = mtf.Shape([mtf.Dimension("x", SIZE)])
    function = MeshFunction(
        lambda _, x: mtf.reduce_sum(x), line, "x:row", {"x": (shape, tf.float64)}
    )
    function(np.arange(float(SIZE)))
    operations = [op.type for op in function._forward.graph.get_operations()]
    assert "Timestamp" not in operations
