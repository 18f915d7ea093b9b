"""What looks at the particles while they evolve, and the gradient of what it sees."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    def tensors(self) -> list[tf.Tensor]:
        """All of them, in order."""
        return [self.displacement, self.before, self.after, *self.lpt]


class Observer(abc.ABC):
    """Looks at the particles when they are kicked; the evolution itself is not disturbed.

    Between two kicks the velocity stays as it is, so that from the particles at a kick follow their
    places until the next one, and those since the one before.

    Attributes:
        kicks: at which it looks, numbered from 0.
        inputs: tensors by which what is seen can be differentiated, besides the particles.
        needs_before: whether `look` uses the velocity before the kick.
    """

    needs_before: ClassVar[bool] = True
    kicks: frozenset[int]
    inputs: tuple[tf.Tensor, ...]

    @abc.abstractmethod
    def look(self, kick: int, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """Returns what is seen at a kick: a differentiable function of tensors.

        Args:
            kick: its number.
            moment: the particles.
            inputs: in place of `self.inputs`.
        """


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
    """Returns, from cotangents of what was seen, those of the particles at a kick and of inputs.

    Args:
        observer: that looked, and does so once more.
        kick, moment, inputs: see `Observer.look`.
        cotangents: of all that was seen.
    """
    sources = [tf.stop_gradient(t) for t in (*moment.tensors, *inputs)]
    count = len(moment.tensors)
    with tf.GradientTape() as tape:
        tape.watch(sources)
        x, before, after, *lpt = sources[:count]
        seen = observer.look(kick, Moment(x, before, after, tuple(lpt)), sources[count:])
    along = [cotangents[name] for name in seen]
    found = tape.gradient(list(seen.values()), sources, output_gradients=along)
    x, before, after, *lpt = (
        tf.zeros_like(t) if slope is None else slope
        for t, slope in zip(sources[:count], found[:count], strict=True)
    )
    return Moment(x, before, after, tuple(lpt)), found[count:]
