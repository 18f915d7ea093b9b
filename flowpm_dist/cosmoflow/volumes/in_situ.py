"""In situ training: ranks simulate the universes they train on, and draw them from a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.phases import PhaseClock
from flowpm_dist.cosmoflow.volumes.augmentation import Augment, View, seen
from flowpm_dist.cosmoflow.volumes.draws import Draws
from flowpm_dist.cosmoflow.volumes.priors import Priors
from flowpm_dist.grid.field import Field
from flowpm_dist.observables.forward_model import ForwardModel
from flowpm_dist.observables.noise import SurveyNoise
from flowpm_dist.statistics import power_spectrum
from flowpm_dist.statistics.cell_values import DENSITIES, CellValues
from meshimpl.process_mesh import ProcessMesh

HISTOGRAM_EDGES = np.linspace(-4.0, 5.0, 28)
"""Bin edges, see `CellValues.histogram`, of the distribution that baselines are fitted to."""

OF_SURVEY = 1
"""Key of the seeds of the noise of what is seen, beside those of the universes."""


@dataclass(frozen=True)
class Lanes:
    """This replica's places in every batch.

    A batch has as many lanes as volumes. Each universe belongs to one lane, see `Draws`, and is
    used there only. So the samples of a step do not depend on the number of replicas.

    Attributes:
        batch: the number of volumes of a step over all replicas.
        first, count: the first and the number of this replica's lanes.
    """

    batch: int
    first: int
    count: int

    @classmethod
    def of(cls, mesh: ProcessMesh, batch: int) -> Lanes:
        """Returns the lanes of this rank's replica.

        Raises:
            ValueError: if the batch does not divide over the replicas.
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
        volumes: what is seen, such as a density of mean 1 or counts, blocks [lane, x/row, y/col, z]
            or with channels.
        parameters: [lane, parameter] [physical units].
        samples: the number of each sample, int64 [lane].
    """

    volumes: np.ndarray
    parameters: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class Generation:
    """One universe for each of this replica's lanes.

    Attributes:
        volumes: what is seen, such as a density of mean 1 or counts, blocks [lane, x/row, y/col,
            z] or with channels, one for each redshift, in the simulation's dtype.
        parameters: [lane, parameter] [physical units].
        index: the number of each simulation in its stream, int64 [lane].
        seeds: the seeds of the white noise, int64 [lane].
        k: the wavenumbers of the power [bin] [h/Mpc].
        power: P(k) [lane, bin] [(Mpc/h)^3], of one channel after another.
        histogram: the share of the cells in each bin [lane, bin], see `CellValues.histogram`, of
            one channel after another.
        edges: of these bins [bin + 1], of ln(density) or of the values.
    """

    volumes: np.ndarray
    parameters: np.ndarray
    index: np.ndarray
    seeds: np.ndarray
    k: np.ndarray
    power: np.ndarray
    histogram: np.ndarray
    edges: np.ndarray = field(default_factory=HISTOGRAM_EDGES.copy)


def measured(
    channels: Sequence[Field], values: CellValues = DENSITIES
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns k, power, histogram and edges of volumes, see `Generation`.

    Must be called on all ranks of the volumes together.

    Args:
        channels: densities or counts of a batch of universes.
        values: what they are.
    """
    spectra = [power_spectrum(field, window="cic") for field in channels]
    histograms = [values.histogram(field, HISTOGRAM_EDGES) for field in channels]
    power = np.concatenate([spectrum.power for spectrum in spectra], axis=-1)
    shares = np.concatenate([found.counts / found.cells for found in histograms], axis=-1)
    return spectra[0].k, power, shares, histograms[0].edges


def noise_key(channel: int, channels: int) -> tuple[int, ...]:
    """Returns the key of the seeds of a channel's noise: the last has that of a single one."""
    before = channels - 1 - channel
    return (OF_SURVEY, before) if before else (OF_SURVEY,)


class UniverseMaker:
    """A maker of universes, which simulates a generation at a time: one universe for each lane.

    Args:
        model: from white noise to the density that is seen, of a simulation on
            `mesh.without("replica")`: each replica simulates its own universes. The simulation's
            cosmology gives the parameters that have no prior.
        priors: the priors of all parameters that vary, and the seeds.
        lanes: this replica's lanes.
        targets: names of the parameters that generations tell; by default all that vary.
        noise: of what is seen, if there is any, or a mask.
        values: what the numbers are that are seen.
        times: scale factors at which universes are seen, increasing, a channel each; the last is
            that of the last of the simulation's steps, which is the only one by default.
    """

    def __init__(
        self,
        model: ForwardModel,
        priors: Priors,
        lanes: Lanes,
        targets: Sequence[str] | None = None,
        noise: SurveyNoise | None = None,
        values: CellValues = DENSITIES,
        times: Sequence[float] | None = None,
    ) -> None:
        self.model, self.priors, self.lanes, self.noise = model, priors, lanes, noise
        self.values = values
        self.times = [float(model.simulation.edges[-1])] if times is None else list(times)
        self.targets = priors.names if targets is None else tuple(targets)
        self._told = [priors.names.index(name) for name in self.targets]

    def make(self, stream: str, generation: int, numbers: np.ndarray | None = None) -> Generation:
        """Simulates a generation. Must be called on all ranks of the replica together.

        Args:
            stream: of the universes.
            generation: its number.
            numbers: of the universes of all lanes, int64 [batch], in any order; by default in
                that of the stream.

        Raises:
            HaloError: if a particle left the halo.
            ObservationError: see `ForwardModel.seen_at`.
        """
        batch, begin = self.lanes.batch, generation * self.lanes.batch
        index = begin + np.arange(batch) if numbers is None else numbers
        index = index[self.lanes.first : self.lanes.first + self.lanes.count]
        drawn = self.priors.draw(stream, begin, batch)[index - begin]
        seeds = self.priors.noise_seeds(stream, begin, batch)[index - begin]
        values = dict(zip(self.priors.names, drawn.T, strict=True))
        channels = self._clean(seeds, values)
        if self.noise is not None:
            louder = values.get("noise_amplitude")
            for number, field in enumerate(channels):
                key = noise_key(number, len(channels))
                of_noise = self.priors.noise_seeds(stream, begin, batch, *key)[index - begin]
                seen = self.noise.seen(field.block, field.box, of_noise.tolist(), louder)
                channels[number] = Field(tf.constant(seen), field.box)
        blocks = [field.block.numpy() for field in channels]
        volumes = blocks[0] if len(blocks) == 1 else np.stack(blocks, axis=-1)
        found = measured(channels, self.values)
        return Generation(volumes, drawn[:, self._told], index, seeds, *found)

    def _clean(self, seeds: np.ndarray, values: Mapping[str, np.ndarray]) -> list[Field]:
        """Returns what is seen of universes [lane] but for noise and mask, at each of the times.

        Args:
            seeds: of their white noise.
            values: of the parameters that vary, [lane] each.
        """
        base = self.model.simulation.cosmology
        own = {name: column for name, column in values.items() if name in base.names}
        cosmologies = [
            base.replace(**dict(zip(own, map(float, row), strict=True)))
            for row in np.stack(list(own.values()), axis=1)
        ]
        nuisances = {name: tf.constant(x) for name, x in values.items() if name not in own}
        return self.model.seen_at(self.times, seeds.tolist(), cosmologies, nuisances)


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
