"""The interface of an adjoint of an evolution.

Nothing here imports TensorFlow, nor does a module of an adjoint before its `evolve` is called: the
names of all are known when a run file is checked.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from flowpm_dist.options import Options

if TYPE_CHECKING:
    from flowpm_dist.evolution.nbody import NBody
    from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Evolved, Particles


class Adjoint(Options, abc.ABC):
    """A way to differentiate an evolution; its fields are its options."""

    @abc.abstractmethod
    def evolve(
        self, nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock
    ) -> Evolved:
        """Evolves the particles as `NBody.evolve` does, with a gradient.

        `tf.GradientTape` must find gradients of the last state, and of the measurements of
        `plan.observer`, to displacement and velocity of the first state, to `plan.factors`, to
        `plan.lpt` and to the observer's inputs.

        Args:
            nbody, plan, clock: as there.
            particles: one state, taken out of the list.

        Raises:
            HaloError, FloatingPointError: as there.
        """

    def kept_bytes(self, kicks: int, field: int, particles: int) -> int:
        """Returns the memory of the kicks' fields that the forward pass keeps on a rank [bytes].

        Args:
            kicks: their number.
            field: what each can keep, see `Gravity.kept_shapes` [bytes].
            particles: the memory of one value of each particle [bytes].
        """
        return 0


ADJOINTS: dict[str, type[Adjoint]] = {}
"""Name in a run file -> way to differentiate; filled by the package."""
