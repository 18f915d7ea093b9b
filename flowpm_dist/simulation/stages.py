"""The stages of a run, each handed the inputs: its first particles, and their evolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.evolve import evolve
from flowpm_dist.evolution.integrators import Integrator, Operation, Schedule
from flowpm_dist.evolution.observers import Observer
from flowpm_dist.evolution.plan import EvolutionPlan, Evolved, Particles, Progress
from flowpm_dist.simulation.inputs import Inputs


def first_particles(inputs: Inputs) -> tuple[list[Particles], tuple[tf.Tensor, ...]]:
    """Returns the particles at the first of the edges, and the LPT fields of the integrator.

    Their velocity is the integrator's own, or canonical where they were given. They are a list of
    one, from which the evolution takes them.
    """
    if inputs.from_particles:
        return [inputs.given.pop()], ()
    particles, lpt = lpt_particles(inputs, float(inputs.edges[0]), inputs.options.integrator)
    return [particles], lpt


def lpt_particles(
    inputs: Inputs, a: float, integrator: Integrator
) -> tuple[Particles, tuple[tf.Tensor, ...]]:
    """Returns the particles of LPT and the LPT fields of the simulation's integrator.

    Args:
        inputs: of the run.
        a: scale factor.
        integrator: whose velocity the particles have.
    """
    local, order = inputs.cosmologies, inputs.options.lpt_order
    factors = local.of_growths(lambda growth: integrator.initial(growth, a, order))
    return inputs.solver.particles(inputs.white_noise(), local, local.stack(factors))


def halo_for(start: Particles, inputs: Inputs) -> int:
    """Returns the halo of a run [particle spacings]: that of its inputs, or one that will do.

    Args:
        start: the particles at the first of the edges.
        inputs: of the run.
    """
    if inputs.halo != "auto":
        return inputs.halo
    growth = float(inputs.cosmologies.growth_between(inputs.edges)[0])
    from_rest = None if np.isfinite(growth) else inputs.cosmologies.largest_d1(inputs.edges[-1])
    return inputs.solver.suggested_halo(start, growth, from_rest)


def evolve_particles(
    start: list[Particles],
    lpt: tuple[tf.Tensor, ...],
    inputs: Inputs,
    halo: int,
    clock: Clock,
    progress: Progress | None,
    observer: Observer | None = None,
) -> tuple[Evolved, dict[str, Any]]:
    """Returns the particles at the last of the edges, and the timings of a `State`.

    Args:
        start, lpt: of `first_particles`; the particles are taken out of the list.
        inputs: of the run.
        halo: [particle spacings].
        clock: that started with the run; gets an entry a step.
        progress: called after each step.
        observer: looks at the particles on the way.

    Raises:
        HaloError, FloatingPointError: on every rank.
    """
    solver, edges = inputs.solver, inputs.edges
    schedule = _schedule(inputs)
    growth_left = inputs.cosmologies.growth_between(edges)
    initial = clock.elapsed()
    nbody = solver.nbody(halo)
    compile_seconds = solver.compile(nbody, start[0], float(edges[0]))
    plan = EvolutionPlan(
        schedule.operations,
        schedule.factors,
        lpt,
        steps=len(edges) - 1,
        growth=lambda a: float(1.0 / np.interp(a, edges, 1.0 / growth_left)),
        progress=progress,
        observer=observer,
        observed=() if observer is None else observer.inputs,
    )
    ready = clock.elapsed()
    end = evolve(nbody, start, plan, clock, inputs.options.adjoint)
    evolution = clock.elapsed() - ready
    work = inputs.box.cells * (inputs.box.batch or 1) * plan.steps
    return end, {
        "phases": clock.phases,
        "steps": clock.steps,
        "compile": compile_seconds,
        "initial": initial,
        "evolution": evolution,
        "total": clock.elapsed() - compile_seconds,
        "ns_per_particle_per_step": evolution * 1e9 / work,
    }


def _schedule(inputs: Inputs) -> Schedule:
    """Returns the schedule of all universes of this rank; factors [..., operations, 4]."""
    edges, integrator, local = inputs.edges.tolist(), inputs.options.integrator, inputs.cosmologies
    schedules = local.of_growths(lambda growth: integrator.schedule(growth, edges))
    operations = schedules[0].operations
    factors = local.stack([schedule.factors for schedule in schedules])
    if inputs.from_particles:
        rows = local.of_growths(lambda growth: integrator.from_canonical(growth, edges[0]))
        if rows[0] is not None:
            first = local.stack(rows)[..., tf.newaxis, :]
            operations = (Operation("velocity", edges[0], 1), *operations)
            factors = tf.concat([first, factors], axis=-2)
    return Schedule(operations, factors)
