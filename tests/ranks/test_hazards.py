"""What makes ranks wait for each other for ever, each with the guard that stands against it.

Without the guard every test here hangs until its time limit, or fails; tests/test_hazards.py lets
one of them hang.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import SIZE

from meshimpl import ProcessMesh
from meshimpl.compat import mtf
from meshimpl.graph_guards import last_collective
from meshimpl.mesh_function import mesh_function

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(60, method="thread")]
ONES = np.ones([8, 4], np.float32)


def in_a_graph(fn: Callable[[tf.Tensor], Any], x: np.ndarray = ONES) -> Any:
    """`fn(x)` from a graph, built as this package builds them."""

    def build(tensor: tf.Tensor) -> Any:
        result = fn(tensor)
        last = last_collective()
        with tf.control_dependencies([] if last is None else [last]):
            return tf.nest.map_structure(tf.identity, result)

    function = tf.compat.v1.wrap_function(build, [tf.TensorSpec(x.shape, x.dtype)])
    return tf.nest.map_structure(lambda t: t.numpy(), function(tf.constant(x)))


def test_output_ignored_on_one_rank(line: ProcessMesh) -> None:
    """TensorFlow prunes what nobody reads; the ranks that read it would wait."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        total = line.world.allreduce(x)
        return x if line.rank == 0 else total

    np.testing.assert_array_equal(in_a_graph(fn), ONES * (1 if line.rank == 0 else SIZE))


def test_output_ignored_in_the_middle_of_a_chain(line: ProcessMesh) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        first = line.world.shift(x, 1)
        second = line.world.allreduce(x)
        return second + (first if line.rank == SIZE - 1 else 0.0)

    expected = ONES * (SIZE + (line.rank == SIZE - 1))
    np.testing.assert_array_equal(in_a_graph(fn), expected)


def test_equal_collectives_with_equal_inputs(line: ProcessMesh) -> None:
    """TensorFlow merges equal operations, and whether it sees that they are equal may differ."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        other = x if line.rank == 0 else x + 0.0
        return line.world.alltoall(x) + line.world.alltoall(other)

    np.testing.assert_array_equal(in_a_graph(fn), 2 * ONES)
    operations = tf.compat.v1.wrap_function(fn, [tf.TensorSpec([8, 4])]).graph.get_operations()
    collectives = [op for op in operations if op.type.startswith("Horovod")]
    assert len({op.name for op in collectives}) == len(collectives) == (2 if SIZE > 1 else 0)


def test_constant_input_on_one_rank(line: ProcessMesh) -> None:
    """A constant is folded, and with it whatever is computed from it."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        part = tf.ones([8, 4]) if line.rank == 0 else x
        return line.world.allreduce(part * 2.0)

    np.testing.assert_array_equal(in_a_graph(fn), 2 * SIZE * ONES)


def test_all_inputs_constant(line: ProcessMesh) -> None:
    def fn(_: tf.Tensor) -> tf.Tensor:
        return line.world.broadcast(line.world.allreduce(tf.ones([3])), SIZE - 1)

    np.testing.assert_array_equal(in_a_graph(fn), SIZE * np.ones(3))


def test_a_factor_that_is_zero_on_one_rank(line: ProcessMesh) -> None:
    """A zero known while the graph is optimised would take the collective away on that rank."""
    factors = np.arange(SIZE, dtype=np.float32)

    def fn(x: tf.Tensor) -> tf.Tensor:
        mine = line.world.per_rank(factors)
        return line.world.allreduce(x * mine) * mine

    np.testing.assert_array_equal(in_a_graph(fn), ONES * factors.sum() * line.rank)


def test_ranks_that_take_different_branches(line: ProcessMesh) -> None:
    """Rank-dependent choices are made on values, with the same graph on every rank."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        first = line.world.per_rank([rank == 0 for rank in range(SIZE)])
        return line.world.allreduce(tf.where(first, 10.0 * x, x))

    np.testing.assert_array_equal(in_a_graph(fn), ONES * (10 + SIZE - 1))


@pytest.mark.ranks(4)
def test_many_in_flight(mesh: ProcessMesh) -> None:
    """Independent collectives of one shape, on lines and planes: each has a name of its own."""

    def fn(x: tf.Tensor) -> list[tf.Tensor]:
        groups = [mesh.communicator(name) for name in mesh.names] + [mesh.world]
        return [group.allreduce(x * float(i)) for i in range(5) for group in groups]

    found = in_a_graph(fn)
    sizes = [*mesh.shape, SIZE]
    for i, total in enumerate(found):
        np.testing.assert_array_equal(total, ONES * (i // len(sizes)) * sizes[i % len(sizes)])


def test_one_function_twice_without_waiting(line: ProcessMesh) -> None:
    """Its names are in use again while TensorFlow may still run the first call."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        return line.world.allreduce(line.world.shift(x, 1))

    function = tf.compat.v1.wrap_function(fn, [tf.TensorSpec([8, 4])])
    found = [function(tf.constant(ONES * i)) for i in range(20)]
    for i, total in enumerate(found):
        np.testing.assert_array_equal(total.numpy(), ONES * i * SIZE)


def test_an_output_of_a_mesh_function_that_nobody_reads(line: ProcessMesh) -> None:
    """Every rank calls; some look at one output, some at the other, some at the gradient's."""

    @mesh_function(line, "x:row", a=([("x", 8), ("y", 4)], tf.float32))
    def function(graph_mesh: Any, a: Any) -> Any:
        mtf.reduce_sum(mtf.square(a))  # is not even returned
        return mtf.reduce_sum(a), mtf.shift(a, 1, a.shape[0], True)

    total, shifted = function(ONES)
    if line.rank == 0:
        assert total.numpy() == ONES.sum()
    else:
        np.testing.assert_array_equal(shifted.numpy(), ONES[: 8 // SIZE])
    line.barrier()


def test_tensorflow_is_refused_a_gradient(line: ProcessMesh) -> None:
    """What Horovod registers is partly wrong: an error on every rank, eagerly and in a graph."""
    world = line.world
    collectives = [
        world.allreduce,
        world.allgather,
        world.alltoall,
        world.broadcast,
        lambda x: world.shift(x, 1),
        lambda x: world.allreduce(x, "max"),
    ]
    for collective in collectives:
        x = tf.constant(ONES)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(collective(x))
        with pytest.raises(LookupError, match="a collective has no gradient"):
            tape.gradient(total, x)
        with tf.Graph().as_default():
            y = tf.compat.v1.placeholder(tf.float32, [8, 4])
            with pytest.raises(LookupError, match="a collective has no gradient"):
                tf.gradients(tf.reduce_sum(collective(y)), y)
    line.barrier()


def test_an_error_while_building_leaves_nobody_behind(line: ProcessMesh) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        line.world.allreduce(x)
        raise KeyError("half way")

    with pytest.raises(KeyError, match="half way"):
        in_a_graph(fn)
    line.barrier()


def test_graphs_do_not_outlive_their_use(line: ProcessMesh) -> None:
    with tf.Graph().as_default() as graph:
        line.world.allreduce(tf.compat.v1.placeholder(tf.float32, [2]))
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None
