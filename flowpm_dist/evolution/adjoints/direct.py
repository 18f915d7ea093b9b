"""Plain differentiation of every operation: memory grows with the number of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from flowpm_dist.evolution.adjoints.base import Adjoint

if TYPE_CHECKING:
    from flowpm_dist.evolution.nbody import NBody
    from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Evolved, Particles


class DirectAdjoint(Adjoint):
    """Keeps all intermediate states; for small runs, and to check other adjoints against."""

    @override
    def evolve(
        self, nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock
    ) -> Evolved:
        return nbody.evolve(particles, plan, clock, fused=False)
