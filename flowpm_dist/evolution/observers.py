"""Observers measure the particles while they evolve; their measurements are differentiable."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from typing_extensions import override

Measured = dict[Hashable, tf.Tensor]
"""What an observer has measured, by names that it chooses; values of the same name are added."""


@dataclass(frozen=True)
class Moment:
    """The particles at the time of a kick, blocks [..., x, y, z, 3].

    Attributes:
        displacement: [Mpc/h].
        before, after: the integrator's own velocity before and after the kick.
        lpt: psi1 and psi2 [Mpc/h], where the integrator uses them.
        boost: canonical velocity that a correction of states adds to the particles' [Mpc/h H0],
            None without one. It moves nothing here: before and after are the run's own.
    """

    displacement: tf.Tensor
    before: tf.Tensor
    after: tf.Tensor
    lpt: tuple[tf.Tensor, ...] = ()
    boost: tf.Tensor | None = None

    @property
    def moving(self) -> list[tf.Tensor]:
        """Those that make places until the next kick: all but the velocity before the kick."""
        return [self.displacement, self.after, *self.lpt]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All of them but the boost, in order."""
        return [self.displacement, self.before, self.after, *self.lpt]


Measurement = Callable[[Moment, Sequence[tf.Tensor]], Measured]
"""Measures the particles at a kick, given the observer's inputs; differentiable."""


class Observer(abc.ABC):
    """Measures the particles when they are kicked; the evolution itself is not disturbed.

    Between two kicks the velocity does not change. The particles at a kick therefore determine
    their places from the kick before until the next one.

    Attributes:
        kicks: the kicks at which it measures, numbered from 0.
        inputs: tensors, besides the particles, with respect to which the measurements can be
            differentiated.
        needs_before: whether measurements use the velocity before the kick. If so, the kicks are
            the same on all ranks, and a correction of states acts at each kick, else once for two.

    If a gradient is taken on several ranks, the measurements of each rank must depend on the
    particles and the inputs, if only by a factor of 0. Otherwise a rank would not take part in the
    backward pass.
    """

    needs_before: bool = True
    kicks: frozenset[int]
    inputs: tuple[tf.Tensor, ...]

    @property
    def in_graphs(self) -> bool:
        """Whether its measurements and results can be part of a `tf.function`."""
        return False

    @abc.abstractmethod
    def measurements(self, kick: int) -> Sequence[Measurement]:
        """Returns the measurements at a kick, in the order in which they are made.

        They are differentiated one at a time, so that memory does not grow with their number.
        """

    @abc.abstractmethod
    def results(self, measured: Measured) -> Any:
        """Returns the results of all measurements of a run; on all ranks together."""

    def pack(self, measured: Measured) -> dict[str, tf.Tensor]:
        """Returns the measurements so far, by name, whole on every rank; on all ranks together.

        A checkpoint stores them. By default they are empty: a continued run has only the
        measurements that follow.
        """
        return {}

    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Measured:
        """Returns this rank's part of packed measurements, on any mesh.

        Raises:
            ValueError: another kind of observer packed them.
        """
        return {}


class Observers(Observer):
    """Several observers side by side.

    Args:
        observers: the observers. Each measures as if it were alone.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = list(observers)
        self.kicks = frozenset().union(*(each.kicks for each in self._all))
        self.inputs = tuple(tensor for each in self._all for tensor in each.inputs)
        self.needs_before = any(each.needs_before for each in self._all)

    @property
    @override
    def in_graphs(self) -> bool:
        return all(each.in_graphs for each in self._all)

    @override
    def measurements(self, kick: int) -> list[Measurement]:
        measurements: list[Measurement] = []
        begin = 0
        for number, each in enumerate(self._all):
            inputs = slice(begin, begin + len(each.inputs))
            begin += len(each.inputs)
            if kick in each.kicks:
                measurements += [
                    functools.partial(_measure, number, inputs, measurement)
                    for measurement in each.measurements(kick)
                ]
        return measurements

    def results(self, measured: Measured) -> list[Any]:
        """Returns the results of each."""
        return [each.results(part) for each, part in self._parts(measured)]

    @override
    def pack(self, measured: Measured) -> dict[str, tf.Tensor]:
        return {
            f"{number}_{name}": value
            for number, (each, part) in enumerate(self._parts(measured))
            for name, value in each.pack(part).items()
        }

    @override
    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Measured:
        measured: Measured = {}
        for number, each in enumerate(self._all):
            begin = f"{number}_"
            part = {n.removeprefix(begin): v for n, v in packed.items() if n.startswith(begin)}
            measured |= {(number, name): value for name, value in each.unpack(part).items()}
        return measured

    def _parts(self, measured: Measured) -> Iterator[tuple[Observer, Measured]]:
        for number, each in enumerate(self._all):
            yield each, {name[1]: v for name, v in measured.items() if name[0] == number}  # type: ignore[index]


def _measure(
    number: int,
    columns: slice,
    measurement: Measurement,
    moment: Moment,
    inputs: Sequence[tf.Tensor],
) -> Measured:
    """Returns a measurement of one of several observers, by pairs of its number and the name."""
    return {(number, name): value for name, value in measurement(moment, inputs[columns]).items()}


def add_to(measured: Measured, more: Measured) -> None:
    """Adds the measurements of one kick to earlier ones, in place."""
    for name, value in more.items():
        measured[name] = measured[name] + value if name in measured else value


def measurements_vjp(
    observer: Observer,
    kick: int,
    moment: Moment,
    inputs: Sequence[tf.Tensor],
    cotangents: Measured,
) -> tuple[Moment, list[tf.Tensor | None]]:
    """Returns the cotangents of the particles at a kick and of the observer's inputs.

    Args:
        observer: the observer, which measures once more.
        kick: the number of the kick.
        moment, inputs: see `Measurement`.
        cotangents: the cotangents of the measurements of the whole run.
    """
    sources = [tf.stop_gradient(t) for t in (*moment.tensors, *inputs)]
    count = len(moment.tensors)
    slopes: list[tf.Tensor | None] = [None] * len(sources)
    for measurement in observer.measurements(kick):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            x, before, after, *lpt = sources[:count]
            measured = measurement(Moment(x, before, after, tuple(lpt)), sources[count:])
        along = [cotangents[name] for name in measured]
        gradients = tape.gradient(list(measured.values()), sources, output_gradients=along)
        del tape, measured
        whole = [each if each is None else tf.convert_to_tensor(each) for each in gradients]
        slopes = [
            one if other is None else other if one is None else one + other
            for one, other in zip(slopes, whole, strict=True)
        ]
    x, before, after, *lpt = (
        tf.zeros_like(t) if slope is None else slope
        for t, slope in zip(sources[:count], slopes[:count], strict=True)
    )
    return Moment(x, before, after, tuple(lpt)), slopes[count:]
