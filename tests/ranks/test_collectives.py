"""Every collective against numpy, for every dtype, eagerly and in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import Communicator, ProcessMesh
from meshimpl.graph_guards import last_collective

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.every_split]

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]
ALL = [*FLOATS, *INTEGERS, "complex64", "complex128", "bool"]
SHAPE = (4, 3)


def parts(group: Communicator, dtype: str, shape: Sequence[int] = SHAPE) -> list[np.ndarray]:
    """What each rank of a group puts in: small whole numbers, which every dtype adds exactly."""
    np_dtype = tf.as_dtype(dtype).as_numpy_dtype
    found = []
    for rank in group.ranks:
        rng = np.random.default_rng(rank)
        values = rng.integers(0, 9, shape)
        if dtype.startswith("complex"):
            values = values + 1j * rng.integers(0, 9, shape)
        found.append((values % 2 if dtype == "bool" else values).astype(np_dtype))
    return found


def both_ways(fn: Callable[..., Any], *arrays: np.ndarray) -> list[Any]:
    """`fn` of tensors, eagerly, and in a graph whose results wait for its last collective."""
    eager = fn(*[tf.constant(a) for a in arrays])

    def build(*tensors: tf.Tensor) -> Any:
        result = fn(*tensors)
        last = last_collective()
        with tf.control_dependencies([] if last is None else [last]):
            return tf.nest.map_structure(tf.identity, result)

    specs = [tf.TensorSpec(a.shape, tf.constant(a).dtype) for a in arrays]
    graph = tf.compat.v1.wrap_function(build, specs)(*[tf.constant(a) for a in arrays])
    return [tf.nest.map_structure(lambda t: t.numpy(), found) for found in (eager, graph)]


def check(fn: Callable[..., Any], mine: np.ndarray, expected: np.ndarray) -> None:
    for found in both_ways(fn, mine):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def groups(mesh: ProcessMesh) -> list[Communicator]:
    """The lines of each axis, the planes, and this rank alone."""
    return [*(mesh.communicator(name) for name in mesh.names), mesh.world, mesh.communicator()]


@pytest.mark.parametrize("dtype", ALL)
def test_allreduce(mesh: ProcessMesh, dtype: str) -> None:
    for group in groups(mesh):
        every = parts(group, dtype)
        total = {"bool": np.logical_or}.get(dtype, np.add)
        reductions = {"sum": total.reduce(every).astype(every[0].dtype)}
        if not dtype.startswith("complex"):
            reductions |= {"max": np.maximum.reduce(every), "min": np.minimum.reduce(every)}
        if dtype not in [*INTEGERS, "bool"]:
            reductions["mean"] = total.reduce(every) / np.array(group.size, every[0].dtype)
        for name, expected in reductions.items():
            check(lambda x, n=name, g=group: g.allreduce(x, n), every[group.index], expected)


@pytest.mark.parametrize("dtype", ALL)
def test_moves(mesh: ProcessMesh, dtype: str) -> None:
    """Allgather, alltoall, broadcast, permute and shift."""
    for group in groups(mesh):
        n, k = group.size, group.index
        every = parts(group, dtype)
        check(lambda x, g=group: g.allgather(x), every[k], np.concatenate(every))
        check(lambda x, g=group: g.allgather(x, axis=1, stack=True), every[k], np.stack(every, 1))
        check(lambda x, g=group: g.broadcast(x, g.size - 1), every[k], every[-1])
        # The first and the last place swap what they have, and nobody sends to the others.
        sources = [{0: n - 1, n - 1: 0}.get(place) for place in range(n)]
        permuted = np.zeros_like(every[0]) if sources[k] is None else every[sources[k]]
        check(lambda x, g=group, s=sources: g.permute(x, s), every[k], permuted)
        check(lambda x, g=group: g.shift(x, 1), every[k], every[(k - 1) % n])
        long = parts(group, dtype, (2 * n, 3))
        moved = np.concatenate([p[2 * k : 2 * k + 2] for p in long])
        check(lambda x, g=group: g.alltoall(x), long[k], moved)


def test_allgather_joins_along_any_axis(mesh: ProcessMesh) -> None:
    for group in groups(mesh):
        every = parts(group, "float32", (2, 3, 4))
        for axis in (0, 1, 2):
            for stack, join in ((False, np.concatenate), (True, np.stack)):
                check(
                    lambda x, g=group, a=axis, s=stack: g.allgather(x, a, stack=s),
                    every[group.index],
                    join(every, axis),
                )


@pytest.mark.parametrize("wrap", [True, False])
def test_shift_by_any_distance(mesh: ProcessMesh, wrap: bool) -> None:
    for group in groups(mesh):
        n, k, every = group.size, group.index, parts(group, "int32")
        for offset in range(-n - 1, n + 2):
            source = (k - offset) % n if wrap else k - offset
            inside = 0 <= source < n
            expected = every[source] if inside else np.zeros_like(every[0])
            check(lambda x, g=group, o=offset: g.shift(x, o, wrap=wrap), every[k], expected)


def test_permute_from_one_to_all_and_from_none(mesh: ProcessMesh) -> None:
    for group in groups(mesh):
        n, k, every = group.size, group.index, parts(group, "complex64")
        zeros = np.zeros_like(every[0])
        plans = [
            [n - 1] * n,
            [None] * n,
            list(range(n)),
            [0, *[None] * (n - 1)],
            [max(0, place - 1) for place in range(n)],
        ]
        for plan in plans:
            expected = zeros if plan[k] is None else every[plan[k]]
            check(lambda x, g=group, p=plan: g.permute(x, p), every[k], expected)


def test_exchange_with_both_neighbours(mesh: ProcessMesh) -> None:
    """Also where both neighbours are one rank, or this rank itself."""
    for group in groups(mesh):
        n, k = group.size, group.index
        for dtype in ("float32", "complex128"):
            back = parts(group, dtype)
            forth = [x + np.array(10, x.dtype) for x in back]
            for distance in range(1, n + 2):
                for found in both_ways(
                    lambda a, b, g=group, d=distance: g.exchange_neighbours(a, b, d),
                    back[k],
                    forth[k],
                ):
                    np.testing.assert_array_equal(found[0], forth[(k - distance) % n])
                    np.testing.assert_array_equal(found[1], back[(k + distance) % n])


def test_alltoall_of_unequal_pieces(mesh: ProcessMesh) -> None:
    for group in groups(mesh):
        n, k = group.size, group.index
        counts = np.array([[(i + 2 * j) % 3 for j in range(n)] for i in range(n)], np.int32)
        if n == 1:
            counts[:] = 2
        sent = [np.arange(row.sum(), dtype=np.float64) + 100 * i for i, row in enumerate(counts)]
        pieces = [np.split(s, np.cumsum(row)[:-1]) for s, row in zip(sent, counts, strict=True)]
        expected = np.concatenate([p[k] for p in pieces])
        check(lambda x, g=group, c=counts[k]: g.alltoallv(x, tf.constant(c)), sent[k], expected)


def test_empty_tensors_and_scalars(line: ProcessMesh) -> None:
    world = line.world
    assert world.allreduce(tf.constant(2.0)).numpy() == 2.0 * line.size
    assert world.shift(tf.constant(line.rank), 1).numpy() == (line.rank - 1) % line.size
    assert world.allreduce(tf.zeros([0, 3])).shape == (0, 3)


def test_wrong_arguments(line: ProcessMesh) -> None:
    """Refused on every rank alike, before anything is sent."""
    world = line.world
    with pytest.raises(ValueError, match="product"):
        world.allreduce(tf.constant(1.0), "product")
    with pytest.raises(ValueError, match="sources are needed"):
        world.permute(tf.constant(1.0), [None] * (line.size + 1))
    with pytest.raises(ValueError, match="not in the group"):
        world.permute(tf.constant(1.0), [line.size] * line.size)
    with pytest.raises(ValueError, match="root"):
        world.broadcast(tf.constant(1.0), line.size)
    with pytest.raises(ValueError, match="not in the group"):
        Communicator((0, 1), 2)
    with pytest.raises(ValueError, match="must increase"):
        Communicator((1, 0), 0)


@pytest.mark.ranks(2, 4)
def test_reductions_without_a_meaning(line: ProcessMesh) -> None:
    for dtype, reduction in (("complex64", "max"), ("int32", "mean"), ("bool", "mean")):
        with pytest.raises(TypeError, match=reduction):
            line.world.allreduce(tf.zeros([2], dtype), reduction)
    with pytest.raises(ValueError, match="does not divide"):
        line.world.alltoall(tf.zeros([2 * line.size + 1]))


def traced_operations(fn: Callable[..., Any], *specs: tf.TensorSpec) -> list[tf.Operation]:
    return tf.compat.v1.wrap_function(fn, list(specs)).graph.get_operations()


@pytest.mark.ranks(2, 4)
def test_shift_sends_to_one_neighbour_only(line: ProcessMesh) -> None:
    """One alltoall, of this rank's tensor once, all of it to the neighbour."""
    spec = tf.TensorSpec(SHAPE, tf.float32)
    operations = traced_operations(lambda x: line.world.shift(x, 1), spec)
    (exchange,) = [op for op in operations if op.type.startswith("Horovod")]
    assert exchange.type == "HorovodAlltoall"
    with exchange.graph.as_default(), tf.compat.v1.Session() as session:
        placeholder = next(op for op in operations if op.type == "Placeholder").outputs[0]
        sent, splits = session.run(
            list(exchange.inputs), {placeholder.name: np.zeros(SHAPE, np.float32)}
        )
    expected = np.zeros(line.size, int)
    expected[(line.rank + 1) % line.size] = math.prod(SHAPE)
    assert splits.tolist() == expected.tolist()
    assert sent.size == math.prod(SHAPE)


def test_a_group_of_one_does_nothing(line: ProcessMesh) -> None:
    alone = line.communicator()
    x = tf.constant([[1.0, 2.0]])
    for found in (
        alone.allreduce(x),
        alone.allgather(x),
        alone.alltoall(x),
        alone.shift(x, 3),
        alone.broadcast(x),
        alone.allreduce(x, "mean"),
    ):
        assert found is x
    assert not alone.shift(x, 1, wrap=False).numpy().any()
