"""Collective operations on one group of ranks; the only module that names Horovod.

A `Communicator` is an ordered group of ranks (a line or a plane of the process mesh) and offers
allreduce, allgather, alltoall, shift and broadcast on TensorFlow tensors, eagerly and in graphs.
On a group of one rank every collective is the identity and nothing is imported. On more, Horovod's
process sets are the engine (NCCL on GPUs, MPI or Gloo on CPUs).

Horovod's TensorFlow operations are not stateful, so TensorFlow may prune, merge or fold them on one
rank and leave the others waiting (horovod#3229). Four guards stand here, once for all callers:

* every input passes a `PlaceholderWithDefault`, which no optimiser folds or looks through;
* the collectives of a graph form one chain of control dependencies, so that none equals another;
* a second such placeholder reads every output, since one that is only waited for is pruned;
* `last_collective` gives the end of the chain, on which a graph's results are made to depend.

The gradients that Horovod registers are partly wrong (allgather, broadcast, reducescatter, max):
TensorFlow is refused a gradient through any of them. Adjoints live in the mesh operations.

dtypes: float16/32/64 and most integers travel as they are; complex as pairs of reals, bfloat16 as
16-bit integers (reduced in float32), bool as 8-bit integers. uint32 and uint64 travel as signed
integers of their width, and are reduced, as int16 and uint16, in 64 bits.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import sys
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import launch
from meshimpl.stopwatch import Stopwatch

REDUCTIONS = ("sum", "max", "min", "mean")
_MAX_ELEMENTS = 2**31 - 1

_names: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""Numbers of the collectives of each group. Not of all together: groups work independently, and one
may have made more of them when all ranks meet again."""
_chains: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_stopwatch: Stopwatch | None = None
_process_sets: dict[tuple[int, ...], Any] = {}


class CollectiveError(RuntimeError):
    """The engine cannot serve a group, for example because it was started without it."""


def _horovod() -> Any:
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise CollectiveError(
            "more than one rank needs Horovod, which is not installed; `make setup` builds it, "
            "`flowpm-dist doctor` says what is missing"
        ) from error
    return hvd


def start(groups: Sequence[tuple[int, ...]]) -> None:
    """Start the engine once in this process, with a communicator for each of `groups`.

    Args:
        groups: the ranks of each group, the same list on every rank. Groups of one rank, duplicates
            and the whole world are understood.

    Raises:
        CollectiveError: the engine runs already and lacks one of the groups.
    """
    wanted = sorted({tuple(sorted(g)) for g in groups if len(g) > 1})
    if not wanted:
        return
    hvd = _horovod()
    if not hvd.is_initialized():
        launch.set_horovod_defaults()
        with contextlib.suppress(RuntimeError):  # TensorFlow has begun with threads of its own
            launch.configure_threads()
        world = tuple(range(launch.detect().size))
        sets = [hvd.ProcessSet(list(g)) for g in wanted if g != world]
        hvd.init(process_sets=sets)
        if hvd.size() != len(world):
            raise CollectiveError(
                f"the launcher started {len(world)} ranks, but Horovod finds {hvd.size()}: it was "
                "built with another MPI than the one that runs this job (`flowpm-dist doctor`)"
            )
        launch.place_devices(hvd.local_rank())
        launch.abort_on_error()
        atexit.register(_leave_together, hvd)
        _process_sets.update({tuple(s.ranks): s for s in sets})
    _process_sets.setdefault(tuple(range(hvd.size())), hvd.global_process_set)
    missing = [g for g in wanted if g not in _process_sets]
    if missing:
        raise CollectiveError(
            f"Horovod runs already, without the process sets {missing}; name every mesh shape of "
            "this program at its start: meshimpl.initialise(['row:4', 'row:2,col:2'])"
        )


def _leave_together(hvd: Any) -> None:
    """Wait for the others at the end: the first rank to shut Horovod down does so for all."""
    failed = getattr(sys, "last_value", None) is not None
    if hvd.is_initialized() and not failed:
        hvd.allreduce(tf.constant(0), op=hvd.Sum, name="leave_together")


@contextlib.contextmanager
def timed(stopwatch: Stopwatch | None) -> Iterator[None]:
    """Collectives that are built inside take their time when they run."""
    global _stopwatch
    outer, _stopwatch = _stopwatch, stopwatch
    try:
        yield
    finally:
        _stopwatch = outer


def _chain(graph: Any) -> dict[Any, Any]:
    return _chains.setdefault(graph, {})


def last_collective() -> Any | None:
    """The latest collective of the graph under construction, None when there is none or eagerly."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return _chain(graph).get(graph._get_control_flow_context())


@contextlib.contextmanager
def separate_chain() -> Iterator[None]:
    """Build collectives that form a chain of their own: an entry point that runs by itself."""
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    outer = dict(_chain(graph))
    _chains[graph] = {}
    try:
        yield
    finally:
        _chains[graph] = outer


def _chained(
    op: Callable[[tf.Tensor, str], Any], x: tf.Tensor, kind: str, ranks: tuple[int, ...]
) -> Any:
    """Run `op(x, name)`; in a graph behind a fence and after the collective before it."""
    group = zlib.crc32(",".join(map(str, ranks)).encode())
    name = f"{kind}_{group:08x}_{next(_names[ranks])}"
    if tf.executing_eagerly():
        return op(_not_differentiable(x), name)
    graph = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    previous = _chain(graph).get(context)
    with tf.control_dependencies([] if previous is None else [previous]):
        fenced = fence(x)
    begin = None if _stopwatch is None else _stopwatch.now([fenced])
    with tf.control_dependencies([] if begin is None else [begin]):
        result = op(_not_differentiable(fenced), name)
    first = result[0] if isinstance(result, (tuple, list)) else result
    if _stopwatch is None:
        # TensorFlow turns an operation that only others wait for into nothing; it keeps the fence.
        _chain(graph)[context] = fence(first).op
    else:
        _chain(graph)[context] = _stopwatch.add(kind, begin, _stopwatch.now([fence(first)]))
    return result


def _not_differentiable(x: tf.Tensor) -> tf.Tensor:
    """The same tensor; a LookupError for whoever asks TensorFlow for a gradient through it."""
    return tf.raw_ops.PreventGradient(
        input=x, message="a collective has no gradient; differentiate the mesh operation (mtf)"
    )


def fence(x: tf.Tensor) -> tf.Tensor:
    """The same tensor behind a wall that no graph optimiser folds, merges or looks through."""
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=x.shape)


def _as_carried(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """`x` in a dtype that the engine carries, and the way back (for moves, not for sums)."""
    dtype = x.dtype
    if dtype.is_complex:
        return tf.bitcast(x, dtype.real_dtype), lambda y: tf.bitcast(y, dtype)
    if dtype == tf.bfloat16:
        return tf.bitcast(x, tf.uint16), lambda y: tf.bitcast(y, dtype)
    if dtype == tf.bool:
        return tf.cast(x, tf.uint8), lambda y: tf.cast(y, dtype)
    if dtype in (tf.uint32, tf.uint64):
        signed = tf.int32 if dtype == tf.uint32 else tf.int64
        return tf.bitcast(x, signed), lambda y: tf.bitcast(y, dtype)
    return x, lambda y: y


@dataclass(frozen=True)
class Communicator:
    """An ordered group of ranks; `index` is this rank's place in it.

    The group's order must be that of increasing rank, which is Horovod's order within a process
    set; lines and planes of a row-major mesh have it.
    """

    ranks: tuple[int, ...]
    rank: int
    index: int = field(init=False)

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks of a group must increase, got {self.ranks}")
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in the group {self.ranks}")
        object.__setattr__(self, "index", self.ranks.index(self.rank))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def _process_set(self) -> Any:
        try:
            return _process_sets[self.ranks]
        except KeyError:
            raise CollectiveError(
                f"no process set was started for the ranks {self.ranks}"
            ) from None

    def allreduce(self, x: tf.Tensor, reduction: str = "sum") -> tf.Tensor:
        """Element-wise `sum`, `max`, `min` or `mean` over the group; the result is on every rank.

        bool: sum and max are "any", min is "all". complex: sum and mean only.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
        x = tf.convert_to_tensor(x)
        if self.size == 1:
            return x
        dtype = x.dtype
        if dtype.is_complex:
            if reduction in ("max", "min"):
                raise TypeError(f"allreduce({reduction}) has no meaning for {dtype.name}")
            return tf.bitcast(self.allreduce(tf.bitcast(x, dtype.real_dtype), reduction), dtype)
        if dtype == tf.bfloat16:
            return tf.cast(self.allreduce(tf.cast(x, tf.float32), reduction), dtype)
        if dtype == tf.bool:
            if reduction == "mean":
                raise TypeError("allreduce(mean) has no meaning for bool")
            kind = "min" if reduction == "min" else "max"
            return tf.cast(self.allreduce(tf.cast(x, tf.int32), kind), dtype)
        if dtype == tf.uint64 and reduction != "sum":
            raise TypeError(f"allreduce({reduction}) is not available for uint64")
        if dtype in (tf.int16, tf.uint16, tf.uint32, tf.uint64):
            return tf.cast(self.allreduce(tf.cast(x, tf.int64), reduction), dtype)
        if reduction == "mean" and not dtype.is_floating:
            raise TypeError(f"allreduce(mean) would round {dtype.name}; cast it first")
        return self._reduce(x, reduction)

    def _reduce(self, x: tf.Tensor, reduction: str) -> tf.Tensor:
        hvd = _horovod()
        operation = {"sum": hvd.Sum, "mean": hvd.Sum, "max": hvd.Max, "min": hvd.Min}[reduction]

        def run(y: tf.Tensor, name: str) -> tf.Tensor:
            return hvd.mpi_ops._allreduce(y, name=name, op=operation, process_set=self._process_set)

        result = _chained(run, x, "allreduce", self.ranks)
        return result / self.size if reduction == "mean" else result

    def allgather(self, x: tf.Tensor, axis: int = 0, *, stack: bool = False) -> tf.Tensor:
        """The group's tensors joined along `axis` (or along a new one, `stack`), in group order.

        Args:
            x: the same static shape on each rank.
            axis: of the input, or where the new axis stands.
            stack: join along a new axis of length `size`.
        """
        x = tf.convert_to_tensor(x)
        if self.size == 1:
            return tf.expand_dims(x, axis) if stack else x
        carried, back = _as_carried(x)
        gathered = self._gather(carried[tf.newaxis])
        pieces = back(tf.ensure_shape(gathered, [self.size, *carried.shape]))
        if axis == 0:
            shape = x.shape.as_list()
            return pieces if stack else tf.reshape(pieces, [self.size * shape[0], *shape[1:]])
        join = tf.stack if stack else tf.concat
        return join(tf.unstack(pieces), axis=axis)

    def _gather(self, x: tf.Tensor) -> tf.Tensor:
        hvd = _horovod()

        def run(y: tf.Tensor, name: str) -> tf.Tensor:
            return hvd.allgather(y, name=name, process_set=self._process_set)

        return _chained(run, x, "allgather", self.ranks)

    def alltoall(self, x: tf.Tensor) -> tf.Tensor:
        """Transpose of blocks: piece j of dim 0 goes to rank j; what arrives is in group order.

        Args:
            x: shape [size * m, ...].

        Returns:
            The same shape, rows i*m..(i+1)*m from the group's rank i.
        """
        x = tf.convert_to_tensor(x)
        if x.shape[0] % self.size:
            raise ValueError(f"dim 0 of {x.shape} does not divide by the group's {self.size} ranks")
        if self.size == 1:
            return x
        carried, back = _as_carried(x)
        moved = self._exchange(carried, None)
        return back(tf.ensure_shape(moved, carried.shape))

    def alltoallv(self, x: tf.Tensor, counts: Any) -> tf.Tensor:
        """Alltoall with `counts[j]` rows of dim 0 for rank j; counts may differ between ranks.

        Returns:
            What arrives, in group order; dim 0 is not known statically.
        """
        if self.size == 1:
            return tf.convert_to_tensor(x)
        carried, back = _as_carried(tf.convert_to_tensor(x))
        splits = tf.cast(counts, tf.int32)
        if not tf.executing_eagerly():
            splits = fence(splits)
        return back(self._exchange(carried, splits))

    def _exchange(self, x: tf.Tensor, splits: tf.Tensor | None) -> tf.Tensor:
        if x.shape.num_elements() is not None and x.shape.num_elements() > _MAX_ELEMENTS:
            raise ValueError(
                f"an exchange of {x.shape} has more than {_MAX_ELEMENTS} elements, MPI's limit; "
                "use more ranks"
            )
        hvd = _horovod()

        def run(y: tf.Tensor, name: str) -> Any:
            return hvd.alltoall(y, splits=splits, name=name, process_set=self._process_set)

        result = _chained(run, x, "alltoall", self.ranks)
        return result[0] if isinstance(result, (tuple, list)) else result

    def permute(self, x: tf.Tensor, sources: Sequence[int | None]) -> tf.Tensor:
        """Rank k of the group receives the tensor of rank `sources[k]`, zeros where that is None.

        Only what is named moves. A source may serve several ranks.
        """
        if len(sources) != self.size:
            raise ValueError(f"{self.size} sources are needed, got {len(sources)}")
        bad = [s for s in sources if s is not None and not 0 <= s < self.size]
        if bad:
            raise ValueError(f"sources {bad} are not in the group of {self.size} ranks")
        x = tf.convert_to_tensor(x)
        if all(s is None for s in sources):
            return tf.zeros_like(x)
        if all(s is None or s == k for k, s in enumerate(sources)):
            mine = self.per_rank([float(s is not None) for s in sources])
            return tf.where(mine > 0, x, tf.zeros_like(x))
        carried, back = _as_carried(x)
        flat = tf.reshape(carried, [-1])
        length = math.prod(carried.shape)
        sends = [[length * (s == k) for s in sources] for k in range(self.size)]
        counts = self.per_rank(np.array(sends, np.int32))
        copies = self.per_rank(np.array([sum(map(bool, row)) for row in sends], np.int32))
        moved = self._exchange(tf.tile(flat, copies[tf.newaxis]), counts)
        whole = tf.concat([moved, tf.zeros([length], moved.dtype)], axis=0)[:length]
        return back(tf.reshape(whole, carried.shape))

    def shift(self, x: tf.Tensor, offset: int, *, wrap: bool = True) -> tf.Tensor:
        """Receive from the rank `offset` places before; beyond an edge zeros unless `wrap`."""
        if self.size == 1 and (wrap or offset == 0):
            return tf.convert_to_tensor(x)
        sources = [k - offset for k in range(self.size)]
        return self.permute(
            x, [s % self.size if wrap else s if 0 <= s < self.size else None for s in sources]
        )

    def exchange_neighbours(
        self, to_previous: tf.Tensor, to_next: tf.Tensor, distance: int = 1
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Periodic exchange with the ranks `distance` before and after, both in one message.

        Args:
            to_previous, to_next: two tensors of one shape and dtype.

        Returns:
            What the previous and what the next rank sent here.
        """
        n, d = self.size, distance % self.size
        if d == 0:
            return to_next, to_previous
        carried, back = _as_carried(tf.stack([to_previous, to_next]))
        pieces = tf.reshape(carried, [2, -1])
        length = pieces.shape[1]
        order, counts, arrival = [], [], []
        for k in range(n):
            previous, following = (k - d) % n, (k + d) % n
            order.append([0, 1] if previous <= following else [1, 0])
            counts.append([length * ((j == previous) + (j == following)) for j in range(n)])
            # From one rank that is both neighbours the two arrive as they were stacked: what it
            # sent to its previous rank comes here from our next.
            arrival.append([0, 1] if previous < following else [1, 0])
        if any(row != [0, 1] for row in order):
            pieces = tf.gather(pieces, self.per_rank(np.array(order, np.int32)))
        moved = self._exchange(tf.reshape(pieces, [-1]), self.per_rank(np.array(counts, np.int32)))
        both = back(tf.reshape(moved, carried.shape))
        if all(row == [1, 0] for row in arrival):  # two ranks: nothing to look up
            return both[1], both[0]
        both = tf.gather(both, self.per_rank(np.array(arrival, np.int32)))
        return both[0], both[1]

    def broadcast(self, x: tf.Tensor, root: int = 0) -> tf.Tensor:
        """The tensor of the group's rank number `root`, on every rank."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not in the group of {self.size} ranks")
        x = tf.convert_to_tensor(x)
        if self.size == 1:
            return x
        carried, back = _as_carried(x)
        hvd = _horovod()

        def run(y: tf.Tensor, name: str) -> tf.Tensor:
            return hvd.broadcast(
                y, root_rank=self.ranks[root], name=name, process_set=self._process_set
            )

        return back(_chained(run, carried, "broadcast", self.ranks))

    def per_rank(self, values: Any) -> tf.Tensor:
        """`values[index]` as a tensor that enters the same graph on every rank."""
        mine = tf.constant(np.asarray(values)[self.index])
        return mine if tf.executing_eagerly() else fence(mine)
