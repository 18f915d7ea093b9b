"""Universes simulated by the ranks that train on them, and the buffer they are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from flowpm_dist.cosmoflow.augmentation import Augment, View, seen
from flowpm_dist.cosmoflow.phases import PhaseClock
from flowpm_dist.cosmoflow.priors import Priors
from flowpm_dist.grid.field import Field
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.statistics import density_histogram, power_spectrum
from meshimpl.process_mesh import ProcessMesh

HISTOGRAM_EDGES = np.linspace(-4.0, 5.0, 28)
"""Of ln(density), for the one-point distribution that baselines see."""


@dataclass(frozen=True)
class Lanes:
    """The places of every batch that are this replica's.

    A batch has as many lanes as volumes. Universe number i is of lane i modulo the batch, and is
    trained on in that lane alone: so what is trained on in a step does not depend on the number of
    replicas.

    Attributes:
        batch: volumes of a step over all replicas.
        first, count: this replica's lanes.
    """

    batch: int
    first: int
    count: int

    @classmethod
    def of(cls, mesh: ProcessMesh, batch: int) -> Lanes:
        """Returns the lanes of this rank's replica.

        Raises:
            ValueError: the replicas do not divide the batch.
        """
        replicas = mesh.axis_size("replica")
        if batch % replicas:
            raise ValueError(f"a batch of {batch} volumes does not divide over {replicas} replicas")
        count = batch // replicas
        return cls(batch, mesh.coordinate("replica") * count, count)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count))


@dataclass(frozen=True)
class Batch:
    """The batch of a step: this replica's lanes of it.

    Attributes:
        volumes: density, mean 1, blocks [lane, x/row, y/col, z] or with channels.
        parameters: [lane, parameter], physical units.
        samples: number of each sample, int64 [lane].
    """

    volumes: np.ndarray
    parameters: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class Generation:
    """One universe for each of this replica's lanes.

    Attributes:
        volumes: density, mean 1, blocks [lane, x/row, y/col, z], in the simulation's dtype.
        parameters: [lane, parameter].
        index: number of each simulation in its stream, int64 [lane].
        seeds: of the white noise, int64 [lane].
        k: wavenumbers of the power [bin] [h/Mpc].
        power: P(k) [lane, bin] [(Mpc/h)^3].
        histogram: share of the cells in each bin of ln(density) [lane, bin].
    """

    volumes: np.ndarray
    parameters: np.ndarray
    index: np.ndarray
    seeds: np.ndarray
    k: np.ndarray
    power: np.ndarray
    histogram: np.ndarray


def measured(density: Field) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns k, power and histogram of a density, see `Generation`. On all its ranks."""
    k, power = power_spectrum(density, window="cic")
    histogram = density_histogram(density, HISTOGRAM_EDGES, log=True)
    return k, power, histogram.counts / histogram.cells


class UniverseMaker:
    """Simulates the universes of streams, a generation of one universe for each lane at a time.

    Args:
        simulation: on `mesh.without("replica")`: each replica makes its universes for itself. Its
            cosmology gives what the priors leave open.
        priors: of the others, and the seeds.
        lanes: this replica's.
    """

    def __init__(self, simulation: Simulation, priors: Priors, lanes: Lanes) -> None:
        self.simulation, self.priors, self.lanes = simulation, priors, lanes

    def make(self, stream: str, generation: int) -> Generation:
        """Simulate a generation. On all ranks of the replica together.

        Raises:
            HaloError: a particle left the halo.
        """
        first = generation * self.lanes.batch + self.lanes.first
        count = self.lanes.count
        parameters = self.priors.draw(stream, first, count)
        seeds = self.priors.noise_seeds(stream, first, count)
        base = self.simulation.cosmology
        cosmologies = [
            base.replace(**dict(zip(self.priors.names, map(float, row), strict=True)))
            for row in parameters
        ]
        state = self.simulation.run(seed=seeds.tolist(), cosmology=cosmologies)
        density = state.density()
        index = np.arange(first, first + count, dtype=np.int64)
        return Generation(density.block.numpy(), parameters, index, seeds, *measured(density))


class ReplayBuffer:
    """The latest generations of this replica's universes.

    Args:
        capacity: generations that are kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.made = 0
        self._volumes: np.ndarray | None = None
        self._parameters: np.ndarray | None = None

    def skip_to(self, generation: int) -> None:
        """Empty the buffer; the next generation that is added has this number."""
        self.made = generation

    def add(self, generation: Generation) -> None:
        """Add a generation, in place of the oldest where there is no room."""
        if self._volumes is None or self._parameters is None:
            shape = self.capacity, *generation.volumes.shape
            self._volumes = np.empty(shape, generation.volumes.dtype)
            self._parameters = np.empty((self.capacity, *generation.parameters.shape))
        place = self.made % self.capacity
        self._volumes[place] = generation.volumes
        self._parameters[place] = generation.parameters
        self.made += 1

    def kept(self) -> int:
        """Number of generations that can be drawn."""
        return min(self.made, self.capacity)

    def get(self, place: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns volume and parameters of the `place`-th oldest generation that is kept."""
        assert self._volumes is not None and self._parameters is not None
        at = (self.made - self.kept() + place) % self.capacity
        return self._volumes[at, lane], self._parameters[at, lane]


@dataclass(frozen=True)
class ReplayPlan:
    """The number of simulations, and how often each is trained on.

    Attributes:
        simulations: in all, a multiple of the batch.
        reuse: how often each is trained on, on average.
        buffer: simulations that are kept to draw from.
        fill: simulations made before the first step.
    """

    simulations: int
    reuse: int
    buffer: int
    fill: int

    def steps(self, batch: int) -> int:
        """Of the whole training."""
        return self.simulations * self.reuse // batch

    def generations(self, step: int, batch: int) -> int:
        """Returns how many generations a step needs: one more every `reuse` steps."""
        return min(self.simulations // batch, self.fill // batch + step // self.reuse)


class InSituSource:
    """Batches of universes that are simulated while the training goes on.

    What a step trains on follows from the seed and the number of the step, so a training that is
    resumed goes on exactly: the universes that its buffer held are simulated again.

    Args:
        maker: of the universes, of the stream "train".
        mesh: all ranks.
        plan: how many, how often.
        seed: of what is drawn from the buffer.
        augment: whether a universe is seen otherwise each time: see `View.draw`.
        clock: counts "simulate", "read" and "augment".
        made: called with every new generation.
        ahead: simulate in the background while the network trains. For replicas of one rank: two
            threads must not talk to other ranks.
    """

    def __init__(
        self,
        maker: UniverseMaker,
        mesh: ProcessMesh,
        plan: ReplayPlan,
        *,
        seed: int,
        augment: Augment,
        clock: PhaseClock,
        made: Callable[[Generation], None] | None = None,
        ahead: bool = True,
    ) -> None:
        self.maker, self.mesh, self.plan = maker, mesh, plan
        self.seed, self.augment, self.clock = seed, augment, clock
        self.lanes = maker.lanes
        self.buffer = ReplayBuffer(plan.buffer // self.lanes.batch)
        self._made = made
        alone = mesh.size == mesh.axis_size("replica")
        self._worker = ThreadPoolExecutor(1) if ahead and alone else None
        self._next: tuple[int, Future[Generation]] | None = None

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Simulate what the buffer holds when a step begins.

        Args:
            step: the first that will be asked for.
            progress: called with simulations made and to be made, over all replicas.
        """
        wanted = self.plan.generations(step, self.lanes.batch)
        first = max(0, wanted - self.buffer.capacity)
        self.buffer.skip_to(first)
        for generation in range(first, wanted):
            self._add(self.maker.make("train", generation))
            self.mesh.barrier()  # replicas are never further apart than a generation
            if progress is not None:
                done = generation - first + 1
                progress(done * self.lanes.batch, (wanted - first) * self.lanes.batch)
        self._look_ahead()

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; steps are asked for in order."""
        wanted = self.plan.generations(step, self.lanes.batch)
        with self.clock("simulate"):
            while self.buffer.made < wanted:
                self._add(self._take(self.buffer.made))
                self._look_ahead()
        return self._drawn(step)

    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns some batches of what the buffer holds now."""
        return map(self._drawn, range(batches))

    def simulations(self, step: int) -> int:
        """Returns the number of simulations made when a step begins, over all replicas."""
        return self.plan.generations(step, self.lanes.batch) * self.lanes.batch

    def _add(self, generation: Generation) -> None:
        self.buffer.add(generation)
        if self._made is not None:
            self._made(generation)

    def _take(self, generation: int) -> Generation:
        if self._next is not None and self._next[0] == generation:
            return self._next[1].result()
        return self.maker.make("train", generation)

    def _look_ahead(self) -> None:
        generation = self.buffer.made
        if self._worker is not None and generation * self.lanes.batch < self.plan.simulations:
            self._next = generation, self._worker.submit(self.maker.make, "train", generation)

    def _drawn(self, step: int) -> Batch:
        volumes, parameters, views = [], [], []
        with self.clock("read"):
            for lane in self.lanes:
                rng = np.random.default_rng([self.seed, step, lane])
                place = int(rng.integers(self.buffer.kept()))
                volume, row = self.buffer.get(place, lane - self.lanes.first)
                views.append(View.draw(rng, volume.shape[-1], self.augment))
                volumes.append(volume)
                parameters.append(row)
            blocks = np.stack(volumes)
        if self.augment:
            with self.clock("augment"):
                blocks = seen(blocks, views, self.mesh)
        samples = np.array([step * self.lanes.batch + lane for lane in self.lanes])
        return Batch(blocks, np.stack(parameters), samples)

    def close(self) -> None:
        """Stop the work in the background."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
