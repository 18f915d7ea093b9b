"""What makes ranks wait for each other for ever, each with the guard that stands against it.

Without the guard the tests of ranks that wait hang until their time limit, or fail;
test_hazards.py lets one of them hang.
"""

from __future__ import annotations

import gc
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, process_mesh

from meshimpl import CollectiveError, ProcessMesh, engine, graph_guards, mesh_graph
from meshimpl.compat import mtf
from meshimpl.graph_guards import in_order, last_collective
from meshimpl.mesh_function import mesh_function
from meshimpl.mesh_graph import MeshProgram, one_graph
from meshimpl.traffic import added, so_far

pytestmark = [pytest.mark.ranks(2), pytest.mark.grappler, pytest.mark.timeout(60, method="thread")]
ONES = np.ones([8, 4], np.float32)
EXCHANGES = ("HorovodAlltoall", "MeshimplExchange")
FIELD = ([("x", 8), ("y", 4)], tf.float32)


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


@pytest.mark.usefixtures("each_engine")
def test_a_loop_has_its_place_among_collectives(line: ProcessMesh) -> None:
    """Its collectives are another graph's; without names, equal ones would pair as they come."""

    def fn(x: tf.Tensor) -> list[tf.Tensor]:
        def body(i: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
            return [i + 1, line.world.shift(y, 1) + 1.0]

        def build() -> list[tf.Tensor]:
            start = [tf.constant(0), 3.0 * x]
            loop = tf.while_loop(lambda i, _: i < 3, body, start, parallel_iterations=1)
            line.world.shift(x, 1)  # which nobody reads
            return loop

        first = line.world.shift(x, 1)
        second = in_order(build)[1]
        return [first, second, line.world.shift(2.0 * x, 1)]

    first, second, third = in_a_graph(fn, ONES * (1 + line.rank))
    source, third_back = 1 + (line.rank - 1) % SIZE, 1 + (line.rank - 3) % SIZE
    np.testing.assert_array_equal(first, ONES * source)
    np.testing.assert_array_equal(second, ONES * (3 * third_back + 3))
    np.testing.assert_array_equal(third, ONES * 2 * source)
    graph = tf.compat.v1.wrap_function(fn, [tf.TensorSpec([8, 4])]).graph
    exchanges = [op for op in graph.get_operations() if op.type in EXCHANGES]
    (loop,) = [op for op in graph.get_operations() if op.type.endswith("While")]
    before, inside, after = exchanges
    assert comes_after(loop, before) and comes_after(after, loop) and comes_after(after, inside)


def comes_after(later: tf.Operation, earlier: tf.Operation) -> bool:
    """Whether an operation waits for another, by data or control."""
    seen: set[str] = set()
    waiting = [later]
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            waiting += [*op.control_inputs, *(x.op for x in op.inputs)]
    return earlier.name in seen


def test_output_ignored_in_the_middle_of_a_chain(line: ProcessMesh) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        first = line.world.shift(x, 1)
        second = line.world.allreduce(x)
        return second + (first if line.rank == SIZE - 1 else 0.0)

    expected = ONES * (SIZE + (line.rank == SIZE - 1))
    np.testing.assert_array_equal(in_a_graph(fn), expected)


@pytest.mark.usefixtures("each_engine")
def test_equal_collectives_with_equal_inputs(line: ProcessMesh) -> None:
    """TensorFlow merges equal operations, and whether it sees that they are equal may differ."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        other = x if line.rank == 0 else x + 0.0
        return line.world.alltoall(x) + line.world.alltoall(other)

    np.testing.assert_array_equal(in_a_graph(fn), 2 * ONES)
    operations = tf.compat.v1.wrap_function(fn, [tf.TensorSpec([8, 4])]).graph.get_operations()
    collectives = [op for op in operations if op.type.startswith(("Horovod", "Meshimpl"))]
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


def test_branches_that_differ_between_ranks(line: ProcessMesh) -> None:
    """A choice of collectives is refused on every rank; one of values is the same graph."""
    first = line.world.per_rank([rank == 0 for rank in range(SIZE)])

    @mesh_function(line, "x:row", a=FIELD)
    def of_collectives(_: Any, a: Any) -> Any:
        return mtf.shift(a, 1, a.shape[0], True) if line.rank == 0 else mtf.reduce_max(a)

    with pytest.raises(
        CollectiveError, match=r"rank 0: .*: 1, .*alltoall.*\n.*rank 1: .*: 1, .*allreduce"
    ):
        of_collectives(ONES)

    @mesh_function(line, "x:row", a=FIELD, first=([], tf.bool))
    def of_values(_: Any, a: Any, first: Any) -> Any:
        return mtf.reduce_sum(mtf.where(first, 10.0 * a, a))

    assert of_values(ONES, first).numpy() == ONES.sum() * (10 + SIZE - 1) / SIZE


@pytest.mark.ranks(4)
def test_groups_may_build_more_than_others_before_all_meet() -> None:
    """One replica builds an operation that the other does not; names then agree among all."""
    mesh = process_mesh("replica:2,row:2")
    section, ahead = mesh.without("replica"), mesh.coordinate("replica") == 1

    def total_of(group: ProcessMesh, layout: str) -> Any:
        return mesh_function(group, layout, a=FIELD)(lambda _, a: mtf.reduce_sum(a))

    for _ in range(2 * ahead):
        assert total_of(section, "x:row")(ONES).numpy() == ONES.sum()
        in_a_graph(section.world.allreduce)
    assert total_of(mesh, "x:replica;y:row")(ONES).numpy() == ONES.sum()
    np.testing.assert_array_equal(in_a_graph(mesh.world.allreduce), SIZE * ONES)


def test_every_collective_has_a_name_of_its_own(line: ProcessMesh) -> None:
    """The same on every rank, and no other function's: no two of one shape can pair."""

    def collectives_of(function: Any) -> list[str]:
        function(ONES)
        operations = function._forward.graph.get_operations()
        return [op.name for op in operations if op.type.startswith(("Horovod", "Meshimpl"))]

    def build(_: Any, a: Any) -> Any:
        return [mtf.reduce_max(a * float(i)) for i in range(3)]

    functions = [mesh_function(line, "x:row", a=FIELD)(build) for _ in range(2)]
    found = [name for function in functions for name in collectives_of(function)]
    assert len(set(found)) == len(found) == 6
    digest = tf.constant(zlib.crc32(" ".join(found).encode()), tf.int64)
    assert line.world.allreduce(digest, "max") == line.world.allreduce(digest, "min")


def test_collectives_of_other_lines_have_other_names() -> None:
    """In graphs that no mesh function has made: as many before, and yet they do not pair."""
    ranks = tuple(range(SIZE))
    first, second, third = (graph_guards.CollectiveNames() for _ in range(3))
    one = first.next("allreduce", "allreduce sum of float32 [3]", ranks)
    other = second.next("allreduce", "allreduce sum of float32 [3]", ranks)
    assert one.endswith("_0") and other.endswith("_0") and one != other
    both = [x.next("allreduce", "sum", ranks) for x in (second, third)]
    assert both[0].removesuffix("_1") == both[1].removesuffix("_0")


def test_a_mesh_function_whose_collective_one_rank_does_not_need(line: ProcessMesh) -> None:
    """Its results wait for the last collective: TensorFlow prunes what no result needs."""

    @mesh_function(line, "x:row", a=FIELD)
    def function(_: Any, a: Any) -> Any:
        shifted = mtf.shift(a, 1, a.shape[0], True)
        return mtf.sin(a) if line.rank == 0 else shifted

    block = ONES[: 8 // SIZE]
    np.testing.assert_allclose(function(ONES), np.sin(block) if line.rank == 0 else block)
    line.barrier()


@pytest.mark.ranks(1, 2)
def test_a_mesh_function_inside_a_graph(line: ProcessMesh) -> None:
    """Refused on several ranks, at its first call and when it has been built; a part on one."""

    @mesh_function(line, "x:row", a=FIELD)
    def function(_: Any, a: Any) -> Any:
        return mtf.reduce_sum(a)

    outer = tf.function(lambda x: 2.0 * function(x), autograph=False)
    block = tf.constant(ONES[: 8 // SIZE])
    for _ in range(2):
        if SIZE == 1:
            assert outer(block).numpy() == 2 * ONES.sum()
        else:
            with pytest.raises(RuntimeError, match="call it eagerly, outside tf.function"):
                outer(block)
        assert function(ONES).numpy() == ONES.sum()


@pytest.mark.ranks(1, 2)
def test_a_program_is_one_graph_of_mesh_functions(line: ProcessMesh) -> None:
    """Called in a loop too: each result as from the functions one by one, and each call counted."""

    @mesh_function(line, "x:row", a=FIELD)
    def shifted(_: Any, a: Any) -> Any:
        return mtf.shift(a, 1, a.shape[0], True)

    @mesh_function(line, "x:row", a=FIELD)
    def total(_: Any, a: Any) -> Any:
        return mtf.reduce_sum(a)

    def thrice(x: tf.Tensor) -> list[tf.Tensor]:
        def body(i: tf.Tensor, x: tf.Tensor, s: tf.Tensor) -> list[tf.Tensor]:
            return [i + 1, shifted(x) * 2.0, s + total(x)]

        _, x, s = tf.while_loop(
            lambda i, *_: i < 3, body, [tf.constant(0), x, 0.0], parallel_iterations=1
        )
        return [x, s]

    whole = np.arange(ONES.size, dtype=np.float32).reshape(ONES.shape)
    begin, rows = line.rank * (8 // SIZE), 8 // SIZE
    block = tf.constant(whole[begin : begin + rows])
    program = MeshProgram(thrice, line, "three times")
    for _ in range(2):  # when it is built, and again
        before = so_far()
        x, s = program(block)
        np.testing.assert_array_equal(x, 8 * np.roll(whole, 3, axis=0)[begin : begin + rows])
        assert s.numpy() == 7 * whole.sum()
    sent = added(so_far(), before, -1)
    if SIZE > 1:
        assert sum(tally.collectives for tally in sent.values()) == 3 * 2


@pytest.mark.ranks(1, 2)
def test_a_function_that_is_no_graph_stays_one(line: ProcessMesh) -> None:
    """With a warning; and one that is a graph gives its own error."""
    if SIZE > 1:
        assert one_graph(tf.sin, line) is tf.sin
        return

    def by_numpy(x: tf.Tensor) -> tf.Tensor:
        return tf.constant(2 * x.numpy())

    with pytest.warns(UserWarning, match="step by step, not as one graph: .*numpy"):
        assert one_graph(by_numpy, line)(tf.constant(2.0)).numpy() == 4.0

    def by_value(x: tf.Tensor) -> tf.Tensor:
        if tf.get_static_value(x) is None:
            raise ValueError("x has no value yet")
        return 3.0 * x

    with pytest.warns(UserWarning, match="step by step, not as one graph: x has no value yet"):
        assert one_graph(by_value, line)(tf.constant(2.0)).numpy() == 6.0

    def checked(x: tf.Tensor) -> tf.Tensor:
        if not tf.executing_eagerly():
            tf.debugging.Assert(x < 3.0, ["x is large for a graph"])
        elif x > 5.0:
            raise FloatingPointError("x is large")
        return 2.0 * x

    whole = one_graph(checked, line)
    for number in (1.0, 4.0):
        assert whole(tf.constant(number)).numpy() == 2 * number
    with pytest.raises(FloatingPointError, match="^x is large$"):
        whole(tf.constant(6.0))
    with pytest.warns(UserWarning, match="not as one graph: x is large for a graph"):
        for _ in range(mesh_graph.REFUSALS - 1):
            assert whole(tf.constant(4.0)).numpy() == 8.0
    picked = one_graph(lambda place: tf.gather(tf.range(3), place), line)
    assert picked(tf.constant(2)).numpy() == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="3 is not in"):
        picked(tf.constant(3))


def test_eager_collectives_that_are_not_the_same(line: ProcessMesh) -> None:
    """Of one kind and shape or not, small or large: refused on every rank, the job continues."""
    world, large = line.world, tf.zeros([1000])
    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: line.barrier(), lambda: world.allreduce(tf.constant(0))),
        (
            lambda: world.allreduce(tf.constant(1.0)),
            lambda: world.allreduce(tf.constant(2.0)),
        ),
        (lambda: world.allreduce(large), lambda: world.broadcast(large)),
        (lambda: world.allreduce(large), lambda: line.barrier()),
        (lambda: world.allreduce(tf.zeros([40_000])), lambda: world.allreduce(large)),
        (lambda: line.barrier(), lambda: mesh_function(line, "")(lambda m: mtf.ones(m, []))()),
    ]
    for pair in pairs:
        with pytest.raises(CollectiveError, match=r"rank 0: .*hazards:\d+\n  rank 1: "):
            pair[min(line.rank, 1)]()
    if line.rank == 0:
        line.barrier("one barrier, called at two lines")
    else:
        line.barrier("one barrier, called at two lines")
    assert world.allreduce(tf.constant(1)) == SIZE


@pytest.mark.parametrize(("size", "messages"), [(1, 0), (1000, 0), (40_000, 1)])
def test_small_tensors_travel_with_the_meeting(
    line: ProcessMesh, monkeypatch: pytest.MonkeyPatch, size: int, messages: int
) -> None:
    """A reduction of up to 64 KiB of all ranks together needs no message of its own."""
    made: list[str] = []
    reduce = engine.current().reduce

    def counted(*arguments: Any) -> tf.Tensor:
        made.append(arguments[-1])
        return reduce(*arguments)

    monkeypatch.setattr(engine.current(), "reduce", counted)
    mine = np.arange(size, dtype=np.float64) + 0.5 * line.rank
    total = line.world.allreduce(tf.constant(mine))
    np.testing.assert_array_equal(total, SIZE * np.arange(size) + 0.25 * SIZE * (SIZE - 1))
    assert len(made) == messages


@pytest.mark.usefixtures("each_engine")
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


def test_an_error_while_building_on_one_rank(line: ProcessMesh) -> None:
    """It is an error on all at once; caught, the ranks go on, and may build again."""
    wrong = [line.rank == SIZE - 1]

    @mesh_function(line, "x:row", a=FIELD)
    def function(_: Any, a: Any) -> Any:
        total = mtf.reduce_max(a)
        if wrong[0]:
            raise KeyError("half way")
        return mtf.reduce_sum(a) + total

    begin = time.monotonic()
    error = (
        (KeyError, "half way") if wrong[0] else (CollectiveError, f"on rank {SIZE - 1}: KeyError")
    )
    with pytest.raises(error[0], match=error[1]):
        function(ONES)
    assert time.monotonic() - begin < 20
    line.barrier()
    wrong[0] = False
    assert function(ONES).numpy() == ONES.sum() + 1


def test_graphs_do_not_outlive_their_use(line: ProcessMesh) -> None:
    with tf.Graph().as_default() as graph:
        line.world.allreduce(tf.compat.v1.placeholder(tf.float32, [2]))
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None
