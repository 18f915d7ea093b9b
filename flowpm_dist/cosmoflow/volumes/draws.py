"""The universes of a training: drawn from the priors by a seed, and trained on in an order.

Each universe follows from the seed of the data, the name of a stream ("train", "validation", "test"
or a fresh test set) and the number of the simulation in the stream. So any rank can make any
universe, in any order, and no universe of the test set is in the training set.

A generation is one universe for each place, or lane, of a batch. A universe stays in its lane, and
so on the replica that simulated it; a batch does not depend on the number of replicas. A
generation's universes are assigned to the lanes at random.

A balanced batch is a whole generation. Neighbours in a Sobol sequence lie far from each other, so a
balanced batch covers the priors evenly. The mean of its features, which training subtracts, then
hardly varies from batch to batch. In a batch that is not balanced, each lane goes through the
generations in a different order, so the batch is a random sample of the universes.

Each time a volume is used, it is rotated and shifted at random, see `View`.

Nothing here imports TensorFlow before volumes are gathered.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flowpm_dist.cosmology.options import UniformPriors

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
    from meshimpl.process_mesh import ProcessMesh

Sampling = Literal["sobol", "uniform"]
"""Ways to draw parameters: evenly spread, or independent of each other."""

EVENLY = ("train", "validation")
"""Streams whose parameters may be spread evenly. Networks are judged on the other streams, because
their errors and P-values assume independent draws.
"""

OF_RUNS = 2**32 - 1
"""Key of the random numbers that choose runs, which no universe's number is."""


@dataclass(frozen=True)
class Priors(UniformPriors):
    """Uniform priors of cosmological parameters, and the draws of universes from them.

    Attributes:
        sampling: "sobol", a scrambled Sobol sequence that fills the ranges evenly (Owen 1998) for
            the streams of `EVENLY`, or "uniform", independent draws for all streams.
        seed: the seed of the data.
    """

    sampling: Sampling = "sobol"
    seed: int = 0

    def generator(self, stream: str, *key: int) -> np.random.Generator:
        """Returns the random numbers of a stream for what is no parameter and no noise."""
        return np.random.default_rng([self.seed, _number(stream), OF_RUNS, *key])

    def draw(self, stream: str, first: int, count: int) -> np.ndarray:
        """Returns parameters [count, parameter] of the simulations of a stream, from `first` on."""
        from scipy.stats import qmc  # takes long to import

        key = [self.seed, _number(stream)]
        if self.sampling == "sobol" and stream in EVENLY:
            scramble = np.random.default_rng(key)
            sequence = qmc.Sobol(len(self.ranges), scramble=True, rng=scramble)
            if first:
                sequence.fast_forward(first)
            # One at a time: scipy warns about numbers that are not powers of two.
            points = np.concatenate([sequence.random(1) for _ in range(count)])
        else:
            draws = [np.random.default_rng([*key, i]) for i in range(first, first + count)]
            points = np.array([draw.random(len(self.ranges)) for draw in draws])
        return self.low + (self.high - self.low) * points

    def noise_seeds(self, stream: str, first: int, count: int, *key: int) -> np.ndarray:
        """Returns the seeds of the white noise of simulations of a stream, int64 [count].

        Args:
            stream: the stream of the simulations.
            first: the number of the first simulation.
            count: the number of simulations.
            key: selects other noise than the noise that universes grow from.
        """
        numbers = range(first, first + count)
        return np.array([hashed([self.seed, _number(stream), i, *key]) for i in numbers])


def priors_of(plan: TrainingPlan) -> Priors:
    """Returns the priors of simulated universes, with the way to draw from them."""
    return Priors(plan.priors.drawn, plan.priors.sampling, plan.simulated.seed)


def _number(stream: str) -> int:
    return zlib.crc32(stream.encode())


def hashed(key: list[int]) -> int:
    """Returns a seed, from 0 to below 2^63, that follows from several numbers."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


MEMBERS, ARRIVING, ALL, PREVIEW = range(4)
"""Purposes of random numbers; each has a sequence of its own."""


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
class Draws:
    """The order in which universes are made and trained on.

    A buffer that holds all universes is filled during the first pass, one generation in each step;
    this pass uses chunks of `fill` universes as they arrive. Each later pass is a permutation of
    all universes. A smaller buffer gets a generation every `reuse` steps, and a chunk is used
    `reuse` times before it leaves. After the last new universe, passes continue over the remaining
    ones. In both cases each universe is drawn `reuse` times in `generations * reuse` steps.

    Attributes:
        simulations: the number of all universes.
        reuse: how often each universe is trained on.
        buffer: the number of universes that are kept to draw from.
        fill: the number of universes made before the first step; at most `most_filled`.
        batch: the number of universes of a step, which divides all these numbers but `reuse`.
        seed: the seed of the order.
        balanced: whether each batch is a whole generation, or a random sample.
    """

    simulations: int
    reuse: int
    buffer: int
    fill: int
    batch: int
    seed: int
    balanced: bool = True

    @property
    def generations(self) -> int:
        """The number of all generations."""
        return self.simulations // self.batch

    @property
    def interval(self) -> int:
        """The number of steps from one new generation to the next."""
        return 1 if self.buffer == self.simulations else self.reuse

    def made(self, step: int) -> int:
        """Returns the number of generations that are made before the batch of a step is drawn."""
        return min(self.generations, self.fill // self.batch + step // self.interval)

    def members(self, generation: int) -> np.ndarray:
        """Returns the numbers of the universes of a generation, int64 [batch], by lane."""
        order = np.random.default_rng([self.seed, MEMBERS, generation]).permutation(self.batch)
        return generation * self.batch + order

    def drawn(self, step: int) -> np.ndarray:
        """Returns the generation from which each lane draws in a step, int64 [batch]."""
        arriving = self.generations * self.interval
        if step >= arriving:
            size = self.buffer // self.batch
            number, place = divmod(step - arriving, size)
            return self.generations - size + self._orders(size, ALL, number)[:, place]
        most = self.fill // self.batch
        chunk, place = divmod(step, most * self.interval)
        size = min(most, self.generations - chunk * most)
        number, place = divmod(place, size)
        return chunk * most + self._orders(size, ARRIVING, chunk, number)[:, place]

    def preview(self, number: int, made: int) -> np.ndarray:
        """Returns a generation in the buffer for each lane, int64 [batch].

        Args:
            number: the number of the preview; previews repeat no universe before all were used.
            made: the number of generations made so far.
        """
        size = min(made, self.buffer // self.batch)
        return made - size + self._orders(size, PREVIEW)[:, number % size]

    def _orders(self, size: int, *key: int) -> np.ndarray:
        """Returns a permutation of `size` numbers for each lane, or one for all, [batch, size]."""
        orders = _permutations(1 if self.balanced else self.batch, size, (self.seed, *key))
        return np.broadcast_to(orders, (self.batch, size))


@lru_cache(maxsize=8)
def _permutations(lanes: int, size: int, key: tuple[int, ...]) -> np.ndarray:
    orders = np.tile(np.arange(size), (lanes, 1))
    return np.random.default_rng(key).permuted(orders, axis=1)


def most_filled(simulations: int, buffer: int, batch: int) -> int:
    """Returns how many universes may be made before the first step.

    In a buffer that does not hold all universes, one chunk arrives while another is in use.

    Args:
        simulations: the number of all universes.
        buffer: the number of universes that are kept.
        batch: the number of universes of a step.
    """
    return buffer if buffer >= simulations else (buffer // batch + 1) // 2 * batch


def summary_of_draws(
    draws: Draws, parameters: np.ndarray, steps: int, names: Sequence[str]
) -> dict[str, Any]:
    """Returns how often universes were drawn in the first steps, and how much batches vary.

    Args:
        draws: the order.
        parameters: the parameters of all universes, [universe, parameter].
        steps: the number of steps that were made.
        names: the names of the parameters.

    Returns:
        "steps" and "volumes". "draws": the least, median and greatest number of draws of a volume.
        "spread_of_batch_means": for each parameter the variance of the batches' means, divided by
        the variance that independent draws would give. The latter is the variance of the drawn
        values divided by the batch size. Independent draws have 1 +- sqrt(2 / (steps - 1)). It is
        None for fewer than two steps.
    """
    made = draws.made(max(0, steps - 1))
    members = np.stack([draws.members(generation) for generation in range(made)])
    lanes = np.arange(draws.batch)
    drawn = np.array([members[draws.drawn(step), lanes] for step in range(steps)], dtype=np.int64)
    spread = None
    if steps > 1:
        values = parameters[drawn]
        independent = values.reshape(-1, len(names)).var(axis=0) / draws.batch
        ratios = values.mean(axis=1).var(axis=0, ddof=1) / independent
        spread = dict(zip(names, ratios.tolist(), strict=True))
    counts = np.bincount(drawn.ravel(), minlength=draws.simulations)
    return {**_summary(counts, steps), "spread_of_batch_means": spread}


def summary_of_passes(volumes: int, batch: int, steps: int) -> dict[str, Any]:
    """Returns how often volumes in files were drawn, each pass a permutation of all.

    Args:
        volumes: the number of volumes.
        batch: the number of volumes in a step.
        steps: the number of steps that were made.

    Returns:
        The same as `summary_of_draws`, without the spread.
    """
    passes, rest = divmod(steps * batch, volumes)
    return _summary(passes + (np.arange(volumes) < rest), steps)


def _summary(counts: np.ndarray, steps: int) -> dict[str, Any]:
    least, median, most = int(counts.min()), float(np.median(counts)), int(counts.max())
    return {
        "steps": steps,
        "volumes": len(counts),
        "draws": {"min": least, "median": median, "max": most},
    }


Augment = bool | Literal["symmetries"]

_PERMUTATIONS = list(itertools.permutations(range(3)))
_KEEPING = [[axes for axes in _PERMUTATIONS if axes[sight] == sight] for sight in range(3)]
_FLIPS = list(itertools.product((1, -1), repeat=3))


@dataclass(frozen=True)
class View:
    """A periodic shift and one of the 48 symmetries of the cube, applied to a volume.

    A periodic box has no origin and no preferred axes, so the parameters stay the same. In redshift
    space one axis is the line of sight, which is not exchanged with another axis.

    Attributes:
        axes: the side of the volume that becomes x, y and z.
        flips: 1 or -1 for each of the new sides.
        shift: the shift along each side of the original volume [cells].
    """

    axes: tuple[int, int, int] = (0, 1, 2)
    flips: tuple[int, int, int] = (1, 1, 1)
    shift: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        width: int,
        augment: Augment = True,
        axis: str | None = None,
    ) -> View:
        """Returns one of all possible views, each equally likely.

        Args:
            rng: the source of random numbers.
            width: cells along each side of the volume.
            augment: True for shifts and symmetries; "symmetries" for volumes that are not periodic;
                False for the unchanged volume.
            axis: the line of sight, "x", "y" or "z", which may be reversed but not exchanged.
        """
        if not augment:
            return cls()
        x, y, z = (0, 0, 0) if augment == "symmetries" else rng.integers(width, size=3).tolist()
        allowed = _PERMUTATIONS if axis is None else _KEEPING["xyz".index(axis)]
        axes = allowed[rng.integers(len(allowed))]
        return cls(axes, _FLIPS[rng.integers(len(_FLIPS))], (x, y, z))  # type: ignore[arg-type]

    def of(self, volume: np.ndarray) -> np.ndarray:
        """Returns the volume [x, y, z, ...] under this view."""
        shifted = np.roll(volume, self.shift, axis=(0, 1, 2))
        turned = shifted.transpose(*self.axes, *range(3, volume.ndim))
        return turned[tuple(slice(None, None, flip) for flip in self.flips)]


def views_of(volumes: np.ndarray, views: list[View], mesh: ProcessMesh) -> np.ndarray:
    """Returns this rank's blocks of several volumes, each under its view.

    Volumes that are split over ranks are gathered first. This is cheap: they have one channel, and
    the network's first layer makes many more.

    Args:
        volumes: blocks [n, x/row, y/col, z, ...].
        views: n of them.
        mesh: the ranks that hold the volumes, of axes `row` and `col`.

    Returns:
        blocks of the same shape.
    """
    wholes = whole_volumes(volumes, mesh)
    turned = np.stack([view.of(whole) for view, whole in zip(views, wholes, strict=True)])
    return block_of(turned, mesh)


def whole_volumes(volumes: np.ndarray, mesh: ProcessMesh) -> np.ndarray:
    """Returns whole volumes [n, x, y, ...] on every rank, from blocks [n, x/row, y/col, ...]."""
    import tensorflow as tf

    gathered: Any = volumes
    for axis, name in ((1, "row"), (2, "col")):
        if mesh.axis_size(name) > 1:
            gathered = mesh.communicator(name).allgather(tf.convert_to_tensor(gathered), axis)
    return np.asarray(gathered)


def block_of(volumes: np.ndarray, mesh: ProcessMesh) -> np.ndarray:
    """Returns this rank's blocks of whole volumes [n, x, y, ...]."""
    for axis, name in ((1, "row"), (2, "col")):
        parts = mesh.axis_size(name)
        volumes = np.split(volumes, parts, axis)[mesh.coordinate(name)] if parts > 1 else volumes
    return volumes
