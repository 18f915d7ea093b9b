"""What is sought: a white noise field, and a few parameters, all of unit normal prior."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.initial.white_noise import noise_function
from meshimpl.mesh_function import MeshFunction


@dataclass(frozen=True)
class Unknowns:
    """A point, or a direction, in the space of all unknowns; or one for each chain of a batch.

    Attributes:
        field: this rank's block [..., x, y, z].
        parameters: float64 [..., n], the same on every rank, of all chains.
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
        """self + factor x other."""
        by = tf.constant(factor, self.field.dtype)
        return Unknowns(self.field + by * other.field, self.parameters + factor * other.parameters)

    def times(self, factor: float) -> Unknowns:
        """factor x self."""
        return Unknowns(
            self.field * tf.constant(factor, self.field.dtype), self.parameters * factor
        )


class Space:
    """All unknowns over a box, and what needs all ranks: inner products, random directions.

    Args:
        box: of the field; its batch are chains, spread over the mesh's replicas.
        names: of the parameters.
    """

    def __init__(self, box: Box, names: tuple[str, ...] = ()) -> None:
        self.box, self.names = box, names
        self.chains = () if box.batch is None else (box.batch,)

    def zeros(self) -> Unknowns:
        """The prior's mean."""
        field = tf.zeros([*self.box.local_batch, *self.box.block], self.box.dtype)
        return Unknowns(field, tf.zeros([*self.chains, len(self.names)], tf.float64))

    def normal(self, seed: int, *key: int) -> Unknowns:
        """A unit normal draw, fixed by the seed and the key on any number of ranks."""
        chains = self.chains[0] if self.chains else 1
        rng = np.random.default_rng([seed, *key])
        numbers = rng.integers(2**62, size=chains)
        parameters = rng.normal(size=(*self.chains, len(self.names)))
        seeds = numbers if self.chains else numbers[0]
        return Unknowns(self._noise(np.asarray(seeds, np.int64)), tf.constant(parameters))

    @functools.cached_property
    def _noise(self) -> MeshFunction:
        return noise_function(self.box)

    def dot(self, x: Unknowns, y: Unknowns) -> np.ndarray:
        """Inner product, float64, of each chain [...], the same on every rank."""
        product = tf.cast(x.field, tf.float64) * tf.cast(y.field, tf.float64)
        local = self.total(tf.reduce_sum(product, axis=[-3, -2, -1]))
        return local + np.sum(x.parameters.numpy() * y.parameters.numpy(), axis=-1)

    def norm(self, x: Unknowns) -> np.ndarray:
        """Euclidean length of each chain [...]."""
        return np.sqrt(self.dot(x, x))

    def total(self, parts: tf.Tensor) -> np.ndarray:
        """Sum over the ranks that share a chain, of each chain, on every rank.

        Args:
            parts: this rank's, float64: a number, or one for each of its chains.

        Returns:
            [...] of all chains.
        """
        if self.chains:
            before = self.box.batch_offset
            after = self.chains[0] - before - parts.shape[0]
            parts = tf.pad(parts, [[before, after]])
        return self.box.mesh.world.allreduce(parts).numpy()

    def of_these_chains(self, values: np.ndarray) -> tf.Tensor:
        """Of a number for each chain those of this rank's, to multiply a field by: [..., 1, 1, 1].

        Args:
            values: [...] of all chains.
        """
        if self.chains:
            first = self.box.batch_offset
            values = values[first : first + self.box.local_batch[0]]
        return tf.constant(np.asarray(values)[..., None, None, None], self.box.dtype)

    def chosen(self, which: np.ndarray, x: Unknowns, y: Unknowns) -> Unknowns:
        """x where a chain is chosen, else y; not finite values of the other do no harm.

        Args:
            which: bool [...] of all chains.
            x, y: of all chains.
        """
        mine = self.of_these_chains(which.astype(float)) > 0
        of_all = tf.constant(which[..., None])
        return Unknowns(
            tf.where(mine, x.field, y.field), tf.where(of_all, x.parameters, y.parameters)
        )
