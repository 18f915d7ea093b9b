"""What looks at the particles while they evolve, and the gradient of what it sees."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Seen = dict[Hashable, tf.Tensor]
"""What was seen, by names that the observer gives; what is seen under one name is added up."""


@dataclass(frozen=True)
class Moment:
    """The particles at the time of a kick, blocks [..., x, y, z, 3].

    Attributes:
        displacement: [Mpc/h].
        before, after: the integrator's own velocity before and after the kick.
        lpt: psi1 and psi2 [Mpc/h], where the integrator uses them.
    """

    displacement: tf.Tensor
    before: tf.Tensor
    after: tf.Tensor
    lpt: tuple[tf.Tensor, ...] = ()

    @property
    def moving(self) -> list[tf.Tensor]:
        """Those that make places until the next kick: all but the velocity before the kick."""
        return [self.displacement, self.after, *self.lpt]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All of them, in order."""
        return [self.displacement, self.before, self.after, *self.lpt]


Look = Callable[[Moment, Sequence[tf.Tensor]], Seen]
"""From the particles at a kick and an observer's inputs to what is seen of them; differentiable."""


class Observer(abc.ABC):
    """Looks at the particles when they are kicked; the evolution itself is not disturbed.

    Between two kicks the velocity does not change. The particles at a kick therefore determine
    their places from the kick before until the next one.

    Attributes:
        kicks: at which it looks, numbered from 0.
        inputs: tensors by which what is seen can be differentiated, besides the particles.
        needs_before: whether looks use the velocity before the kick. If so, the kicks are the same
            on all ranks.

    Where a gradient is taken on several ranks, what each has seen must depend on the particles and
    the inputs, if only by a factor of 0. Otherwise a rank would not take part in the backward pass.
    """

    needs_before: bool = True
    kicks: frozenset[int]
    inputs: tuple[tf.Tensor, ...]

    @abc.abstractmethod
    def looks(self, kick: int) -> Sequence[Look]:
        """Returns the looks that are taken at a kick, in order.

        They are differentiated one at a time, so that memory does not grow with their number.
        """

    @abc.abstractmethod
    def results(self, seen: Seen) -> Any:
        """Returns what becomes of all that was seen during a run; on all ranks together."""

    def pack(self, seen: Seen) -> dict[str, tf.Tensor]:
        """Returns what was seen so far, by name, whole on every rank; on all ranks together.

        A checkpoint keeps it. By default it is empty: a continued run sees only what follows.
        """
        return {}

    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Seen:
        """Returns this rank's part of what was packed, on any mesh.

        Raises:
            ValueError: it is not of such an observer.
        """
        return {}


class Observers(Observer):
    """Several observers side by side.

    Args:
        observers: each of which sees as if it were alone.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = list(observers)
        self.kicks = frozenset().union(*(each.kicks for each in self._all))
        self.inputs = tuple(tensor for each in self._all for tensor in each.inputs)
        self.needs_before = any(each.needs_before for each in self._all)

    def looks(self, kick: int) -> list[Look]:
        """See `Observer.looks`."""
        found: list[Look] = []
        begin = 0
        for number, each in enumerate(self._all):
            own = slice(begin, begin + len(each.inputs))
            begin += len(each.inputs)
            if kick in each.kicks:
                found += [
                    functools.partial(_look_of, number, own, look) for look in each.looks(kick)
                ]
        return found

    def results(self, seen: Seen) -> list[Any]:
        """Returns the results of each."""
        return [each.results(own) for each, own in self._parts(seen)]

    def pack(self, seen: Seen) -> dict[str, tf.Tensor]:
        """See `Observer.pack`."""
        return {
            f"{number}_{name}": value
            for number, (each, own) in enumerate(self._parts(seen))
            for name, value in each.pack(own).items()
        }

    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Seen:
        """See `Observer.unpack`."""
        seen: Seen = {}
        for number, each in enumerate(self._all):
            begin = f"{number}_"
            own = {n.removeprefix(begin): v for n, v in packed.items() if n.startswith(begin)}
            seen |= {(number, name): value for name, value in each.unpack(own).items()}
        return seen

    def _parts(self, seen: Seen) -> Iterator[tuple[Observer, Seen]]:
        for number, each in enumerate(self._all):
            yield each, {name[1]: v for name, v in seen.items() if name[0] == number}  # type: ignore[index]


def _look_of(
    number: int, own: slice, look: Look, moment: Moment, inputs: Sequence[tf.Tensor]
) -> Seen:
    """Returns what an observer of a number sees, by names that have the number, too."""
    return {(number, name): value for name, value in look(moment, inputs[own]).items()}


def add_to(seen: Seen, more: Seen) -> None:
    """Adds what was seen at one kick to what was seen before."""
    for name, value in more.items():
        seen[name] = seen[name] + value if name in seen else value


def look_back(
    observer: Observer,
    kick: int,
    moment: Moment,
    inputs: Sequence[tf.Tensor],
    cotangents: Seen,
) -> tuple[Moment, list[tf.Tensor | None]]:
    """Returns the cotangents of the particles at a kick and of the observer's inputs.

    Args:
        observer: the observer, which looks once more.
        kick: its number.
        moment, inputs: see `Look`.
        cotangents: the cotangents of everything that the observer saw.
    """
    sources = [tf.stop_gradient(t) for t in (*moment.tensors, *inputs)]
    count = len(moment.tensors)
    slopes: list[tf.Tensor | None] = [None] * len(sources)
    for look in observer.looks(kick):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            x, before, after, *lpt = sources[:count]
            seen = look(Moment(x, before, after, tuple(lpt)), sources[count:])
        along = [cotangents[name] for name in seen]
        found = tape.gradient(list(seen.values()), sources, output_gradients=along)
        del tape, seen
        slopes = [
            one if other is None else other if one is None else one + other
            for one, other in zip(slopes, found, strict=True)
        ]
    x, before, after, *lpt = (
        tf.zeros_like(t) if slope is None else slope
        for t, slope in zip(sources[:count], slopes[:count], strict=True)
    )
    return Moment(x, before, after, tuple(lpt)), slopes[count:]
