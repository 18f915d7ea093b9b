"""The batches of a training: simulated while it runs, read from files, or made up."""

from __future__ import annotations

import abc
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.volumes.arrays import ArrayDataset, arrays_of
from flowpm_dist.cosmoflow.volumes.draws import Augment, Draws, Lanes, View, views_of
from flowpm_dist.cosmoflow.volumes.generations import Generation
from flowpm_dist.cosmoflow.volumes.record_files import Block, DatasetHeader
from flowpm_dist.cosmoflow.volumes.records import BatchOfSamples, Dataset, RecordDataset
from flowpm_dist.cosmoflow.volumes.universes import UniverseMaker, draws_of, maker_of
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

PHASES = ("simulate", "read", "augment", "halo", "compute", "allreduce", "other")
"""Making universes; drawing or reading a batch; rotating and shifting it; messages in a replica;
layers and optimiser; messages that add gradients; validation, checkpoints and logs."""


class PhaseClock:
    """Seconds of each phase since the last `lap`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside the context to a phase."""
        begin = time.perf_counter()
        try:
            with tf.profiler.experimental.Trace(f"phase:training: {phase}"):  # for `--trace`
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def move(self, phase: str, source: str, seconds: float) -> None:
        """Moves seconds that were counted in `source` to `phase`."""
        self.seconds[phase] += seconds
        self.seconds[source] -= seconds

    def lap(self) -> dict[str, float]:
        """Returns the seconds so far, and starts again from zero."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


@dataclass(frozen=True)
class Batch:
    """This replica's lanes of the batch of a step.

    Attributes:
        volumes: observed universes, such as densities of mean 1 or counts, blocks
            [lane, x/row, y/col, z] or with channels.
        parameters: [lane, parameter] [physical units].
        samples: the number of each sample, int64 [lane].
    """

    volumes: np.ndarray
    parameters: np.ndarray
    samples: np.ndarray


@dataclass(eq=False)
class BatchSource(abc.ABC):
    """The source of a training's batches.

    Attributes:
        mesh: the mesh of all ranks.
        lanes: this replica's places in each batch.
        seed: the seed of the order.
        augment: how a volume is transformed each time it is used: see `View.draw`.
        clock: the clock of the phases "simulate", "read" (the time that the training waits for a
            batch) and "augment".
        axis: the line of sight, see `View.draw`.
        dataset: the files, if volumes are read.
        maker: the maker of universes, if they are simulated.
    """

    mesh: ProcessMesh
    lanes: Lanes
    seed: int
    augment: Augment
    clock: PhaseClock
    axis: str | None = None
    dataset: Dataset | None = None
    maker: UniverseMaker | None = None

    def augmented(self, step: int, volumes: np.ndarray, parameters: np.ndarray) -> Batch:
        """Returns the batch of a step; each volume is rotated and shifted at random."""
        if self.augment:
            with self.clock("augment"):
                lanes = [np.random.default_rng([self.seed, step, lane]) for lane in self.lanes]
                width = volumes.shape[3]
                views = [View.draw(rng, width, self.augment, self.axis) for rng in lanes]
                volumes = views_of(volumes, views, self.mesh)
        samples = np.array([step * self.lanes.batch + lane for lane in self.lanes])
        return Batch(volumes, parameters, samples)

    @abc.abstractmethod
    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Prepares for a first step.

        Args:
            step: the number of the first step.
            progress: called with the numbers of simulations made and to be made, over all replicas.
        """

    @abc.abstractmethod
    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; steps must be requested in order.

        Raises:
            RecordError: a file is damaged.
        """

    @abc.abstractmethod
    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns some batches after `start`, without changing the batches of the steps."""

    def simulations(self, step: int) -> int:
        """Returns the number of simulations made before the batch of a step, over all replicas."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Ends the work; no more steps will be requested."""


class InSituSource(BatchSource):
    """A source of batches of universes that are simulated during the training.

    The samples of a step follow from the seed and the number of the step. So a resumed training
    continues exactly: it simulates the universes in its buffer again.

    Args:
        maker: the maker of universes; the stream "train" is used.
        mesh: see `BatchSource`.
        draws: the order in which universes are made and used.
        made: called with every new generation.
        options: augment, axis and clock of `BatchSource`.
    """

    maker: UniverseMaker

    def __init__(
        self,
        maker: UniverseMaker,
        mesh: ProcessMesh,
        draws: Draws,
        *,
        made: Callable[[Generation], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(mesh, maker.lanes, seed=draws.seed, **options)
        self.maker, self.draws = maker, draws
        self._kept: deque[Generation] = deque(maxlen=draws.buffer // self.lanes.batch)
        self._number = 0  # the generation that is added next
        self._made = made
        # In the background while the network trains, by replicas of one rank only: two threads must
        # not communicate with other ranks.
        alone = mesh.size == mesh.axis_size("replica")
        self._worker = ThreadPoolExecutor(1) if alone else None
        self._next: Callable[[], Generation]

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Simulates the universes that the buffer holds when a step begins.

        Args:
            step: the first step that will be requested.
            progress: called with the numbers of simulations made and to be made, over all replicas.
        """
        draws = self.draws
        wanted = draws.made(step)
        first = max(0, wanted - draws.buffer // self.lanes.batch)
        self._kept.clear()
        self._number = first
        for generation in range(first, wanted):
            self._add(self._make(generation))
            self.mesh.barrier()  # replicas are never further apart than a generation
            if progress is not None:
                done = generation - first + 1
                progress(done * self.lanes.batch, (wanted - first) * self.lanes.batch)
        self._look_ahead()

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step, once the universes that it needs are simulated."""
        wanted = self.draws.made(step)
        with self.clock("simulate"):
            while self._number < wanted:
                self._add(self._next())
                self._look_ahead()
        return self._drawn(step, self.draws.drawn(step))

    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns batches drawn from the present content of the buffer."""
        made = self._number
        return (self._drawn(n, self.draws.preview(n, made)) for n in range(batches))

    def simulations(self, step: int) -> int:
        """Returns the number of simulations made before the batch of a step, over all replicas."""
        return self.draws.made(step) * self.lanes.batch

    def _make(self, generation: int) -> Generation:
        return self.maker.make("train", generation, self.draws.members(generation))

    def _add(self, generation: Generation) -> None:
        self._kept.append(replace(generation, volumes=np.array(generation.volumes)))
        self._number += 1
        if self._made is not None:
            self._made(generation)

    def _look_ahead(self) -> None:
        """Begins the next generation in the background, or delays it until it is needed."""
        number = self._number
        self._next = functools.partial(self._make, number)
        if self._worker is not None and number < self.draws.generations:
            self._next = self._worker.submit(self._make, number).result

    def _drawn(self, step: int, generations: np.ndarray) -> Batch:
        oldest = self._number - len(self._kept)
        with self.clock("read"):
            first = self.lanes.first
            places = [(self._kept[generations[lane] - oldest], lane - first) for lane in self.lanes]
            volumes = np.stack([generation.volumes[place] for generation, place in places])
            rows = np.stack([generation.parameters[place] for generation, place in places])
        return self.augmented(step, volumes, rows)

    def close(self) -> None:
        """Stops the work in the background."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)


class FileSource(BatchSource):
    """Batches of a dataset, shuffled over all its samples before they are shared out.

    Args:
        dataset: this rank's blocks of the volumes.
        mesh, lanes, seed, augment, axis, clock: see `BatchSource`.
    """

    dataset: Dataset

    def __init__(self, dataset: Dataset, mesh: ProcessMesh, lanes: Lanes, **options: Any) -> None:
        super().__init__(mesh, lanes, dataset=dataset, **options)
        self._batches: Iterator[BatchOfSamples] = iter(())

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads ahead from a step on; there is no progress to report."""
        self._batches = self._batches_from(step)

    def _batches_from(self, step: int) -> Iterator[BatchOfSamples]:
        lane = self.lanes.first, self.lanes.count
        return self.dataset.batches(self.lanes.batch, lane, seed=self.seed, start_step=step)

    def batch(self, step: int) -> Batch:
        """Returns the next batch, which was read ahead; steps must be requested in order."""
        with self.clock("read"):
            read = _as_batch(next(self._batches))
        return self.augmented(step, read.volumes, read.parameters)

    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns the first batches, neither rotated nor shifted."""
        return map(_as_batch, itertools.islice(self._batches_from(0), batches))

    def close(self) -> None:
        """Stops reading."""
        self._batches = iter(())


class DummySource(BatchSource):
    """One batch of random numbers, repeated, to measure a training without reading data.

    Args:
        shape: the shape of this rank's block of a volume, (x, y, z) or with channels.
        parameters: the number of parameters.
        mesh, lanes, seed, augment, axis, clock: see `BatchSource`.
    """

    def __init__(
        self, shape: Sequence[int], parameters: int, mesh: ProcessMesh, lanes: Lanes, **options: Any
    ) -> None:
        super().__init__(mesh, lanes, **options)
        rng = np.random.default_rng([0, lanes.first])
        volumes = rng.standard_exponential((lanes.count, *shape), np.float32)
        y = rng.random((lanes.count, parameters), np.float32).astype(np.float64)
        self._batch = Batch(volumes, y, np.array([*lanes]))

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Does nothing, because the batch exists already."""

    def batch(self, step: int) -> Batch:
        """Returns the batch, rotated and shifted as volumes of data are."""
        return self.augmented(step, self._batch.volumes, self._batch.parameters)

    def preview(self, batches: int) -> Iterator[Batch]:
        """Repeats the batch."""
        return itertools.repeat(self._batch, batches)


def in_order(dataset: Dataset, lanes: Lanes) -> Iterator[Batch]:
    """Yields every sample of a dataset once, in batches; the last is filled from the beginning."""
    steps = -(-len(dataset) // lanes.batch)
    lane = lanes.first, lanes.count
    batches = dataset.batches(lanes.batch, lane, steps=steps, shuffle=False)
    yield from map(_as_batch, batches)


def _as_batch(samples: BatchOfSamples) -> Batch:
    """Returns samples as a batch; a single channel has no dimension of its own."""
    volumes, parameters, index = samples
    plain = volumes[..., 0] if volumes.shape[-1] == 1 else volumes
    return Batch(plain, parameters.astype(np.float64), index)


def source_of(
    plan: TrainingPlan,
    mesh: ProcessMesh,
    folder: TrainingFolder,
    lanes: Lanes,
    clock: PhaseClock,
    made: Callable[[Generation], None] | None = None,
) -> BatchSource:
    """Returns the source of a training's batches; no volume is made or read yet.

    Args:
        plan: the training.
        mesh: the ranks.
        folder: the training's folder.
        lanes: this rank's places of a batch.
        clock: the clock of the phases.
        made: called with each simulated generation.

    Raises:
        RecordError: the files are damaged or do not match the plan.
    """
    axis = None if plan.record is None else plan.record.options.line_of_sight
    options: dict[str, Any] = {"augment": plan.data.augment or False, "axis": axis, "clock": clock}
    if plan.simulates:
        maker = maker_of(plan, mesh, lanes, plan.simulated.simulations)
        return InSituSource(maker, mesh, draws_of(plan), made=made, **options)
    options["seed"] = plan.training.seed
    if plan.data.source == "dummy":
        block = DatasetHeader(plan.box.grid, plan.parameters, plan.channels).block_shape(
            Block.of(mesh)
        )
        shape = block if plan.channels > 1 else block[:3]
        return DummySource(shape, len(plan.parameters), mesh, lanes, **options)
    files = stored_split(plan, "train", folder.held_out, Block.of(mesh), mesh, staged=True)
    return FileSource(files, mesh, lanes, **options)


def stored_split(
    plan: TrainingPlan,
    split: str,
    held_out: Path,
    block: Sequence[int],
    mesh: ProcessMesh | None = None,
    *,
    staged: bool = False,
) -> Dataset:
    """Returns a split of a training that is stored in files.

    Args:
        plan: the training.
        split: its name.
        held_out: the dataset of a split that the training simulates.
        block: this rank's part of each volume.
        mesh: ranks that index public files together, see `RecordDataset`.
        staged: whether files are read from the fast folder that the plan names, if any.

    Raises:
        RecordError: the files are damaged or do not match the plan.
    """
    data, folder, names = plan.data, held_out, None
    if data.source == "arrays":
        return ArrayDataset(arrays_of(plan), split, block)
    if data.source == "files":
        folder, names = (staged and data.staging) or data.folder, data.parameters
    grid = plan.input_shape
    return RecordDataset(folder, split, grid=grid, block=block, parameters=names, mesh=mesh)
