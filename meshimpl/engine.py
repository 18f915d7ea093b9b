"""The engine of collectives: Horovod's process sets, and NCCL's sends and receives if asked.

This is the only module that names Horovod. Another engine has the methods of `HorovodEngine`, and
`current` returns it. Groups of one rank need no engine, so a job of one rank imports none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from meshimpl import launch
from meshimpl.graph_guards import NO_GRADIENT, own
from meshimpl.mesh_shape import Lines, Ranks

MAX_ELEMENTS = 2**31 - 1
"""Elements of the largest tensor that an exchange can carry; MPI counts them as int32."""


TIMELINE, DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"
"""Variable that makes Horovod record its collectives, and its value for parts of a job."""
MANY_SETS = 200
"""Process sets, of all ranks, above which a Horovod that wants them all on each rank is slow."""


EXCHANGE = "MESHIMPL_EXCHANGE"
"""Variable that chooses what exchanges rows: "horovod", "nccl", or the path of an NCCL library."""


class CollectiveError(RuntimeError):
    """The engine cannot work in a group, for example because it was started without that group."""


class Rows(NamedTuple):
    """Numbers of rows that a rank exchanges each time: for each rank of a group, and from each."""

    sent: np.ndarray
    received: np.ndarray


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

    def prepare(self) -> None:
        """Does nothing; another engine may find out here whether it can connect."""

    def connect(self) -> None:
        """Does nothing; another engine may connect ranks here, once their devices are placed."""

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
        self,
        x: tf.Tensor,
        counts: Rows | tf.Tensor | None,
        ranks: Ranks,
        name: str,
    ) -> tf.Tensor:
        """Sends rows of dimension 0 to each rank of the group and returns what arrives.

        Args:
            x: rows for the first rank, then for the second, and so on.
            counts: numbers of rows; or int32 number of rows for each rank, where no rank knows what
                it receives; None sends every rank the same number.
            ranks: the group.
            name: of this collective.

        Returns:
            The rows that arrive, in the order of the ranks. Their number is not known statically.
        """
        process_set = self._process_set(ranks)
        splits = own(counts.sent) if isinstance(counts, Rows) else counts
        result = self._hvd.alltoall(x, splits=splits, name=name, process_set=process_set)
        return result[0] if isinstance(result, (tuple, list)) else result

    def broadcast(self, x: tf.Tensor, root: int, ranks: Ranks, name: str) -> tf.Tensor:
        """Returns the tensor of the rank `root` (its rank in the job) on each rank of the group."""
        process_set = self._process_set(ranks)
        return self._hvd.broadcast(x, root_rank=root, name=name, process_set=process_set)


class NcclEngine(HorovodEngine):
    """Horovod, but for exchanges of known numbers of rows: NCCL's sends and receives make those.

    They are put on TensorFlow's stream: they wait for no cycle of Horovod's, for no negotiation and
    for no numbers of other ranks. They have no names. In each group all ranks must therefore make
    them in the same order, as the collectives of mesh functions are. Other collectives, and
    exchanges whose numbers only the sender knows, remain Horovod's.

    Args:
        library: path of NCCL's library; "nccl" for the one of TensorFlow's CUDA packages, or of the
            system.
    """

    def __init__(self, library: str) -> None:
        super().__init__()
        self._named, self._joined = library, dict[Ranks, str]()

    @functools.cached_property
    def _ops(self) -> Any:
        operations = self._hvd.mpi_ops.MPI_LIB
        if not hasattr(operations, "meshimpl_exchange"):
            raise CollectiveError(
                f"{EXCHANGE}={self._named}: this Horovod was built without exchanges by NCCL; "
                "`python -m meshimpl.horovod_wheel` builds one that has them"
            )
        return operations

    @functools.cached_property
    def _device(self) -> str:
        if tf.config.get_visible_devices("GPU"):
            return "GPU:0"
        if self._named == "nccl":
            raise CollectiveError(
                f"{EXCHANGE}=nccl: this rank has no GPU, and NCCL moves the memory of GPUs alone; "
                "unset the variable"
            )
        return "CPU:0"

    @property
    def _library(self) -> str:
        if self._named != "nccl":
            return self._named
        spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
        folders = list(spec.submodule_search_locations or ()) if spec else []
        installed = [path for folder in folders for path in Path(folder).glob("lib/libnccl.so.2")]
        return str(installed[0]) if installed else "libnccl.so.2"

    def prepare(self) -> None:
        """Finds out whether this rank can connect.

        Raises:
            CollectiveError: there is no NCCL or no GPU, or Horovod lacks the operations.
        """
        _ = self._device, self._ops
        try:
            ctypes.CDLL(self._library)
        except OSError as error:
            raise CollectiveError(
                f"{EXCHANGE}={self._named}: NCCL cannot be loaded ({error}): pip install "
                "nvidia-nccl-cu12, or unset the variable, and Horovod exchanges all rows"
            ) from error

    def connect(self) -> None:
        """Joins each group of this rank. On all ranks, after `start`.

        Raises:
            CollectiveError: NCCL refuses a group.
        """
        hvd = self._hvd
        for ranks, process_set in self.process_sets.items():
            # Groups are lines of ranks, which their ends and their length tell apart.
            group, index = f"{ranks[0]}-{ranks[-1]} of {len(ranks)}", ranks.index(hvd.rank())
            with tf.init_scope(), tf.device("CPU:0"):
                identity = tf.zeros([128], tf.uint8) if index else self._made("new_group", "CPU:0")
                name = f"nccl {group}"
                identity = hvd.broadcast(identity, ranks[0], name=name, process_set=process_set)
            places = {"group": group, "size": len(ranks), "index": index}
            self._made("join_group", self._device, identity, **places)
            self._joined[ranks] = group

    def _made(self, operation: str, device: str, *inputs: tf.Tensor, **attributes: Any) -> Any:
        """Returns what an operation on groups gives on a device."""
        call = getattr(self._ops, f"meshimpl_{operation}")
        try:
            with tf.init_scope(), tf.device(device):
                return call(*inputs, library=self._library, **attributes)
        except tf.errors.OpError as error:
            # Without the names of the operation, before and after.
            reason = error.message.rpartition("}} ")[2].partition(" [Op:")[0]
            raise CollectiveError(
                f"{EXCHANGE}={self._named}: {reason}; NCCL_DEBUG=WARN tells more; unset the "
                "variable, and Horovod exchanges all rows"
            ) from error

    @property
    def wants_own_gpus(self) -> bool:
        """Whether no two ranks may have the same GPU."""
        return True

    def exchange(
        self,
        x: tf.Tensor,
        counts: Rows | tf.Tensor | None,
        ranks: Ranks,
        name: str,
    ) -> tf.Tensor:
        """Sends and receives rows, see `HorovodEngine.exchange`."""
        if counts is None and x.shape.rank and x.shape[0] is not None:
            each = np.full(len(ranks), x.shape[0] // len(ranks))
            counts = Rows(each, each)
        if not isinstance(counts, Rows):
            return super().exchange(x, counts, ranks, name)
        self._process_set(ranks)
        sent, received = (each.tolist() for each in counts)
        with tf.device(self._device):
            return self._ops.meshimpl_exchange(
                x, group=self._joined[ranks], sent=sent, received=received, name=name
            )


@tf.RegisterGradient("MeshimplExchange")
def _refuse_gradient(*_: Any) -> None:
    raise LookupError(NO_GRADIENT)


def prepare_timeline() -> None:
    """Lets this process record a timeline later. Call it before the engine starts.

    A thread of rank 0 then takes a part of a core until the end.
    """
    os.environ.setdefault(TIMELINE, DYNAMIC)


def exchanges_by() -> str:
    """Returns the value of MESHIMPL_EXCHANGE."""
    return os.environ.get(EXCHANGE, "") or "horovod"


@functools.cache
def current() -> HorovodEngine:
    """Returns this process's engine; see `HorovodEngine.start`.

    Raises:
        CollectiveError: the variable MESHIMPL_EXCHANGE has another value than it may have.
    """
    chosen = exchanges_by()
    if chosen == "horovod":
        return HorovodEngine()
    if chosen == "nccl" or os.sep in chosen:
        return NcclEngine(chosen)
    raise CollectiveError(
        f'{EXCHANGE} is "horovod", "nccl", the path of a library or not set, not "{chosen}"'
    )
