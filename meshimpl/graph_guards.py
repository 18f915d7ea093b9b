"""Guards that keep the collectives of a TensorFlow graph alive, distinct and in one order.

The engine's operations are not stateful, so TensorFlow may prune, merge or fold them on one rank
and leave the others waiting (horovod#3229). This module has four guards for all callers.

* Every input passes a `PlaceholderWithDefault`, which no optimiser looks through (`fence`).
* The collectives of a graph form one chain of control dependencies, so that no two are equal.
* A second fence reads every output, because an operation that others only wait for is pruned.
* `last_collective` returns the end of the chain, on which a graph's results must depend.

Gradients registered by the engine are partly wrong (allgather, broadcast, reducescatter, max), so
TensorFlow is refused a gradient through any collective. Adjoints live in the mesh operations.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import traffic

_PASSED_OVER = {"meshimpl", "tensorflow", "functools"}


def caller() -> str:
    """Returns the module and the line from which this package was called."""
    frame = sys._getframe(1)
    name = str(frame.f_globals.get("__name__"))
    while frame.f_back is not None and name.partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
        name = str(frame.f_globals.get("__name__"))
    return f"{name}:{frame.f_lineno}"


class CollectiveNames:
    """The names of collectives: the same on every rank of a group that builds the same graphs.

    Each group counts its own collectives: groups work independently, and one may have made more
    collectives than another when all ranks meet again. A name also contains what the collective
    does, and the line of the program. So different collectives do not pair: they wait, and the
    engine reports that.

    Args:
        first: number of each group's first collective, the same on every rank.
    """

    def __init__(self, first: int = 0) -> None:
        self._counters: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(
            lambda: itertools.count(first)
        )

    def next(self, kind: str, what: str, ranks: tuple[int, ...]) -> str:
        """Returns a new name for a collective within a group; arguments as for `Plan.add`."""
        group = zlib.crc32(",".join(map(str, ranks)).encode())
        here = zlib.crc32(f"{what} {caller()}".encode())
        return f"{kind}_{group:08x}_{here:08x}_{next(self._counters[ranks])}"


names = CollectiveNames()
"""Names of this process's collectives in graphs without a plan."""


class Plan:
    """The collectives of one graph in order, with their names and the texts that ranks compare.

    Args:
        name: beginning of the names; the same on every rank, and no other graph's.

    Attributes:
        groups: the groups of the collectives, each once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._collectives: list[str] = []
        self.groups: list[tuple[int, ...]] = []

    def add(self, kind: str, what: str, ranks: tuple[int, ...]) -> str:
        """Returns the name of the next collective.

        Args:
            kind: such as "allreduce".
            what: such as "allreduce sum of float32 [3]".
            ranks: the group, of which only the size is the same on all ranks of the mesh.
        """
        self._collectives.append(f"{what} among {len(ranks)}")
        if ranks not in self.groups:
            self.groups.append(ranks)
        return f"{self._name}_{kind}_{len(self._collectives)}"

    def digest(self) -> bytes:
        """Returns 16 bytes that are equal for equal plans."""
        return hashlib.blake2b("\n".join(self._collectives).encode(), digest_size=16).digest()

    def summary(self) -> str:
        """Returns the number of collectives, and the last of them."""
        last = f", the last: {self._collectives[-1]}" if self._collectives else ""
        return f"collectives: {len(self._collectives)}{last}"


KINDS = ("allreduce", "allgather", "alltoall", "broadcast")


class Stopwatch:
    """Adds up the seconds of each kind of collective in the graphs that are built with it."""

    def __init__(self) -> None:
        self._seconds = {
            kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"seconds_of_{kind}")
            for kind in KINDS
        }

    def now(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the time [s], in a graph, once some tensors have been computed."""
        with tf.control_dependencies(after):
            return tf.timestamp()

    def add(self, kind: str, begin: tf.Tensor, end: tf.Tensor) -> Any:
        """Returns the operation, in a graph, that adds a time to the total of a kind."""
        return self._seconds[kind].assign_add(end - begin, read_value=False)

    def lap(self) -> dict[str, float]:
        """Returns the seconds of each kind since the last lap."""
        seconds = {kind: float(total) for kind, total in self._seconds.items()}
        for total in self._seconds.values():
            total.assign(0.0)
        return seconds


_plan: Plan | None = None
_stopwatch: Stopwatch | None = None
_CHAIN = "_meshimpl_chain"
NO_GRADIENT = "a collective has no gradient; differentiate the mesh operation (mtf)"
"""The message if TensorFlow is asked for a gradient."""


def check_eager(what: str) -> None:
    """Raises a RuntimeError that names `what` was called, if TensorFlow builds a graph."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{what} was called while TensorFlow builds a graph; it runs graphs of its own: call "
            "it eagerly, outside tf.function, tf.data and tf.Graph (GradientTape.jacobian builds "
            "one: for a simulation use flowpm_dist.jacobian)"
        )


def fence(x: tf.Tensor) -> tf.Tensor:
    """Returns the same tensor behind an operation that graph optimisers cannot look through."""
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=x.shape)


def own(value: Any) -> tf.Tensor:
    """Returns a rank's own value as a tensor, so that all ranks build the same graph."""
    mine = tf.constant(value)
    return mine if tf.executing_eagerly() else fence(mine)


def _chain(graph: Any) -> dict[Any, Any]:
    # An attribute of the graph, because a table of graphs would keep every graph alive.
    if not hasattr(graph, _CHAIN):
        setattr(graph, _CHAIN, {})
    chain: dict[Any, Any] = getattr(graph, _CHAIN)
    return chain


def last_collective() -> Any | None:
    """Returns the latest collective of the graph under construction, or None (also eagerly)."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return _chain(graph).get(graph._get_control_flow_context())


def in_order(build: Callable[[], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the tensors of a loop, whose collectives come after those before it.

    A loop's collectives belong to another graph, which has a chain of its own. Collectives that are
    built afterwards come after all tensors of the loop.

    Args:
        build: builds the loop in the graph under construction, whose iterations run one at a time.
    """
    last = last_collective()
    with tf.control_dependencies([] if last is None else [last]):
        results = list(build())
    if not tf.executing_eagerly() and results:
        inside = last_collective()
        with tf.control_dependencies([*results, *([] if inside is None else [inside])]):
            end = fence(results[0]).op
        graph = tf.compat.v1.get_default_graph()
        _chain(graph)[graph._get_control_flow_context()] = end
    return results


@contextlib.contextmanager
def separate_chain() -> Iterator[None]:
    """Lets the collectives built inside form a chain of their own, which runs separately."""
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    outer = _chain(graph)
    setattr(graph, _CHAIN, {})
    try:
        with traffic.recorded(None):  # it does not run whenever the graph does
            yield
    finally:
        setattr(graph, _CHAIN, outer)


@contextlib.contextmanager
def timed(stopwatch: Stopwatch | None) -> Iterator[None]:
    """Lets the collectives built inside report their time to a stopwatch whenever they run."""
    global _stopwatch
    outer, _stopwatch = _stopwatch, stopwatch
    try:
        yield
    finally:
        _stopwatch = outer


@contextlib.contextmanager
def planned(plan: Plan) -> Iterator[None]:
    """Enters the collectives built inside into a plan, which gives them their names."""
    global _plan
    outer, _plan = _plan, plan
    try:
        yield
    finally:
        _plan = outer


def is_planned() -> bool:
    """Returns whether a graph is being built whose collectives are entered into a plan."""
    return _plan is not None


def planned_groups() -> list[tuple[int, ...]]:
    """Returns the groups of the collectives of the plan that is being built."""
    return [] if _plan is None else _plan.groups


def guarded(
    collective: Callable[[tf.Tensor, str], tf.Tensor],
    x: tf.Tensor,
    kind: str,
    ranks: tuple[int, ...],
    what: str,
    sent: traffic.Tally,
) -> tf.Tensor:
    """Returns `collective(x, name)` in a graph, fenced and after the collective before it.

    Args:
        collective: makes one operation of the engine.
        x: its input.
        kind: such as "allreduce"; part of the name, and the stopwatch's entry.
        ranks: the group.
        what: text on which the ranks must agree, such as "allreduce sum of float32 [3]".
        sent: what this rank sends each time.
    """
    graph = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    # A graph inside another is a function of it, such as the body of a loop.
    outer = getattr(graph, "outer_graph", None)
    looping = context is not None or isinstance(outer, tf.__internal__.FuncGraph)
    name = names.next(kind, what, ranks) if _plan is None else _plan.add(kind, what, ranks)
    if not looping:
        traffic.record(sent)
    elif _plan is not None:
        collective = _counted(collective, sent)
    previous = _chain(graph).get(context)
    with tf.control_dependencies([] if previous is None else [previous]):
        fenced = fence(x)
    begin = None if _stopwatch is None else _stopwatch.now([fenced])
    with tf.control_dependencies([] if begin is None else [begin]):
        # Asking TensorFlow for a gradient through it is a LookupError.
        result = collective(tf.raw_ops.PreventGradient(input=fenced, message=NO_GRADIENT), name)
    if _stopwatch is None:
        # TensorFlow removes an operation that others only wait for, but keeps the fence.
        _chain(graph)[context] = fence(result).op
    else:
        _chain(graph)[context] = _stopwatch.add(kind, begin, _stopwatch.now([fence(result)]))
    return result


def _counted(
    collective: Callable[[tf.Tensor, str], tf.Tensor], sent: traffic.Tally
) -> Callable[[tf.Tensor, str], tf.Tensor]:
    """Returns the same collective, which counts its traffic by a Python call whenever it runs."""

    def count(_: np.ndarray) -> list[Any]:
        traffic.count(sent)
        return []

    def counting(x: tf.Tensor, name: str) -> tf.Tensor:
        result = fence(collective(x, name))
        # It reads a value: with only a control dependency, TensorFlow's optimiser made it wait
        # for ever on a rank where the input of the collective is a constant. The size is known on
        # the host, so that a GPU is not waited for; the optimiser must not know it.
        hidden = tf.raw_ops.PlaceholderWithDefault(input=result, shape=None)
        size = tf.size(hidden, out_type=tf.int64)
        counted = tf.numpy_function(count, [size], [])
        with tf.control_dependencies([counted]):
            return fence(result)

    return counting
