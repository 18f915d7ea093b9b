"""The interface of an adjoint of an evolution."""

from __future__ import annotations

import abc
from typing import Annotated

from pydantic import BeforeValidator, InstanceOf

from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.plan import EvolutionPlan, Evolved, Particles
from flowpm_dist.options import Options, from_registry


class Adjoint(Options, abc.ABC):
    """A way to differentiate an evolution; its fields are its options."""

    @abc.abstractmethod
    def evolve(
        self, nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock
    ) -> Evolved:
        """Evolves the particles as `NBody.evolve` does, with a gradient.

        `tf.GradientTape` must find gradients of the last state, and of what `plan.observer` has
        seen, to displacement and velocity of the first state, to `plan.factors`, to `plan.lpt` and
        to the observer's inputs.

        Args:
            nbody, plan, clock: as there.
            particles: one state, taken out of the list.

        Raises:
            HaloError, FloatingPointError: as there.
        """


ADJOINTS: dict[str, type[Adjoint]] = {}
"""Name -> way to differentiate; filled by the package."""


AdjointChoice = Annotated[InstanceOf[Adjoint], BeforeValidator(from_registry(ADJOINTS, "adjoint"))]
"""A way to differentiate, or the name of one."""
