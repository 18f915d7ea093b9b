"""The interface of an engine of collectives, and the engine of every job: Horovod's process sets.

This is the only module that names Horovod. Another engine is a subclass of `Engine` that `current`
returns. Groups of one rank need no engine, so a job of one rank imports none.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from meshimpl import launch

Ranks = tuple[int, ...]
"""The increasing ranks of a group."""
Reduction = Literal["sum", "max", "min"]
MAX_ELEMENTS = 2**31 - 1
"""Elements of the largest tensor that an exchange can carry; MPI counts them as int32."""


class CollectiveError(RuntimeError):
    """The engine cannot serve a group, for example because it was started without that group."""


class Engine(abc.ABC):
    """Collectives on tensors of float16/32/64, int8/32/64 and uint8 within groups of ranks.

    Every rank of a group calls the same methods. A collective is told apart by its name, which no
    two collectives in flight may share. Methods work eagerly and in graphs; in graphs the caller
    sees to it that TensorFlow neither prunes nor merges their operations (`meshimpl.graph_guards`).
    """

    @abc.abstractmethod
    def start(self, groups: Sequence[Ranks]) -> None:
        """Starts the engine once in this process, able to communicate within each of `groups`.

        Args:
            groups: sorted, without duplicates, of at least two ranks each; the same list on every
                rank.

        Raises:
            CollectiveError: the engine is running already and lacks one of the groups.
        """

    @property
    @abc.abstractmethod
    def is_running(self) -> bool:
        """Whether it has been started and not been shut down."""

    @abc.abstractmethod
    def reduce(self, x: tf.Tensor, reduction: Reduction, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the element-wise reduction over the group, on each of its ranks."""

    @abc.abstractmethod
    def gather(self, x: tf.Tensor, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the group's tensors joined along dimension 0, in the order of the ranks."""

    @abc.abstractmethod
    def exchange(
        self, x: tf.Tensor, counts: tf.Tensor | None, ranks: Ranks, name: str
    ) -> tf.Tensor:
        """Sends rows of dimension 0 to each rank of the group and returns what arrives.

        Args:
            x: rows for the first rank, then for the second, and so on.
            counts: int32 number of rows for each rank; None sends every rank the same number.
            ranks: the group.
            name: of this collective.

        Returns:
            The rows that arrive, in the order of the ranks. Their number is not known statically.
        """

    @abc.abstractmethod
    def broadcast(self, x: tf.Tensor, root: int, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the tensor of the rank `root` (its rank in the job) on each rank of the group."""


class HorovodEngine(Engine):
    """Horovod's process sets: NCCL on GPUs, MPI on CPUs."""

    def __init__(self) -> None:
        self.process_sets: dict[Ranks, Any] = {}

    @functools.cached_property
    def _hvd(self) -> Any:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise CollectiveError(
                "more than one rank needs Horovod, which is not installed; `flowpm-dist build "
                "horovod` builds it, `flowpm-dist doctor` says what is missing"
            ) from error
        return hvd

    def start(self, groups: Sequence[Ranks]) -> None:
        """Registers one process set for each group; see `Engine.start`."""
        hvd = self._hvd
        if not hvd.is_initialized():
            self._initialise(groups)
        self.process_sets.setdefault(tuple(range(hvd.size())), hvd.global_process_set)
        missing = [g for g in groups if g not in self.process_sets]
        if missing:
            raise CollectiveError(
                f"Horovod runs already, without the process sets {missing}; name every mesh shape "
                "of this program at its start: meshimpl.initialise(['row:4', 'row:2,col:2'])"
            )

    def _initialise(self, groups: Sequence[Ranks]) -> None:
        hvd = self._hvd
        launch.check_launcher()
        launch.set_horovod_defaults()
        with contextlib.suppress(RuntimeError):  # TensorFlow has begun with threads of its own
            launch.configure_threads()
        world = tuple(range(launch.detect().size))
        sets = [hvd.ProcessSet(list(g)) for g in groups if g != world]
        hvd.init(process_sets=sets)
        if hvd.size() != len(world):
            raise CollectiveError(
                f"the launcher started {len(world)} ranks, but Horovod finds {hvd.size()}: it was "
                "built with another MPI than the one that runs this job (`flowpm-dist doctor`)"
            )
        launch.abort_on_error()
        launch.place_devices(shared=not hvd.nccl_built())
        self.process_sets.update({tuple(s.ranks): s for s in sets})

    @property
    def is_running(self) -> bool:
        """Whether Horovod has been started and not been shut down."""
        return "horovod.tensorflow" in sys.modules and bool(self._hvd.is_initialized())

    def _process_set(self, ranks: Ranks) -> Any:
        try:
            return self.process_sets[ranks]
        except KeyError:
            raise CollectiveError(f"no process set was started for the ranks {ranks}") from None

    def reduce(self, x: tf.Tensor, reduction: Reduction, ranks: Ranks, name: str) -> tf.Tensor:
        """HorovodAllreduce; see `Engine.reduce`."""
        hvd = self._hvd
        op = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}[reduction]
        process_set = self._process_set(ranks)
        return hvd.mpi_ops._allreduce(x, name=name, op=op, process_set=process_set)

    def gather(self, x: tf.Tensor, ranks: Ranks, name: str) -> tf.Tensor:
        """HorovodAllgather; see `Engine.gather`."""
        return self._hvd.allgather(x, name=name, process_set=self._process_set(ranks))

    def exchange(
        self, x: tf.Tensor, counts: tf.Tensor | None, ranks: Ranks, name: str
    ) -> tf.Tensor:
        """HorovodAlltoall; see `Engine.exchange`."""
        process_set = self._process_set(ranks)
        result = self._hvd.alltoall(x, splits=counts, name=name, process_set=process_set)
        return result[0] if isinstance(result, (tuple, list)) else result

    def broadcast(self, x: tf.Tensor, root: int, ranks: Ranks, name: str) -> tf.Tensor:
        """HorovodBroadcast; see `Engine.broadcast`."""
        process_set = self._process_set(ranks)
        return self._hvd.broadcast(x, root_rank=root, name=name, process_set=process_set)


@functools.cache
def current() -> Engine:
    """Returns this process's engine; it is not started before `start`."""
    return HorovodEngine()


def start(groups: Sequence[Ranks]) -> None:
    """Starts the engine if any of `groups` has more than one rank.

    Args:
        groups: the ranks of each group, the same list on every rank. It may hold groups of one
            rank, duplicates and the whole world.

    Raises:
        CollectiveError: there is no engine, or it is running already and lacks one of the groups.
    """
    wanted = sorted({tuple(sorted(g)) for g in groups if len(g) > 1})
    if wanted:
        current().start(wanted)
