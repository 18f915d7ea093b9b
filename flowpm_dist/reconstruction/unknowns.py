"""The unknowns of a reconstruction: a white noise field and a few parameters.

The prior of each is unit normal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.initial.conditions import noise_function


class Use(IntEnum):
    """What random numbers are drawn for. Each use has a stream of its own, whatever the seed."""

    SEARCH = 0
    """Where a search begins."""
    NOISE = 1
    """The noise of a mock's observation."""
    TURN = 2
    """Turns of a microcanonical velocity."""
    START = 3
    """Where chains begin."""
    VELOCITY = 4
    """Fresh velocities and momenta of chains."""
    CHANCE = 5
    """How long a move is, and whether it is accepted."""


def random_numbers(seed: int, use: int = Use.SEARCH, *number: int) -> np.random.Generator:
    """Returns the random numbers of a use; a move or a step has its own by its number.

    A list as the seed would not do: numpy fills it up with zeros, so [1] and [1, 0] are the same.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, use], spawn_key=number))


@dataclass(frozen=True)
class Unknowns:
    """A point, or a direction, in the space of all unknowns; or one for each chain of a batch.

    Attributes:
        field: this rank's block of the white noise [..., x, y, z].
        parameters: the parameters of all chains, float64 [..., n], the same on every rank.
    """

    field: tf.Tensor
    parameters: tf.Tensor

    def __add__(self, other: Unknowns) -> Unknowns:
        return Unknowns(self.field + other.field, self.parameters + other.parameters)

    def __sub__(self, other: Unknowns) -> Unknowns:
        return Unknowns(self.field - other.field, self.parameters - other.parameters)

    def __neg__(self) -> Unknowns:
        return Unknowns(-self.field, -self.parameters)

    def plus(self, factor: float, other: Unknowns) -> Unknowns:
        """Returns self + factor x other."""
        by = tf.constant(factor, self.field.dtype)
        return Unknowns(self.field + by * other.field, self.parameters + factor * other.parameters)

    def times(self, factor: float) -> Unknowns:
        """Returns factor x self."""
        return Unknowns(
            self.field * tf.constant(factor, self.field.dtype), self.parameters * factor
        )


@dataclass(frozen=True)
class Memory:
    """The state that a minimiser or a sampler needs to resume exactly.

    Attributes:
        points: points by name, in the coordinates of the objective.
        numbers: numbers by name.
    """

    points: Mapping[str, Unknowns]
    numbers: Mapping[str, float]


class Space:
    """The space of the unknowns of a box, with inner products and random directions.

    Args:
        box: the box of the field. Its batch dimension holds the chains, which are split over the
            mesh's replicas.
        names: the names of the parameters.
    """

    def __init__(self, box: Box, names: tuple[str, ...] = ()) -> None:
        self.box, self.names = box, names
        self.chains = () if box.batch is None else (box.batch,)

    def zeros(self) -> Unknowns:
        """Returns the mean of the prior: all unknowns 0."""
        field = tf.zeros([*self.box.local_batch, *self.box.block], self.box.dtype)
        return Unknowns(field, tf.zeros([*self.chains, len(self.names)], tf.float64))

    def normal(self, seed: int, use: int = Use.SEARCH, *number: int) -> Unknowns:
        """Returns a unit normal draw, the same on any number of ranks.

        Args:
            seed, use, number: see `random_numbers`.
        """
        chains = self.chains[0] if self.chains else 1
        rng = random_numbers(seed, use, *number)
        numbers = rng.integers(2**62, size=chains)
        parameters = rng.normal(size=(*self.chains, len(self.names)))
        seeds = numbers if self.chains else numbers[0]
        field = noise_function(self.box)(np.asarray(seeds, np.int64))
        return Unknowns(field, tf.constant(parameters))

    def dot(self, x: Unknowns, y: Unknowns) -> np.ndarray:
        """Returns the inner product for each chain, float64 [...], the same on every rank."""
        product = tf.cast(x.field, tf.float64) * tf.cast(y.field, tf.float64)
        local = self.total(tf.reduce_sum(product, axis=[-3, -2, -1]))
        return local + np.sum(x.parameters.numpy() * y.parameters.numpy(), axis=-1)

    def norm(self, x: Unknowns) -> np.ndarray:
        """Returns the Euclidean norm for each chain, float64 [...]."""
        return np.sqrt(self.dot(x, x))

    def times(self, x: Unknowns, factor: np.ndarray) -> Unknowns:
        """Returns x multiplied by a number for each chain [...]."""
        return Unknowns(x.field * self.local_values(factor), x.parameters * factor[..., None])

    def total(self, parts: tf.Tensor) -> np.ndarray:
        """Returns the sum over the ranks that share a chain, for each chain, on every rank.

        Args:
            parts: this rank's part, float64: a number, or one for each of its chains.

        Returns:
            The sums of all chains, float64 [...].
        """
        if self.chains:
            before = self.box.batch_offset
            after = self.chains[0] - before - parts.shape[0]
            parts = tf.pad(parts, [[before, after]])
        return self.box.mesh.world.allreduce(parts).numpy()

    def local_values(self, values: np.ndarray) -> tf.Tensor:
        """Returns the values of this rank's chains, [..., 1, 1, 1], to multiply a field by.

        Args:
            values: a number for each of all chains [...].
        """
        if self.chains:
            first = self.box.batch_offset
            values = values[first : first + self.box.local_batch[0]]
        return tf.constant(np.asarray(values)[..., None, None, None], self.box.dtype)

    def chosen(self, which: np.ndarray, x: Unknowns, y: Unknowns) -> Unknowns:
        """Returns x where a chain is chosen and y elsewhere.

        Values that are not finite in the one that is not taken have no effect.

        Args:
            which: whether x is taken, bool [...] for all chains.
            x, y: points with all chains.
        """
        mine = self.local_values(which.astype(float)) > 0
        of_all = tf.constant(which[..., None])
        return Unknowns(
            tf.where(mine, x.field, y.field), tf.where(of_all, x.parameters, y.parameters)
        )
