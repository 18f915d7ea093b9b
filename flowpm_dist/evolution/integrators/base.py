"""What a time integration scheme must provide: kicks and drifts, and their factors."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology import GrowthFunctions
from flowpm_dist.initial.lpt import growth_terms


@dataclass(frozen=True)
class Operation:
    """One change of the particles' state; c are its four factors, psi the LPT fields.

    kick: velocity = c0 velocity + c1 force + c2 psi1 + c3 psi2, the force at the displacement of
    this moment, -grad phi with laplacian phi = delta.
    drift: displacement += c1 velocity + c2 psi1 + c3 psi2.
    velocity: as kick, without a force.

    Attributes:
        kind: which of them.
        a: scale factor of the positions [1], for messages; of a drift that two steps share, that
            of the step it ends.
        step: number of the step, from 1.
        ends_step: whether that step is complete with it.
    """

    kind: Literal["kick", "drift", "velocity"]
    a: float
    step: int
    ends_step: bool = False


@dataclass(frozen=True)
class Schedule:
    """The operations of a run and their factors.

    Attributes:
        operations: in order.
        factors: float64 [operations, 4], differentiable by the cosmology.
    """

    operations: tuple[Operation, ...]
    factors: tf.Tensor


class Integrator(abc.ABC):
    """A scheme, with a velocity of its own: by default the canonical one, a^2 dx/dt.

    Attributes:
        starts_at_zero: whether it can begin at a = 0.
        uses_lpt: whether its operations need the LPT fields psi1 and psi2.
    """

    starts_at_zero = False
    uses_lpt = False

    @abc.abstractmethod
    def schedule(self, growth: GrowthFunctions, edges: Sequence[float]) -> Schedule:
        """From the first to the last of scale factors `edges`, which increase.

        It begins with the scheme's own velocity and ends with the canonical one.
        """

    def initial(self, growth: GrowthFunctions, a: float, order: int) -> tf.Tensor:
        """LPT factors of the displacement, and of the scheme's velocity, float64 [2, terms].

        Args:
            growth: of the cosmology.
            a: scale factor.
            order: of LPT.
        """
        terms = growth_terms(growth, a, order)
        return tf.stack([terms[0], momentum(growth, a) * terms[1]])

    def from_canonical(self, growth: GrowthFunctions, a: float) -> tf.Tensor | None:
        """Factors [4] of the "velocity" operation that makes the scheme's velocity; None: same."""
        return None


def momentum(growth: GrowthFunctions, a: float) -> tf.Tensor:
    """a^2 E [1]: canonical velocity a^2 dx/dt over dx/dlna, in units of H0."""
    return a**2 * tf.sqrt(growth.background.e2(a))


def rows(*columns: tf.Tensor | float) -> tf.Tensor:
    """Factors [n, 4] from four columns, numbers or tensors [n]."""
    count = max((c.shape[0] for c in columns if isinstance(c, tf.Tensor)), default=1)
    full = [tf.broadcast_to(tf.cast(c, tf.float64), [count]) for c in columns]
    return tf.stack(full, axis=1)


def kick_drift_kick(
    edges: Sequence[float], opening: tf.Tensor, drift: tf.Tensor, closing: tf.Tensor
) -> Schedule:
    """The closing kick of a step and the opening one of the next, of one force, become one.

    Args:
        edges: scale factors [n + 1].
        opening, drift, closing: factors [n, 4] of each step.
    """
    joined = _in_turn(closing[:-1], opening[1:])
    kicks = tf.concat([opening[:1], joined, closing[-1:]], axis=0)
    operations = [Operation("kick", float(edges[0]), 1)]
    for step, a in enumerate(edges[1:], start=1):
        operations.append(Operation("drift", float(a), step))
        operations.append(Operation("kick", float(a), step, ends_step=True))
    between = tf.reshape(tf.stack([drift, kicks[1:]], axis=1), [-1, 4])
    return Schedule(tuple(operations), tf.concat([kicks[:1], between], axis=0))


def drift_kick_drift(
    edges: Sequence[float], first: tf.Tensor, kick: tf.Tensor, second: tf.Tensor
) -> Schedule:
    """The second drift of a step and the first of the next become one.

    Args:
        edges: scale factors [n + 1].
        first, kick, second: factors [n, 4] of each step.
    """
    drifts = tf.concat([first[:1], second[:-1] + first[1:], second[-1:]], axis=0)
    a = np.asarray(edges, dtype=np.float64)
    operations = [Operation("drift", float(a[:2].mean()), 1)]
    for step in range(1, len(a)):
        operations.append(Operation("kick", float(a[step - 1 : step + 1].mean()), step))
        operations.append(Operation("drift", float(a[step]), step, ends_step=True))
    between = tf.reshape(tf.stack([kick, drifts[1:]], axis=1), [-1, 4])
    return Schedule(tuple(operations), tf.concat([drifts[:1], between], axis=0))


def followed_by_velocity(schedule: Schedule, factors: tf.Tensor) -> Schedule:
    """The schedule and then one operation on the velocity, factors [1, 4]."""
    last = schedule.operations[-1]
    operation = Operation("velocity", last.a, last.step)
    return Schedule(
        (*schedule.operations, operation), tf.concat([schedule.factors, factors], axis=0)
    )


def _in_turn(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Factors [n, 4] of two kicks of one force."""
    decay = second[:, :1]
    return tf.concat([decay * first[:, :1], decay * first[:, 1:] + second[:, 1:]], axis=1)
