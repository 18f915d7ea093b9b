"""The engine of collectives: Horovod's process sets.

This is the only module that names Horovod. Another engine has the methods of `HorovodEngine`, and
`current` returns it. Groups of one rank need no engine, so a job of one rank imports none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf

from meshimpl import launch
from meshimpl.mesh_shape import Lines, Ranks

MAX_ELEMENTS = 2**31 - 1
"""Elements of the largest tensor that an exchange can carry; MPI counts them as int32."""


TIMELINE, DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"
"""Variable that makes Horovod record its collectives, and its value for parts of a job."""
MANY_SETS = 200
"""Process sets, of all ranks, above which a Horovod that wants them all on each rank is slow."""


class CollectiveError(RuntimeError):
    """The engine cannot work in a group, for example because it was started without that group."""


def import_horovod() -> ModuleType:
    """Returns Horovod for TensorFlow, imported without its one Keras layer, and so without Keras.

    `horovod.tensorflow.SyncBatchNormalization` works afterwards: it loads Keras when it is used.
    """
    if "horovod.tensorflow" in sys.modules or "keras" in sys.modules:
        return importlib.import_module("horovod.tensorflow")
    name, layer = "horovod.tensorflow.sync_batch_norm", "SyncBatchNormalization"
    sys.modules[name] = stand_in = ModuleType(name)
    setattr(stand_in, layer, None)
    try:
        horovod = importlib.import_module("horovod.tensorflow")
    finally:
        del sys.modules[name]

    def late(wanted: str) -> Any:
        if wanted != layer:
            raise AttributeError(f"module {horovod.__name__!r} has no attribute {wanted!r}")
        return getattr(importlib.import_module(name), layer)

    delattr(horovod, layer)
    vars(horovod)["__getattr__"] = late
    return horovod


class HorovodEngine:
    """Collectives on tensors of float16/32/64, int8/32/64 and uint8 within groups of ranks.

    They are Horovod's, within its process sets: NCCL on GPUs, MPI on CPUs.

    Every rank of a group calls the same methods. A collective is known by its name, which no
    two collectives in flight may share. Methods work eagerly and in graphs; in graphs the caller
    sees to it that TensorFlow neither prunes nor merges their operations (`meshimpl.graph_guards`).
    """

    def __init__(self) -> None:
        self.process_sets: dict[Ranks, Any] = {}

    @functools.cached_property
    def _hvd(self) -> Any:
        try:
            return import_horovod()
        except ImportError as error:
            raise CollectiveError(
                "more than one rank needs Horovod, which is not installed or does not load "
                f"({error}); `python -m meshimpl.horovod_wheel` builds and installs it"
            ) from error

    def start(self, lines: Sequence[Lines]) -> None:
        """Starts Horovod once in this process, with a process set for each of this rank's groups.

        Args:
            lines: sorted, without duplicates, of at least two ranks; the same on every rank.

        Raises:
            CollectiveError: there is no Horovod, or it runs already and lacks one of the groups.
        """
        hvd = self._hvd
        if not hvd.is_initialized():
            self._initialise(lines)
        missing = [line for line in lines if line.of(hvd.rank()) not in self.process_sets]
        if missing:
            sets = ", ".join(f"{m.length} ranks at a distance of {m.stride}" for m in missing)
            raise CollectiveError(
                f"Horovod runs already, without process sets of {sets}; name every mesh shape "
                "of this program at its start: meshimpl.initialise(['row:4', 'row:2,col:2'])"
            )

    def _initialise(self, lines: Sequence[Lines]) -> None:
        hvd = self._hvd
        launch.check_launcher()
        launch.set_horovod_defaults()
        with contextlib.suppress(RuntimeError):  # TensorFlow has begun with threads of its own
            launch.configure_threads()
        here = launch.detect()
        sets = [hvd.ProcessSet(list(g)) for g in self._registered(lines, here.rank, here.size)]
        hvd.init(process_sets=sets)
        if hvd.size() != here.size:
            raise CollectiveError(
                f"the launcher started {here.size} ranks, but Horovod finds {hvd.size()}: it was "
                "built with another MPI than the one that runs this job"
            )
        launch.abort_on_error()
        self.process_sets.update({tuple(s.ranks): s for s in sets})
        self.process_sets[tuple(range(here.size))] = hvd.global_process_set

    def _registered(self, lines: Sequence[Lines], rank: int, size: int) -> list[Ranks]:
        """Returns the groups, in the same order on all ranks, that a rank names to Horovod.

        These are its own groups. A Horovod that was built elsewhere wants the groups of all ranks
        on each rank, and gives each group a communicator of the whole job.
        """
        from horovod.common import process_sets

        lines = [line for line in lines if line.length < size]
        if hasattr(process_sets, "RANKS_REGISTER_THEIR_OWN"):
            return [line.of(rank) for line in lines]
        groups = [group for line in lines for group in line.groups(size)]
        if len(groups) > MANY_SETS and rank == 0:
            warnings.warn(
                f"each rank registers all {len(groups)} process sets of the job; a Horovod built "
                f"by `python -m meshimpl.horovod_wheel` registers a rank's own {len(lines)}",
                stacklevel=2,
            )
        return groups

    def record_timeline(self, path: Path | None) -> None:
        """Begins to record this rank's collectives in a file, or ends it. On all ranks.

        Horovod records only rank 0.

        Args:
            path: the file, in Chrome's trace format; None ends the recording.

        Raises:
            ValueError: the variable has another value than `prepare_timeline` gives it.
        """
        if (value := os.environ.get(TIMELINE)) != DYNAMIC:
            raise ValueError(f"{TIMELINE}={value}: unset it, so that parts can be recorded")
        if path is not None:
            self._hvd.start_timeline(str(path))
        else:
            self._hvd.stop_timeline()

    @property
    def wants_own_gpus(self) -> bool:
        """Whether no two ranks may have the same GPU: Horovod was built with NCCL."""
        return bool(self._hvd.nccl_built())

    @property
    def is_running(self) -> bool:
        """Whether Horovod has been started and not been shut down."""
        return "horovod.tensorflow" in sys.modules and bool(self._hvd.is_initialized())

    def _process_set(self, ranks: Ranks) -> Any:
        try:
            return self.process_sets[ranks]
        except KeyError:
            raise CollectiveError(f"no process set was started for the ranks {ranks}") from None

    def reduce(self, x: tf.Tensor, reduction: str, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the element-wise reduction over the group, on each of its ranks."""
        hvd = self._hvd
        op = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}[reduction]
        process_set = self._process_set(ranks)
        return hvd.mpi_ops._allreduce(x, name=name, op=op, process_set=process_set)

    def gather(self, x: tf.Tensor, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the group's tensors joined along dimension 0, in the order of the ranks."""
        return self._hvd.allgather(x, name=name, process_set=self._process_set(ranks))

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
        process_set = self._process_set(ranks)
        result = self._hvd.alltoall(x, splits=counts, name=name, process_set=process_set)
        return result[0] if isinstance(result, (tuple, list)) else result

    def broadcast(self, x: tf.Tensor, root: int, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the tensor of the rank `root` (its rank in the job) on each rank of the group."""
        process_set = self._process_set(ranks)
        return self._hvd.broadcast(x, root_rank=root, name=name, process_set=process_set)


def prepare_timeline() -> None:
    """Lets this process record a timeline later. Call it before the engine starts.

    A thread of rank 0 then takes a part of a core until the end.
    """
    os.environ.setdefault(TIMELINE, DYNAMIC)


@functools.cache
def current() -> HorovodEngine:
    """Returns this process's engine; see `HorovodEngine.start`."""
    return HorovodEngine()
