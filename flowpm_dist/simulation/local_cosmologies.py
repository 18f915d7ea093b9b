"""The cosmologies of the universes that one rank simulates, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.grid.box import Box
from meshimpl.mesh_function import replicated

S = TypeVar("S")
T = TypeVar("T")
GrowthOf = Callable[[Cosmology], GrowthFunctions]
PowerOf = Callable[[Cosmology, GrowthFunctions], LinearPower]


@dataclass(frozen=True)
class LocalCosmologies:
    """One universe, or those of a batch that this rank has a block of.

    Attributes:
        growths: the growth of each.
        powers: the linear power of each.
        batched: whether tensors of theirs have a batch dimension.
    """

    growths: tuple[GrowthFunctions, ...]
    powers: tuple[LinearPower, ...]
    batched: bool

    @classmethod
    def of(
        cls,
        cosmologies: Sequence[Cosmology],
        batched: bool,
        growth: GrowthOf = Growth,
        power: PowerOf = LinearPower,
    ) -> LocalCosmologies:
        """What follows from cosmologies, one for each universe of this rank."""
        growths = tuple(growth(cosmology) for cosmology in cosmologies)
        powers = tuple(power(c, g) for c, g in zip(cosmologies, growths, strict=True))
        return cls(growths, powers, batched)

    def repeated(self, count: int) -> LocalCosmologies:
        """A batch of `count` universes of this one's cosmology."""
        return LocalCosmologies(self.growths * count, self.powers * count, True)

    def stack(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """One tensor for each universe as one: with a batch dimension where there is a batch."""
        return tf.stack(list(values)) if self.batched else values[0]

    def of_growths(self, function: Callable[[GrowthFunctions], T]) -> list[T]:
        """Of the growth of each; called once for all that share it."""
        return _of_each(function, self.growths)

    def of_powers(self, function: Callable[[LinearPower], T]) -> list[T]:
        """Of the linear power of each; called once for all that share it."""
        return _of_each(function, self.powers)

    def growth_between(self, edges: np.ndarray) -> np.ndarray:
        """How much linear displacements grow from each edge to the last, the most of all; [n]."""

        def ratio(growth: GrowthFunctions) -> np.ndarray:
            d1 = tf.stop_gradient(growth.d1(edges)).numpy()
            return np.divide(d1[-1], d1, out=np.full_like(d1, np.inf), where=d1 > 0)

        return np.max(self.of_growths(ratio), axis=0)


def _of_each(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    found = {key: function(item) for key, item in {id(item): item for item in items}.items()}
    return [found[id(item)] for item in items]


def of_this_rank(cosmologies: Sequence[Cosmology], box: Box) -> list[Cosmology]:
    """The cosmologies of the universes of which this rank has a block.

    Parameters that are tensors enter through `replicated`: their gradients arrive complete on each
    rank, also from universes of other ranks.

    Args:
        cosmologies: of all universes, the same on every rank; one for all of a batch will do.
        box: the universes.

    Raises:
        ValueError: neither one cosmology nor one for each universe, or amplitudes given by A_s in
            some and by sigma8 in others.
    """
    count = 1 if box.batch is None else box.batch
    if len(cosmologies) not in (1, count):
        raise ValueError(f"{len(cosmologies)} cosmologies for {count} universes")
    if len({c.names for c in cosmologies}) != 1:
        raise ValueError("all cosmologies of a batch must give A_s, or all must give sigma8")
    shared: dict[str, tf.Tensor] = {}
    for name in cosmologies[0].names:
        values = [getattr(c, name) for c in cosmologies]
        if any(isinstance(value, (tf.Tensor, tf.Variable)) for value in values):
            together = tf.stack([tf.cast(value, tf.float64) for value in values])
            shared[name] = replicated(box.mesh, together)
    first, local = box.batch_offset, (box.local_batch or (1,))[0]
    own = range(first, first + local) if len(cosmologies) > 1 else [0]
    found = [
        cosmologies[i].replace(**{name: values[i] for name, values in shared.items()}) for i in own
    ]
    return found if len(cosmologies) > 1 else found * local
