"""The cosmologies of the universes that one rank simulates, and their theories."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.parameters import Cosmology, known_value
from flowpm_dist.cosmology.power import known_number
from flowpm_dist.cosmology.power_table import box_problem
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.box import Box
from meshimpl.mesh_function import replicated
from meshimpl.tapes import is_watched

T = TypeVar("T")
REMEMBERED = 16
"""Most results that a theory keeps for later runs."""

TheoryOf = Callable[[Cosmology], Theory]
"""What makes the theory of a cosmology: `Theory` itself, or a subclass."""


@dataclass(frozen=True)
class LocalCosmologies:
    """One universe, or the universes of a batch of which this rank has a block.

    Attributes:
        theories: the theory of each.
        batched: whether tensors of theirs have a batch dimension.
        theory_of: how a theory is made.
    """

    theories: tuple[Theory, ...]
    batched: bool
    theory_of: TheoryOf = Theory

    @classmethod
    def of(
        cls,
        cosmologies: Sequence[Cosmology],
        batched: bool,
        theory_of: TheoryOf = Theory,
        like: Theory | None = None,
    ) -> LocalCosmologies:
        """Returns the theories of cosmologies, one for each universe of this rank.

        Args:
            cosmologies: the parameters.
            batched: see `LocalCosmologies`.
            theory_of: how a theory is made.
            like: a theory with which the others share what does not differ.
        """
        theories: dict[int, Theory] = {}
        for cosmology in cosmologies:
            if id(cosmology) not in theories:
                theory = theories[id(cosmology)] = theory_of(cosmology)
                if like is not None:
                    theory.share(like)
                theory.prepare()
                if theory.growth.by_scale and theory.background.neutrinos is None:
                    raise ValueError(
                        "growth that depends on the wavenumber can be simulated only where massive "
                        "neutrinos are its cause"
                    )
        return cls(tuple(theories[id(c)] for c in cosmologies), batched, theory_of)

    @property
    def by_scale(self) -> bool:
        """Whether neutrinos of a universe have a mass, so that growth depends on the wavenumber."""
        return any(theory.background.neutrinos is not None for theory in self.theories)

    @property
    def species(self) -> int:
        """How many kinds of massive neutrinos a universe has, see `Neutrinos.species`."""
        neutrinos = (theory.background.neutrinos for theory in self.theories)
        return max((len(each.species) for each in neutrinos if each is not None), default=0)

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = {id(c): Cosmology(**c.numbers()) for c in self.cosmologies}
        cosmologies = [numbers[id(c)] for c in self.cosmologies]
        return LocalCosmologies.of, (cosmologies, self.batched, self.theory_of)

    @property
    def cosmologies(self) -> tuple[Cosmology, ...]:
        """The parameters of each universe."""
        return tuple(theory.cosmology for theory in self.theories)

    def tensors(self) -> tuple[tf.Tensor, ...]:
        """Returns the parameters that are tensors, by which the universes can be differentiated."""
        return tuple(getattr(cosmology, name) for cosmology, name in self._tensor_names())

    def with_tensors(self, values: Sequence[tf.Tensor]) -> LocalCosmologies:
        """Returns the same cosmologies with other values of `tensors`, with new theories."""
        if not values:
            return self
        changes: dict[int, dict[str, tf.Tensor]] = {}
        for (cosmology, name), value in zip(self._tensor_names(), values, strict=True):
            changes.setdefault(id(cosmology), {})[name] = value
        by_id = {id(c): c.replace(**changes.get(id(c), {})) for c in self.cosmologies}
        changed = [by_id[id(c)] for c in self.cosmologies]
        return LocalCosmologies.of(changed, self.batched, self.theory_of)

    def _tensor_names(self) -> list[tuple[Cosmology, str]]:
        each = {id(c): c for c in self.cosmologies}.values()
        kinds = (tf.Tensor, tf.Variable)
        return [(c, name) for c in each for name in c.names if isinstance(getattr(c, name), kinds)]

    def repeated(self, count: int) -> LocalCosmologies:
        """Returns a batch of `count` universes of this one's cosmology."""
        return replace(self, theories=self.theories * count, batched=True)

    def stack(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the tensors of all universes as one, with a dimension for a batch if any."""
        return tf.stack(list(values)) if self.batched else values[0]

    def remembered(self, name: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returns, made once for each name and cosmology.

        A cosmology without tensors keeps it, if all universes have the same, such as a simulation's
        own. What it returns must be small and depend on name and cosmologies alone.

        Args:
            name: what it is, and what else it depends on.
            make: makes it.
        """
        first = self.theories[0]
        plain = type(first) is Theory and not self.tensors() and tf.executing_eagerly()
        if not plain or any(theory is not first for theory in self.theories):
            return make()
        key = name, self.batched, len(self.theories)
        earlier: dict[Hashable, T] = first.__dict__.setdefault("_remembered", {})
        if key not in earlier:
            if len(earlier) == REMEMBERED:
                del earlier[next(iter(earlier))]
            earlier[key] = make()
        return earlier[key]

    def of_growths(self, function: Callable[[Theory], T]) -> list[T]:
        """Returns a function's result for each theory, where it uses background and growth.

        It is called once for all theories that share their growth.
        """
        return _of_each(function, self.theories, [theory.growth for theory in self.theories])

    def of_powers(self, function: Callable[[Theory], T]) -> list[T]:
        """Returns a function's result for each theory; a shared power means a shared call."""
        return _of_each(function, self.theories, [theory.power for theory in self.theories])

    def growth_between(self, edges: np.ndarray) -> np.ndarray:
        """Returns how much linear displacements grow at most from each edge to the last, [n]."""

        def ratio(theory: Theory) -> np.ndarray:
            d1 = tf.stop_gradient(theory.growth.d1(edges)).numpy()
            return np.divide(d1[-1], d1, out=np.full_like(d1, np.inf), where=d1 > 0)

        name = "growth", tuple(edges.tolist())
        return self.remembered(name, lambda: np.max(self.of_growths(ratio), axis=0))


def _of_each(
    function: Callable[[Theory], T], theories: Sequence[Theory], parts: Sequence[object]
) -> list[T]:
    """Returns a function's result for each theory; theories that share a part share the call."""
    first = {id(part): theory for part, theory in reversed([*zip(parts, theories, strict=True)])}
    made = {key: function(theory) for key, theory in reversed(first.items())}
    return [made[id(part)] for part in parts]


class CosmologyFactory:
    """Makes the theories of cosmologies; parts shared with the first one are made once.

    Args:
        cosmology: the first one, a simulation's own.
        theory_of: how the theory of a cosmology is made.
    """

    def __init__(self, cosmology: Cosmology, theory_of: TheoryOf) -> None:
        self.cosmology = cosmology
        self.default = LocalCosmologies.of([cosmology], False, theory_of)

    def local(
        self, cosmologies: Cosmology | Sequence[Cosmology] | None, box: Box
    ) -> LocalCosmologies:
        """Returns the cosmologies of this rank's universes.

        Args:
            cosmologies: instead of the first one; one, or one for each universe of the box.
            box: of one universe, or a batch.

        Raises:
            ValueError: as `of_this_rank`; or the first one is to be differentiated by, which was
                evaluated long ago.
        """
        if cosmologies is None:
            parameters = [getattr(self.cosmology, name) for name in self.cosmology.names]
            if is_watched([p for p in parameters if isinstance(p, (tf.Tensor, tf.Variable))]):
                raise ValueError(
                    "to differentiate by a cosmology, give it to run(cosmology=...): the "
                    "simulation's own was evaluated when it was made"
                )
            if self._default_is_outdated():
                raise ValueError(
                    "to differentiate by a theory of your own, make the simulation under the tape: "
                    "the simulation's own theory was evaluated when it was made"
                )
            return self.default if box.batch is None else self.default.repeated(box.local_batch[0])
        several = [cosmologies] if isinstance(cosmologies, Cosmology) else list(cosmologies)
        batched, first = box.batch is not None, self.default.theories[0]
        return LocalCosmologies.of(
            of_this_rank(several, box), batched, self.default.theory_of, first
        )

    def _default_is_outdated(self) -> bool:
        """Returns whether a tape watches the inputs of the first theory, but not its growth."""
        theory = self.default.theories[0]
        if type(theory) is Theory:
            return False
        parts = theory.background.a3_e2, theory.growth.d1
        expansion, growth = (is_watched([as_float64(part(1.0))]) for part in parts)
        return expansion and not growth


def check_power(cosmology: Cosmology, size: Sequence[float], grid: Sequence[int]) -> None:
    """Checks that a table of power has the wavenumbers of a box.

    Args:
        cosmology: its `power` is the table, if there is one.
        size: the side lengths [Mpc/h].
        grid: particles along each side.

    Raises:
        ValueError: it ends within them.
    """
    if (table := cosmology.power) is not None:
        h = known_number("h", cosmology.h, "a table of power") if table.unit == "Mpc" else 1.0
        if problem := box_problem(table, size, grid, h):
            raise ValueError(problem)


def of_this_rank(cosmologies: Sequence[Cosmology], box: Box) -> list[Cosmology]:
    """Returns the cosmologies of the universes of which this rank has a block.

    Parameters that are tensors enter through `replicated`: their gradients arrive complete on each
    rank, also from universes of other ranks.

    Args:
        cosmologies: the cosmology of each universe, or one for all; the same on every rank.
        box: the universes.

    Raises:
        ValueError: neither one cosmology nor one for each universe, or amplitudes given by A_s in
            some and by sigma8 in others, or radiation in some, or other m_nu_shares; or see
            `check_power`.
    """
    count = 1 if box.batch is None else box.batch
    if len(cosmologies) not in (1, count):
        raise ValueError(f"{len(cosmologies)} cosmologies for {count} universes")
    if len({c.radiation for c in cosmologies}) != 1:
        raise ValueError("all cosmologies of a batch must have radiation, or none of them")
    massive = {c.m_nu_shares for c in cosmologies if known_value(c.m_nu) != 0}
    if len(massive) > 1:
        raise ValueError("all cosmologies of a batch must have the same m_nu_shares")
    of_species = {"m_nu_shares": massive.pop()} if massive else {}
    if len({c.names for c in cosmologies}) != 1:
        raise ValueError(
            "all cosmologies of a batch must give A_s, or all sigma8, or all neither (with power)"
        )
    shared: dict[str, tf.Tensor] = {}
    for name in cosmologies[0].names:
        values = [getattr(c, name) for c in cosmologies]
        tensors = any(isinstance(value, (tf.Tensor, tf.Variable)) for value in values)
        # Ranks with other universes of a batch decide alike whether the initial field is Gaussian,
        # and whether neutrinos have a mass.
        if tensors or (name in ("f_NL", "m_nu") and len(set(values)) > 1):
            together = tf.stack([tf.cast(value, tf.float64) for value in values])
            shared[name] = replicated(box.mesh, together)
    first, local = box.batch_offset, (box.local_batch or (1,))[0]
    numbers = range(first, first + local) if len(cosmologies) > 1 else [0]
    for cosmology in cosmologies:
        check_power(cosmology, box.size, box.grid)
    universes = [
        cosmologies[i].replace(**{name: values[i] for name, values in shared.items()}, **of_species)
        for i in numbers
    ]
    return universes if len(cosmologies) > 1 else universes * local
