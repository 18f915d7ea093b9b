"""The cosmologies of the universes that one rank simulates, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.cosmology.parameters import AMPLITUDES, Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.grid.box import Box
from meshimpl.graph_guards import is_watched
from meshimpl.mesh_function import replicated

S = TypeVar("S")
T = TypeVar("T")
GrowthOf = Callable[[Cosmology], Growth]
PowerOf = Callable[[Cosmology, Growth], LinearPower]

WITHOUT_GROWTH = ("Omega_b", "n_s", *AMPLITUDES)
"""Parameters that the growth of structure on large scales does not depend on."""


@dataclass(frozen=True)
class LocalCosmologies:
    """One universe, or the universes of a batch of which this rank has a block.

    Attributes:
        cosmologies: the parameters of each.
        growths: the growth of each.
        powers: the linear power of each.
        batched: whether tensors of theirs have a batch dimension.
        makers: how growth and power are made.
    """

    cosmologies: tuple[Cosmology, ...]
    growths: tuple[Growth, ...]
    powers: tuple[LinearPower, ...]
    batched: bool
    makers: tuple[GrowthOf, PowerOf] = (Growth, LinearPower)

    @classmethod
    def of(
        cls,
        cosmologies: Sequence[Cosmology],
        batched: bool,
        growth: GrowthOf = Growth,
        power: PowerOf = LinearPower,
    ) -> LocalCosmologies:
        """Returns what follows from cosmologies, one for each universe of this rank."""
        made = {}
        for cosmology in cosmologies:
            if id(cosmology) not in made:
                grown = growth(cosmology)
                made[id(cosmology)] = grown, power(cosmology, grown)
        growths, powers = zip(*(made[id(cosmology)] for cosmology in cosmologies), strict=True)
        return cls(tuple(cosmologies), growths, powers, batched, (growth, power))

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = {id(c): Cosmology(**c.numbers()) for c in self.cosmologies}
        cosmologies = [numbers[id(c)] for c in self.cosmologies]
        return LocalCosmologies.of, (cosmologies, self.batched, *self.makers)

    def tensors(self) -> tuple[tf.Tensor, ...]:
        """Returns the parameters that are tensors, by which the universes can be differentiated."""
        return tuple(getattr(cosmology, name) for cosmology, name in self._tensor_names())

    def with_tensors(self, values: Sequence[tf.Tensor]) -> LocalCosmologies:
        """Returns the same with other values of `tensors`, and all that follows from them anew."""
        if not values:
            return self
        changes: dict[int, dict[str, tf.Tensor]] = {}
        for (cosmology, name), value in zip(self._tensor_names(), values, strict=True):
            changes.setdefault(id(cosmology), {})[name] = value
        by_id = {id(c): c.replace(**changes.get(id(c), {})) for c in self.cosmologies}
        changed = [by_id[id(c)] for c in self.cosmologies]
        return LocalCosmologies.of(changed, self.batched, *self.makers)

    def _tensor_names(self) -> list[tuple[Cosmology, str]]:
        each = {id(c): c for c in self.cosmologies}.values()
        kinds = (tf.Tensor, tf.Variable)
        return [(c, name) for c in each for name in c.names if isinstance(getattr(c, name), kinds)]

    def repeated(self, count: int) -> LocalCosmologies:
        """Returns a batch of `count` universes of this one's cosmology."""
        return replace(
            self,
            cosmologies=self.cosmologies * count,
            growths=self.growths * count,
            powers=self.powers * count,
            batched=True,
        )

    def stack(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the tensors of all universes as one, with a dimension for a batch if any."""
        return tf.stack(list(values)) if self.batched else values[0]

    def of_growths(self, function: Callable[[Growth], T]) -> list[T]:
        """Returns what a function makes of each growth; called once for all that share one."""
        return _of_each(function, self.growths)

    def of_powers(self, function: Callable[[LinearPower], T]) -> list[T]:
        """Returns what a function makes of each power; called once for all that share one."""
        return _of_each(function, self.powers)

    def growth_between(self, edges: np.ndarray) -> np.ndarray:
        """Returns how much linear displacements grow at most from each edge to the last, [n]."""

        def ratio(growth: Growth) -> np.ndarray:
            d1 = tf.stop_gradient(growth.d1(edges)).numpy()
            return np.divide(d1[-1], d1, out=np.full_like(d1, np.inf), where=d1 > 0)

        return np.max(self.of_growths(ratio), axis=0)


def _of_each(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    found = {key: function(item) for key, item in {id(item): item for item in items}.items()}
    return [found[id(item)] for item in items]


class CosmologyFactory:
    """Growth and linear power of cosmologies; what they share with the first one is made once.

    Args:
        cosmology: the first one, a simulation's own.
        growth, power: how a cosmology's are made.
    """

    def __init__(self, cosmology: Cosmology, growth: GrowthOf, power: PowerOf) -> None:
        self.cosmology, self.growth, self.power = cosmology, growth, power
        self.own = LocalCosmologies.of([cosmology], False, growth, power)

    def local(self, given: Cosmology | Sequence[Cosmology] | None, box: Box) -> LocalCosmologies:
        """Returns the cosmologies of this rank's universes.

        Args:
            given: instead of the first one; one, or one for each universe of the box.
            box: of one universe, or a batch.

        Raises:
            ValueError: as `of_this_rank`; or the first one is to be differentiated by, which was
                evaluated long ago.
        """
        if given is None:
            parameters = [getattr(self.cosmology, name) for name in self.cosmology.names]
            if is_watched([p for p in parameters if isinstance(p, (tf.Tensor, tf.Variable))]):
                raise ValueError(
                    "to differentiate by a cosmology, give it to run(cosmology=...): the "
                    "simulation's own was evaluated when it was made"
                )
            return self.own if box.batch is None else self.own.repeated(box.local_batch[0])
        several = [given] if isinstance(given, Cosmology) else list(given)
        local = of_this_rank(several, box)
        found = LocalCosmologies.of(
            local, box.batch is not None, self._growth_sharing, self._power_sharing
        )
        return replace(found, makers=self.own.makers)

    def _growth_sharing(self, cosmology: Cosmology) -> Growth:
        if self._differs_only_in(WITHOUT_GROWTH, cosmology):
            return self.own.growths[0]
        return self.growth(cosmology)

    def _power_sharing(self, cosmology: Cosmology, growth: Growth) -> LinearPower:
        own = self.cosmology
        same = (cosmology.names, cosmology.transfer) == (own.names, own.transfer)
        if same and self._differs_only_in(AMPLITUDES, cosmology):
            return self.own.powers[0].rescaled(cosmology)
        return self.power(cosmology, growth)

    def _differs_only_in(self, names: tuple[str, ...], cosmology: Cosmology) -> bool:
        """Returns whether a cosmology differs from the first one in no others than these.

        A cosmology that has passed `of_this_rank` holds the same numbers, but no tensors that are
        the first one's: what is differentiated by is never taken for the same.
        """
        own = self.cosmology
        others = [n for n in {*own.names, *cosmology.names} if n not in names]
        return all(getattr(own, n, None) is getattr(cosmology, n, None) for n in others)


def of_this_rank(cosmologies: Sequence[Cosmology], box: Box) -> list[Cosmology]:
    """Returns the cosmologies of the universes of which this rank has a block.

    Parameters that are tensors enter through `replicated`: their gradients arrive complete on each
    rank, also from universes of other ranks.

    Args:
        cosmologies: the cosmology of each universe, or one for all; the same on every rank.
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
