"""The stages of a run, each handed the inputs: its first particles, and their evolution."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.evolution.integrators import Integrator, Operation, Schedule
from flowpm_dist.evolution.observers import Observer, Seen
from flowpm_dist.evolution.plan import (
    Clock,
    EvolutionPlan,
    Evolved,
    MidRun,
    Particles,
    StepCallback,
)
from flowpm_dist.grid.box import Box
from flowpm_dist.simulation.inputs import Inputs
from meshimpl.graph_guards import is_watched

AfterStep = Callable[[MidRun], None]
"""Called on every rank after each step, see `Simulation.run_resumably`."""
Resume = Callable[[Box], MidRun]
"""Returns the state from which a run in a box continues, see `Simulation.run_resumably`."""


def first_particles(
    inputs: Inputs, resume: Resume | None = None
) -> tuple[list[MidRun], tuple[tf.Tensor, ...]]:
    """Returns where the run begins, and the LPT fields of the integrator.

    The velocity is the integrator's own, or canonical where particles were given. The beginning is
    a list of one, from which the evolution takes it.

    Args:
        inputs: the run's inputs.
        resume: returns the state from which the run continues; None to begin at the first edge.
    """
    a, integrator = float(inputs.edges[0]), inputs.options.integrator
    if resume is not None:
        lpt = lpt_particles(inputs, a, integrator)[1] if integrator.uses_lpt else ()
        return [resume(inputs.box)], lpt
    if inputs.from_particles:
        return [MidRun(0, 0, a, inputs.given.pop())], ()
    particles, lpt = lpt_particles(inputs, a, integrator)
    return [MidRun(0, 0, a, particles)], lpt


def lpt_particles(
    inputs: Inputs, a: float, integrator: Integrator
) -> tuple[Particles, tuple[tf.Tensor, ...]]:
    """Returns the particles of LPT and the LPT fields of the simulation's integrator.

    Args:
        inputs: the run's inputs.
        a: scale factor.
        integrator: whose velocity the particles have.
    """
    local, order = inputs.cosmologies, inputs.options.lpt_order
    factors = local.of_growths(lambda growth: integrator.initial(growth, a, order))
    return inputs.solver.particles(inputs.white_noise(), local, local.stack(factors))


def halo_for(start: MidRun, inputs: Inputs) -> int:
    """Returns the halo of a run [particle spacings]: given by its inputs, or large enough.

    Args:
        start: where the run begins; a continued run keeps its halo.
        inputs: the run's inputs.
    """
    if inputs.halo != "auto":
        return inputs.halo
    if start.halo is not None:
        return start.halo
    growth = float(inputs.cosmologies.growth_between(inputs.edges)[0])
    from_rest = None if np.isfinite(growth) else inputs.cosmologies.largest_d1(inputs.edges[-1])
    return inputs.solver.suggested_halo(start.particles, growth, from_rest)


def evolve_particles(
    start: list[MidRun],
    lpt: tuple[tf.Tensor, ...],
    inputs: Inputs,
    halo: int,
    clock: Clock,
    progress: StepCallback | None,
    observer: Observer | None = None,
    after_step: AfterStep | None = None,
) -> tuple[Evolved, dict[str, Any]]:
    """Returns the particles at the last of the edges, and the timings of a `State`.

    Args:
        start, lpt: as `first_particles` returns them; `start` is emptied.
        inputs: the run's inputs.
        halo: [particle spacings].
        clock: the clock that started with the run; each step adds an entry.
        progress: called after each step.
        observer: looks at the particles during the evolution.
        after_step: called after `progress`, with a state from which the run can continue.

    Raises:
        HaloError, FloatingPointError: on every rank.
    """
    solver, edges = inputs.solver, inputs.edges
    schedule = _schedule(inputs)
    growth_left = inputs.cosmologies.growth_between(edges)
    begin = start.pop()
    before = observer.unpack(begin.seen()) if observer and begin.done else {}
    done, a, particles = begin.done, begin.a, [begin.particles]
    clock.go_on(begin.timings, complete=begin.step == len(edges) - 1)
    del begin
    initial = clock.elapsed()
    nbody = solver.nbody(halo)
    compile_seconds = solver.compile(nbody, particles[0], a)

    def report(number: int, last: Operation, here: Particles, seen: Seen) -> None:
        if after_step is not None:
            timings = copy.deepcopy({"steps": clock.steps, "phases": clock.phases})
            packed = dict if observer is None else functools.partial(observer.pack, seen)
            after_step(MidRun(done + number, last.step, last.a, here, halo, timings, packed))

    plan = EvolutionPlan(
        schedule.operations[done:],
        schedule.factors[..., done:, :],
        lpt,
        steps=len(edges) - 1,
        growth=lambda a: float(1.0 / np.interp(a, edges, 1.0 / growth_left)),
        progress=progress,
        observer=observer,
        observed=() if observer is None else observer.inputs,
        kicks_before=sum(operation.kind == "kick" for operation in schedule.operations[:done]),
        after_step=report,
        seen=before,
    )
    ready = clock.elapsed()
    if is_watched([*vars(particles[0]).values(), plan.factors, *lpt, *plan.observed]):
        end = inputs.options.adjoint.evolve(nbody, particles, plan, clock)
    else:
        end = nbody.evolve(particles, plan, clock)
    evolution = clock.elapsed() - ready
    work = inputs.box.cells * (inputs.box.batch or 1) * max(1, len(clock.steps))
    moving = sum(clock.steps) - sum(clock.phases.get("look", ()))
    return end, {
        "phases": clock.phases,
        "steps": clock.steps,
        "compile": compile_seconds,
        "initial": initial,
        "evolution": evolution,
        "total": clock.elapsed() - compile_seconds,
        "ns_per_particle_per_step": moving * 1e9 / work,
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
