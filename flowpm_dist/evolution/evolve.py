"""An evolution, differentiated where somebody asks for its gradient."""

from __future__ import annotations

from flowpm_dist.evolution.adjoints import Adjoint
from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.plan import EvolutionPlan, Evolved, Particles
from meshimpl.tapes import is_watched


def evolve(
    nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock, adjoint: Adjoint
) -> Evolved:
    """Carries particles through the operations of a plan, see `NBody.evolve`.

    Args:
        nbody: the particles' gravity.
        particles: one state, taken out of the list.
        plan: what to do.
        clock: gets an entry a step.
        adjoint: makes the gradient, where a `tf.GradientTape` watches what the evolution uses.
    """
    start = particles[0]
    inputs = [start.displacement, start.velocity, plan.factors, *plan.lpt, *plan.observed]
    watched = is_watched(inputs)
    del start, inputs
    if watched:
        return adjoint.evolve(nbody, particles, plan, clock)
    return nbody.evolve(particles, plan, clock)
