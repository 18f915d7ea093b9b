"""In situ training: ranks simulate the universes they train on, and draw them from a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from flowpm_dist.cosmoflow.planning.phases import PhaseClock
from flowpm_dist.cosmoflow.volumes.augmentation import Augment, View, seen
from flowpm_dist.cosmoflow.volumes.draws import Draws
from flowpm_dist.cosmoflow.volumes.universes import Generation, UniverseMaker
from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class Batch:
    """The batch of a step: this replica's lanes of it.

    Attributes:
        volumes: what is seen, such as a density of mean 1 or counts, blocks [lane, x/row, y/col, z]
            or with channels.
        parameters: [lane, parameter] [physical units].
        samples: the number of each sample, int64 [lane].
    """

    volumes: np.ndarray
    parameters: np.ndarray
    samples: np.ndarray


class ReplayBuffer:
    """A buffer of the latest generations of this replica's universes.

    Args:
        capacity: the number of generations that are kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.made = 0
        self._volumes: np.ndarray | None = None
        self._parameters: np.ndarray | None = None

    def skip_to(self, generation: int) -> None:
        """Empties the buffer and sets the number of the next generation that is added."""
        self.made = generation

    def add(self, generation: Generation) -> None:
        """Adds a generation; it replaces the oldest one if the buffer is full."""
        if self._volumes is None or self._parameters is None:
            shape = self.capacity, *generation.volumes.shape
            self._volumes = np.empty(shape, generation.volumes.dtype)
            self._parameters = np.empty((self.capacity, *generation.parameters.shape))
        place = self.made % self.capacity
        self._volumes[place] = generation.volumes
        self._parameters[place] = generation.parameters
        self.made += 1

    def get(self, generation: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a lane's volume and parameters from a generation that is kept."""
        assert self._volumes is not None and self._parameters is not None
        assert self.made - self.capacity <= generation < self.made
        at = generation % self.capacity
        return self._volumes[at, lane], self._parameters[at, lane]


class InSituSource:
    """A source of batches of universes that are simulated during the training.

    The samples of a step follow from the seed and the number of the step. So a training resumes
    exactly: the universes that its buffer held are simulated again.

    Args:
        maker: the maker of the universes, of which the stream "train" is used.
        mesh: the mesh of all ranks.
        draws: the order in which universes are made and used.
        augment: how a universe is transformed each time it is used: see `View.draw`.
        axis: the line of sight, see `View.draw`.
        clock: the clock of the phases "simulate", "read" and "augment".
        made: called with every new generation.
        ahead: whether to simulate in the background while the network trains. This applies to
            replicas of one rank only: two threads must not communicate with other ranks.
    """

    def __init__(
        self,
        maker: UniverseMaker,
        mesh: ProcessMesh,
        draws: Draws,
        *,
        augment: Augment,
        axis: str | None = None,
        clock: PhaseClock,
        made: Callable[[Generation], None] | None = None,
        ahead: bool = True,
    ) -> None:
        self.maker, self.mesh, self.draws = maker, mesh, draws
        self.augment, self.axis, self.clock = augment, axis, clock
        self.lanes = maker.lanes
        self.buffer = ReplayBuffer(draws.buffer // self.lanes.batch)
        self._made = made
        alone = mesh.size == mesh.axis_size("replica")
        self._worker = ThreadPoolExecutor(1) if ahead and alone else None
        self._next: tuple[int, Future[Generation]] | None = None

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Simulates the universes that the buffer holds when a step begins.

        Args:
            step: the first step that will be asked for.
            progress: called with the numbers of simulations made and to be made, over all replicas.
        """
        wanted = self.draws.made(step)
        first = max(0, wanted - self.buffer.capacity)
        self.buffer.skip_to(first)
        for generation in range(first, wanted):
            self._add(self._make(generation))
            self.mesh.barrier()  # replicas are never further apart than a generation
            if progress is not None:
                done = generation - first + 1
                progress(done * self.lanes.batch, (wanted - first) * self.lanes.batch)
        self._look_ahead()

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; steps must be asked for in order."""
        wanted = self.draws.made(step)
        with self.clock("simulate"):
            while self.buffer.made < wanted:
                self._add(self._take(self.buffer.made))
                self._look_ahead()
        return self._drawn(step, self.draws.drawn(step))

    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns batches drawn from the present content of the buffer."""
        made = self.buffer.made
        return (self._drawn(n, self.draws.preview(n, made)) for n in range(batches))

    def simulations(self, step: int) -> int:
        """Returns the number of simulations made when a step begins, over all replicas."""
        return self.draws.made(step) * self.lanes.batch

    def _make(self, generation: int) -> Generation:
        return self.maker.make("train", generation, self.draws.members(generation))

    def _add(self, generation: Generation) -> None:
        self.buffer.add(generation)
        if self._made is not None:
            self._made(generation)

    def _take(self, generation: int) -> Generation:
        if self._next is not None and self._next[0] == generation:
            return self._next[1].result()
        return self._make(generation)

    def _look_ahead(self) -> None:
        generation = self.buffer.made
        if self._worker is not None and generation < self.draws.generations:
            self._next = generation, self._worker.submit(self._make, generation)

    def _drawn(self, step: int, generations: np.ndarray) -> Batch:
        volumes, parameters, views = [], [], []
        with self.clock("read"):
            for lane in self.lanes:
                rng = np.random.default_rng([self.draws.seed, step, lane])
                volume, row = self.buffer.get(int(generations[lane]), lane - self.lanes.first)
                views.append(View.draw(rng, volume.shape[2], self.augment, self.axis))
                volumes.append(volume)
                parameters.append(row)
            blocks = np.stack(volumes)
        if self.augment:
            with self.clock("augment"):
                blocks = seen(blocks, views, self.mesh)
        samples = np.array([step * self.lanes.batch + lane for lane in self.lanes])
        return Batch(blocks, np.stack(parameters), samples)

    def close(self) -> None:
        """Stops the work in the background."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
