"""The particles that an evolution starts from, and the plan of its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.observers import Observer, Seen

Progress = Callable[[int, int, float, float], None]
"""Called on every rank after each step: step, number of steps, scale factor, seconds."""


@dataclass(frozen=True)
class Particles:
    """Displacement [Mpc/h] and a velocity, blocks [..., x, y, z, 3].

    The velocity is the canonical one, a^2 dx/dt [Mpc/h H0], where nothing else is said.
    """

    displacement: tf.Tensor
    velocity: tf.Tensor


@dataclass(frozen=True)
class EvolutionPlan:
    """The plan of an evolution.

    Attributes:
        operations: in order.
        factors: of this rank's universes, float64 [..., operations, 4].
        lpt: psi1 and psi2 [Mpc/h], blocks [..., x, y, z, 3], where the operations use them.
        steps: their number.
        growth: of linear displacements from scale factor a to the end, see `check_halo`.
        progress: called after each step.
        observer: looks at the particles on the way, and
        observed: the tensors that it is given for its inputs.
    """

    operations: Sequence[Operation]
    factors: tf.Tensor
    lpt: tuple[tf.Tensor, ...] = ()
    steps: int = 1
    growth: Callable[[float], float] = lambda a: 1.0
    progress: Progress | None = None
    observer: Observer | None = None
    observed: tuple[tf.Tensor, ...] = ()

    @property
    def kick_numbers(self) -> dict[int, int]:
        """The number of each kick among the kicks, by its number among the operations."""
        kicks = [n for n, operation in enumerate(self.operations) if operation.kind == "kick"]
        return {number: kick for kick, number in enumerate(kicks)}


@dataclass(frozen=True)
class Evolved:
    """What comes of an evolution.

    Attributes:
        particles: at its end.
        seen: by the plan's observer.
    """

    particles: Particles
    seen: Seen = field(default_factory=dict)
