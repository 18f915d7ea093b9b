"""The Cartesian grid of ranks: named axes, coordinates, and a communicator for each line and plane.

Ranks are laid out row-major: the last axis varies fastest. `row:2,col:2` puts ranks 0 and 1 in the
first row. A communicator of the axes `("row",)` is the line of ranks that differ only in `row`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import engine, launch, rendezvous
from meshimpl.collectives import Communicator
from meshimpl.launch.gpus import HIDES, too_few_gpus
from meshimpl.mesh_shape import (
    MeshError,
    MeshShape,
    format_mesh_shape,
    lines_of,
    parse_mesh_shape,
)

LARGEST_GATHER = 2**28
"""Bytes that `ProcessMesh.gather_to_root` moves in one message; MPI counts them as int32."""


@dataclass(frozen=True)
class Plane(Communicator):
    """Ranks that differ in several axes and have no process set of their own.

    Its only collective is `allreduce`, which reduces along one axis after the other.
    """

    lines: tuple[Communicator, ...]

    @property
    def meetings(self) -> tuple[tuple[int, ...], ...]:
        """The meetings of the plane's lines, one line after the other."""
        return tuple(line.ranks for line in self.lines if line.size > 1)

    def allreduce(self, x: tf.Tensor, reduction: str = "sum") -> tf.Tensor:
        """Returns the reduction over the plane; see `Communicator.allreduce`."""
        for line in self.lines:
            x = line.allreduce(x, reduction)
        return x


def initialise(shapes: Iterable[MeshShape]) -> None:
    """Starts the engine with the communicators of every mesh shape this program will use.

    Needed only by a program with several meshes: Horovod registers its process sets at its start,
    once in a process. A program with one mesh just makes its `ProcessMesh`.

    Raises:
        MeshError: a shape is invalid, or its size is not the number of ranks.
        CollectiveError: the engine is already running, without one of the communicators.
    """
    parsed, ranks = [parse_mesh_shape(shape) for shape in shapes], launch.detect().size
    for axes in parsed:
        if (places := math.prod(size for _, size in axes)) != ranks:
            raise MeshError(
                f"the mesh {format_mesh_shape(axes) or '(no axes)'} has {places} places, but this "
                f"job has {ranks} rank{'s' if ranks != 1 else ''}; start it on {places} ranks, "
                f"or give a mesh whose sizes multiply to {ranks}"
            )
    if ranks == 1:
        place_devices()
        return
    job = engine.current()
    with launch.start_in_time():
        job.start(sorted({each for axes in parsed for each in lines_of(axes)}))
        place_devices(shared=not job.wants_own_gpus)
        rendezvous.stay_together(tuple(range(ranks)))
    rendezvous.connect(tuple(range(ranks)))


def place_devices(here: launch.RankEnvironment | None = None, *, shared: bool = False) -> None:
    """Shows TensorFlow one GPU for this rank, whose memory it takes as it needs it.

    Does nothing where TensorFlow finds no GPU. A single GPU that the scheduler, the program or
    CUDA_VISIBLE_DEVICES has chosen for this rank is accepted.

    Args:
        here: the rank's place in its job; by default this process's.
        shared: let several ranks have one GPU, which NCCL refuses.

    Raises:
        LaunchError: the node has more ranks than GPUs, or TensorFlow has begun to use several GPUs
            already. It is raised on every rank of the node.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return
    here = here or launch.detect()
    chosen = (
        here.launcher == "srun"
        or HIDES in os.environ
        or gpus != tf.config.list_physical_devices("GPU")
    )
    if here.local_size > len(gpus) and not shared and not (chosen and len(gpus) == 1):
        raise launch.LaunchError(too_few_gpus(here.local_size, len(gpus)))
    mine = gpus[here.local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        # A rank alone on its node, or with one GPU in sight, is where it should be.
        if here.local_size > 1 and len(gpus) > 1:
            raise launch.LaunchError(
                f"TensorFlow has begun to use all {len(gpus)} GPUs of this node before its ranks "
                "shared them out: make the ProcessMesh, or call meshimpl.initialise, before the "
                "first tensor"
            ) from error


_CACHES: dict[Any, dict[Any, Any]] = {}
"""See `ProcessMesh.cache`."""


class ProcessMesh:
    """This job's ranks as a grid of named axes.

    Args:
        shape: such as `"replica:1,row:2,col:2"`; the product of the sizes is the number of ranks.

    Raises:
        MeshError: the shape is invalid (see `parse_mesh_shape`), or the product is not the number
            of ranks. Raised on every rank before anything is communicated.
    """

    def __init__(self, shape: MeshShape) -> None:
        self.axes = parse_mesh_shape(shape)
        initialise([self.axes])
        here = launch.detect()
        self.rank = here.rank

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's place along each axis."""
        return tuple(int(c) for c in np.unravel_index(self.rank, self.shape)) if self.axes else ()

    def axis_size(self, name: str) -> int:
        """Returns the size of an axis; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(name, 1)

    def coordinate(self, name: str) -> int:
        """Returns this rank's place along an axis; 0 for an axis that the mesh does not have."""
        return dict(zip(self.names, self.coordinates, strict=True)).get(name, 0)

    @functools.cached_property
    def _communicators(self) -> dict[tuple[str, ...], Communicator]:
        numbers = np.arange(self.size).reshape(self.shape)
        registered = {lines.of(self.rank) for lines in lines_of(self.axes)}
        communicators: dict[tuple[str, ...], Communicator] = {}
        for count in range(1, len(self.axes) + 1):
            for names in itertools.combinations(self.names, count):
                place = [
                    slice(None) if name in names else here
                    for name, here in zip(self.names, self.coordinates, strict=True)
                ]
                mine = tuple(numbers[tuple(place)].ravel().tolist())
                if len(mine) == 1 or mine in registered:
                    communicators[names] = Communicator(mine, self.rank)
                else:
                    lines = tuple(communicators[name,] for name in names)
                    communicators[names] = Plane(mine, self.rank, lines)
        return communicators

    @property
    def cache(self) -> dict[Any, Any]:
        """Objects that callers store for the life of this process, such as lowered functions.

        All meshes of the same layout share them, so that a function that was lowered for one
        simulation is used again by the next. Callers limit what they keep, all ranks in the same
        order.
        """
        return _CACHES.setdefault((self._layout, self.rank), {})

    def communicator(self, *names: str) -> Communicator:
        """Returns the ranks that differ from this one only in the named axes (in any order)."""
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise MeshError(f"the mesh {self} has no axis {unknown[0]!r}")
        ordered = tuple(name for name in self.names if name in names)
        return self._communicators[ordered] if ordered else Communicator((self.rank,), self.rank)

    @property
    def world(self) -> Communicator:
        """The communicator of all ranks."""
        return self.communicator(*self.names)

    def without(self, axis: str) -> ProcessMesh:
        """Returns the ranks that share this one's place along an axis, as a mesh of the other axes.

        Each such group works on its own. If the mesh has no such axis, or if the axis has a single
        place, the result is this mesh. Later calls with the same axis return the same object, with
        its `kept`.

        Raises:
            MeshError: two other axes have several places, and this axis does not come before them.
        """
        if self.axis_size(axis) == 1:
            return self
        if isinstance(self.communicator(*(name for name in self.names if name != axis)), Plane):
            raise MeshError(
                f"the mesh {self} can be cut along its first axis only: ranks that share a place "
                f"along {axis!r} have no process set of their own; name {axis!r} first in the mesh"
            )
        return self._sections(axis)

    @functools.cached_property
    def _sections(self) -> Callable[[str], ProcessMesh]:
        return functools.cache(functools.partial(_Section, self))

    def barrier(self, name: str | None = None) -> None:
        """Waits until every rank has called this. Not for use inside a graph.

        Args:
            name: identifies the barrier, so that ranks can check that they wait at the same one; by
                default the source line of the call.

        Raises:
            CollectiveError: another rank is in a different collective; see `meshimpl.rendezvous`.
        """
        if self.size > 1:
            where = f"at {rendezvous.caller()}" if name is None else repr(name)
            for group in self.world.meetings:
                rendezvous.meet(group, f"barrier {where}")

    def check_equal(self, what: str, **inputs: Any) -> None:
        """Checks that all ranks were given the same inputs. Not for use inside a graph.

        It costs one small message, and what is not equal is named: "seed differs between ranks:
        rank 0 has 1, rank 1 has 2".

        Args:
            what: what they are the inputs of, such as "a run".
            **inputs: by name: numbers, texts, arrays, and containers, dataclasses and options of
                them. Of other objects only the types are compared, of functions the names.

        Raises:
            CollectiveError: an input differs; on every rank.
        """
        if self.size > 1:
            rendezvous.check_equal(self.world.meetings, what, inputs)

    def raise_together(self, problem: str, raises: type[Exception]) -> None:
        """Raises an error on all ranks if one of them has a problem. On all ranks together, eager.

        Args:
            problem: the problem of this rank, or an empty text.
            raises: the class of the error, whose message is the problem of the first rank that has
                one.
        """
        here = self.rank if problem else self.size
        first = int(self.world.allreduce(tf.constant(here), "min"))
        if first == self.size:
            return
        texts = self.gather_to_root(np.frombuffer(problem.encode(), np.uint8))
        text = np.zeros(0, np.uint8) if texts is None else texts[first]
        raise raises(self.array_from_root(text).tobytes().decode())

    def gather_to_root(self, array: np.ndarray) -> list[np.ndarray] | None:
        """Returns every rank's array, in rank order, on rank 0, and None on the others. Eager.

        The arrays together may exceed the size limit of one message.

        Args:
            array: any dtype that numpy can view as bytes. Shapes may differ between ranks; dtype
                and number of dimensions may not.
        """
        array = np.ascontiguousarray(array)
        if self.size == 1:
            return [array]
        shapes = self.world.allgather(tf.constant([array.shape], tf.int64)).numpy()
        lengths = [math.prod(map(int, shape)) * array.itemsize for shape in shapes]
        ends = np.cumsum(lengths)
        data, mine = array.reshape(-1).view(np.uint8), int(ends[self.rank]) - array.nbytes
        moved = np.empty(int(ends[-1]) if self.rank == 0 else 0, np.uint8)
        for start in range(0, int(ends[-1]), LARGEST_GATHER):
            first, last = np.clip([start - mine, start + LARGEST_GATHER - mine], 0, data.size)
            counts = [last - first] + [0] * (self.size - 1)
            part = self.world.alltoallv(tf.constant(data[first:last]), tf.constant(counts))
            if self.rank == 0:
                moved[start : start + LARGEST_GATHER] = part.numpy()
        if self.rank != 0:
            return None
        pieces = np.split(moved, ends[:-1])
        return [p.view(array.dtype).reshape(s) for p, s in zip(pieces, shapes, strict=True)]

    def array_from_root(self, array: np.ndarray) -> np.ndarray:
        """Returns the array of rank 0, on all ranks. Eager.

        Args:
            array: one-dimensional array of any length, with the same dtype on all ranks. Only rank
                0's array is used.
        """
        count = int(self.world.broadcast(tf.constant(array.size, tf.int64)))
        if not count:
            return np.zeros(0, array.dtype)
        sent = array if self.rank == 0 else np.zeros(count, array.dtype)
        return self.world.broadcast(tf.constant(sent)).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh, (self.axes,)

    @property
    def _layout(self) -> tuple[Any, ...]:
        """A key that is equal for two meshes whose groups have the same ranks."""
        return self.axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessMesh) and self._layout == other._layout

    def __hash__(self) -> int:
        return hash(self._layout)

    def __str__(self) -> str:
        return format_mesh_shape(self.axes)

    def __repr__(self) -> str:
        return f"ProcessMesh({str(self)!r}, rank={self.rank})"


class _Section(ProcessMesh):
    """A mesh of the ranks at one place along an axis of another."""

    def __init__(self, mesh: ProcessMesh, axis: str) -> None:
        self.axes = tuple((name, size) for name, size in mesh.axes if name != axis)
        self._mesh = mesh
        self.rank = mesh.communicator(*self.names).index

    def __reduce__(self) -> tuple[Any, ...]:
        (axis,) = set(self._mesh.names) - set(self.names)
        return _Section, (self._mesh, axis)

    @property
    def _layout(self) -> tuple[Any, ...]:
        return self._mesh._layout, self.axes

    @property
    def _communicators(self) -> dict[tuple[str, ...], Communicator]:
        return self._mesh._communicators
