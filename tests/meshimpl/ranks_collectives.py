"""Every collective against numpy, for every dtype, eagerly and in a graph."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import process_mesh, shapes_of

from meshimpl import Communicator, ProcessMesh, engine
from meshimpl.graph_guards import last_collective

# Among four ranks there are groups of one, two and four.
pytestmark = [pytest.mark.ranks(1, 4), pytest.mark.grappler]

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


@dataclass
class Check:
    """A collective, what this rank puts in, and what it must get."""

    what: str
    collective: Callable[..., Any]
    arrays: Sequence[np.ndarray]
    expected: np.ndarray | Sequence[np.ndarray]


def verify(checks: Sequence[Check]) -> None:
    """Eagerly one by one, and all in one graph whose results wait for its last collective."""
    inputs = [tf.constant(a) for check in checks for a in check.arrays]

    def results(*tensors: tf.Tensor) -> list[Any]:
        following = iter(tensors)
        return [c.collective(*itertools.islice(following, len(c.arrays))) for c in checks]

    def build(*tensors: tf.Tensor) -> list[Any]:
        found = results(*tensors)
        last = last_collective()
        with tf.control_dependencies([] if last is None else [last]):
            return tf.nest.map_structure(tf.identity, found)

    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    graph = tf.compat.v1.wrap_function(build, specs)(*inputs)
    for how, found in (("eagerly", results(*inputs)), ("in a graph", graph)):
        for check, values in zip(checks, found, strict=True):
            for value, expected in zip(
                tf.nest.flatten(values), tf.nest.flatten(check.expected), strict=True
            ):
                value = value.numpy()
                assert value.dtype == expected.dtype, f"{check.what} {how}"
                np.testing.assert_array_equal(value, expected, f"{check.what} {how}")


@functools.cache
def groups() -> list[Communicator]:
    """The lines and planes of every mesh, each once, and this rank alone."""
    found = {}
    for shape in shapes_of("mesh", every_split=True):
        mesh = process_mesh(shape)
        lines = [mesh.communicator(name) for name in mesh.names]
        found |= {group.ranks: group for group in [*lines, mesh.world, mesh.communicator()]}
    return list(found.values())


def dtypes_and_groups() -> list[tuple[str, Communicator]]:
    """Every dtype among all ranks, and every group with a dtype sent directly and one converted."""
    *others, largest = sorted(groups(), key=lambda group: group.size)
    few = itertools.product(("float32", "complex64"), others)
    return [*few, *((dtype, largest) for dtype in ALL)]


def test_allreduce() -> None:
    checks = []
    for dtype, group in dtypes_and_groups():
        every = parts(group, dtype)
        total = {"bool": np.logical_or}.get(dtype, np.add)
        reductions = {"sum": total.reduce(every).astype(every[0].dtype)}
        if not dtype.startswith("complex"):
            reductions |= {"max": np.maximum.reduce(every), "min": np.minimum.reduce(every)}
        if dtype not in [*INTEGERS, "bool"]:
            reductions["mean"] = total.reduce(every) / np.array(group.size, every[0].dtype)
        for name, expected in reductions.items():
            reduce = functools.partial(group.allreduce, reduction=name)
            what = f"{name} of {dtype} over {group.ranks}"
            checks.append(Check(what, reduce, [every[group.index]], expected))
    verify(checks)


@pytest.mark.usefixtures("each_engine")
def test_moves() -> None:
    """Allgather, alltoall, broadcast, permute and shift."""
    checks = []
    for dtype, group in dtypes_and_groups():
        n, k = group.size, group.index
        every, long = parts(group, dtype), parts(group, dtype, (2 * n, 3))
        # The first and the last place swap what they have, and nobody sends to the others.
        sources = [{0: n - 1, n - 1: 0}.get(place) for place in range(n)]
        permuted = np.zeros_like(every[0]) if sources[k] is None else every[sources[k]]
        stacked = functools.partial(group.allgather, axis=1, stack=True)
        for name, move, mine, expected in (
            ("allgather", group.allgather, every, np.concatenate(every)),
            ("stack", stacked, every, np.stack(every, 1)),
            ("broadcast", functools.partial(group.broadcast, root=n - 1), every, every[-1]),
            ("permute", functools.partial(group.permute, sources=sources), every, permuted),
            ("shift", functools.partial(group.shift, offset=1), every, every[(k - 1) % n]),
            ("alltoall", group.alltoall, long, np.concatenate([p[2 * k :][:2] for p in long])),
        ):
            checks.append(Check(f"{name} of {dtype} over {group.ranks}", move, [mine[k]], expected))
    verify(checks)


def test_allgather_joins_along_any_axis() -> None:
    checks = []
    for group in groups():
        every = parts(group, "float32", (2, 3, 4))
        for axis, stack in itertools.product((0, 1, 2), (False, True)):
            gather = functools.partial(group.allgather, axis=axis, stack=stack)
            expected = (np.stack if stack else np.concatenate)(every, axis)
            what = f"allgather along {axis}, stack {stack}, over {group.ranks}"
            checks.append(Check(what, gather, [every[group.index]], expected))
    verify(checks)


@pytest.mark.usefixtures("each_engine")
def test_shift_by_any_distance() -> None:
    checks = []
    for group, wrap in itertools.product(groups(), (True, False)):
        n, k, every = group.size, group.index, parts(group, "int32")
        for offset in range(-n - 1, n + 2):
            source = (k - offset) % n if wrap else k - offset
            expected = every[source] if 0 <= source < n else np.zeros_like(every[0])
            shift = functools.partial(group.shift, offset=offset, wrap=wrap)
            what = f"shift by {offset}, wrap {wrap}, over {group.ranks}"
            checks.append(Check(what, shift, [every[k]], expected))
    verify(checks)


@pytest.mark.usefixtures("each_engine")
def test_permute_from_one_to_all_and_from_none() -> None:
    checks = []
    for group in groups():
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
            permute = functools.partial(group.permute, sources=plan)
            what = f"permute from {plan} over {group.ranks}"
            checks.append(Check(what, permute, [every[k]], expected))
    verify(checks)


@pytest.mark.usefixtures("each_engine")
def test_exchange_with_both_neighbours() -> None:
    """Also where both neighbours are one rank, or this rank itself."""
    checks = []
    for group, dtype in itertools.product(groups(), ("float32", "complex128")):
        n, k = group.size, group.index
        back = parts(group, dtype)
        forth = [x + np.array(10, x.dtype) for x in back]
        for distance in range(1, n + 2):
            exchange = functools.partial(group.exchange_neighbours, distance=distance)
            expected = [forth[(k - distance) % n], back[(k + distance) % n]]
            what = f"exchange of {dtype} at {distance} over {group.ranks}"
            checks.append(Check(what, exchange, [back[k], forth[k]], expected))
    verify(checks)


def test_alltoall_of_unequal_pieces() -> None:
    checks = []
    for group in groups():
        n, k = group.size, group.index
        counts = np.array([[(i + 2 * j) % 3 for j in range(n)] for i in range(n)], np.int32)
        if n == 1:
            counts[:] = 2
        sent = [np.arange(row.sum(), dtype=np.float64) + 100 * i for i, row in enumerate(counts)]
        pieces = [np.split(s, np.cumsum(row)[:-1]) for s, row in zip(sent, counts, strict=True)]
        expected = np.concatenate([p[k] for p in pieces])
        move = functools.partial(group.alltoallv, counts=counts[k])
        checks.append(Check(f"alltoallv over {group.ranks}", move, [sent[k]], expected))
    verify(checks)


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


@pytest.mark.ranks(2)
def test_reductions_without_a_meaning(line: ProcessMesh) -> None:
    for dtype, reduction in (("complex64", "max"), ("int32", "mean"), ("bool", "mean")):
        with pytest.raises(TypeError, match=reduction):
            line.world.allreduce(tf.zeros([2], dtype), reduction)
    with pytest.raises(ValueError, match="does not divide"):
        line.world.alltoall(tf.zeros([2 * line.size + 1]))


def traced_operations(fn: Callable[..., Any], *specs: tf.TensorSpec) -> list[tf.Operation]:
    return tf.compat.v1.wrap_function(fn, list(specs)).graph.get_operations()


@pytest.mark.ranks(4)
def test_shift_sends_to_one_neighbour_only(line: ProcessMesh, each_engine: str) -> None:
    """One alltoall, of this rank's tensor once, all of it to the neighbour."""
    spec = tf.TensorSpec(SHAPE, tf.float32)
    operations = traced_operations(lambda x: line.world.shift(x, 1), spec)
    (exchange,) = [op for op in operations if op.type.startswith(("Horovod", "Meshimpl"))]
    expected = np.zeros(line.size, int)
    expected[(line.rank + 1) % line.size] = 1
    with exchange.graph.as_default(), tf.compat.v1.Session() as session:
        placeholder = next(op for op in operations if op.type == "Placeholder").outputs[0]
        sent, *splits = session.run(
            list(exchange.inputs), {placeholder.name: np.zeros(SHAPE, np.float32)}
        )
    assert sent.size == math.prod(SHAPE)
    if each_engine == "horovod":
        assert exchange.type == "HorovodAlltoall"
        assert splits[0].tolist() == expected.tolist()
    else:
        arrives = np.roll(np.eye(line.size, dtype=int)[line.rank], -1)
        assert exchange.type == "MeshimplExchange"
        assert exchange.get_attr("sent") == expected.tolist()
        assert exchange.get_attr("received") == arrives.tolist()


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


@pytest.mark.ranks(1)
def test_a_line_of_many_ranks_takes_steps_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message to neighbours takes steps for each rank of the line, not for each pair of them."""
    sent: list[np.ndarray] = []
    arriving: list[np.ndarray] = []

    class Echo(engine.HorovodEngine):
        def exchange(self, x: tf.Tensor, counts: Any, *_: Any) -> tf.Tensor:
            sent.append(counts.sent)
            arriving.append(counts.received)
            return x

        def gather(self, x: tf.Tensor, ranks: tuple[int, ...], *_: Any) -> tf.Tensor:
            return tf.tile(x, [len(ranks)])  # as if all met at this line

    monkeypatch.setattr(engine, "current", Echo)
    line, x = Communicator(tuple(range(2**18)), 5), tf.ones([3])  # all pairs take minutes
    line.exchange_neighbours(x, x, 2)
    line.shift(x, 1)
    expected_rows = {3: 1, 7: 1}, {6: 1}, {3: 1, 7: 1}, {4: 1}
    for counts, expected in zip([*sent, *arriving], expected_rows, strict=True):
        assert {int(k): int(counts[k]) for k in np.flatnonzero(counts)} == expected
