"""Schedules from the factors of each step: what schemes are put together with.

TensorFlow is imported when a schedule is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowpm_dist.evolution.integrators.base import Operation, Schedule

if TYPE_CHECKING:
    import tensorflow as tf


def rows(*columns: tf.Tensor | float) -> tf.Tensor:
    """Returns factors [n, 4] from four columns, numbers or tensors [n]."""
    import tensorflow as tf

    count = max((c.shape[0] for c in columns if isinstance(c, tf.Tensor)), default=1)
    full = [tf.broadcast_to(tf.cast(c, tf.float64), [count]) for c in columns]
    return tf.stack(full, axis=1)


def kick_drift_kick(
    edges: Sequence[float], opening: tf.Tensor, drift: tf.Tensor, closing: tf.Tensor
) -> Schedule:
    """Returns the schedule of kick-drift-kick steps.

    The closing kick of a step and the opening one of the next read one force and become one.

    Args:
        edges: scale factors [n + 1].
        opening, drift, closing: factors [n, 4] of each step.
    """
    import tensorflow as tf

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
    """Returns the schedule of drift-kick-drift steps.

    The second drift of a step and the first of the next become one.

    Args:
        edges: scale factors [n + 1].
        first, kick, second: factors [n, 4] of each step.
    """
    import tensorflow as tf

    drifts = tf.concat([first[:1], second[:-1] + first[1:], second[-1:]], axis=0)
    a = np.asarray(edges, dtype=np.float64)
    operations = [Operation("drift", float(a[:2].mean()), 1)]
    for step in range(1, len(a)):
        operations.append(Operation("kick", float(a[step - 1 : step + 1].mean()), step))
        operations.append(Operation("drift", float(a[step]), step, ends_step=True))
    between = tf.reshape(tf.stack([kick, drifts[1:]], axis=1), [-1, 4])
    return Schedule(tuple(operations), tf.concat([drifts[:1], between], axis=0))


def followed_by_velocity(schedule: Schedule, factors: tf.Tensor) -> Schedule:
    """Returns the schedule with one more operation on the velocity, of factors [1, 4]."""
    import tensorflow as tf

    last = schedule.operations[-1]
    operation = Operation("velocity", last.a, last.step)
    return Schedule(
        (*schedule.operations, operation), tf.concat([schedule.factors, factors], axis=0)
    )


def _in_turn(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Returns the factors [n, 4] of two kicks of one force as one kick."""
    import tensorflow as tf

    decay = second[:, :1]
    return tf.concat([decay * first[:, :1], decay * first[:, 1:] + second[:, 1:]], axis=1)
