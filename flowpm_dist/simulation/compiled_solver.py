"""The stages of a run, and everything that is lowered for one box and one set of options.

Simulations and states of the same box and options share what is lowered, so that nothing is lowered
twice.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.evolution.corrections import force_cell
from flowpm_dist.evolution.integrators import Integrator, Operation, Schedule
from flowpm_dist.evolution.nbody import (
    Clock,
    EvolutionPlan,
    Evolved,
    MidRun,
    NBody,
    Particles,
    StepCallback,
)
from flowpm_dist.evolution.observers import Measured, Observer
from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.initial.conditions import InitialConditions, linear_amplitude
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.particle_mesh.cloud_in_cell import (
    MaxDisplacement,
    ParticleMesh,
    check_finite,
    needed_halo,
    suggested_halo,
)
from flowpm_dist.particle_mesh.gravity import Basis, Gravity
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.simulation.options import SolverOptions
from meshimpl.graph_guards import is_watched
from meshimpl.mesh_function import replicated

if TYPE_CHECKING:
    from flowpm_dist.simulation.inputs import Inputs
    from flowpm_dist.simulation.universes import LocalCosmologies


@dataclass
class CompiledSolver:
    """The functions of a box under its options, each lowered when it is first needed.

    Attributes:
        box: or batch of boxes.
        initial_options: what white noise becomes.
        force_options: how the particles attract each other.
        lpt_fields: whether the integrator uses psi_1 and psi_2.
        basis: of the correction of the force; None without one.
    """

    box: Box
    initial_options: InitialOptions
    force_options: ForceOptions
    lpt_fields: bool
    basis: Basis | None = None

    @functools.cached_property
    def initial(self) -> InitialConditions:
        """The initial conditions: from a seed to particles."""
        return InitialConditions(self.box, self.initial_options, self.lpt_fields)

    @functools.cached_property
    def max_displacement(self) -> MaxDisplacement:
        """The largest displacement of particles, see `MaxDisplacement`."""
        return _max_displacement(self.box)

    def nbody(self, halo: int, mesh_factor: float | None = None) -> NBody:
        """Returns the evolution with a halo [particle spacings], on the force mesh or another.

        It is shared with solvers of other initial conditions and integrators.
        """
        force = self.force_options
        if mesh_factor is not None:
            force = force.model_copy(update={"mesh_factor": mesh_factor})
        pm = ParticleMesh(self.box, force.mesh_factor, halo, force.exchange == "float16")
        return _nbody(self.box, Gravity(pm, force, self.basis))

    def amplitude(self, cosmologies: LocalCosmologies) -> tf.Tensor:
        """Returns sqrt(P(k) / cell volume) of each universe, see `linear_amplitude`."""
        return cosmologies.stack(cosmologies.of_powers(lambda p: linear_amplitude(self.box, p)))

    def linear_delta(self, noise: tf.Tensor, cosmologies: LocalCosmologies) -> tf.Tensor:
        """Returns the linear overdensity at a = 1, block [..., x, y, z]."""
        today = cosmologies.stack(cosmologies.of_growths(lambda growth: growth.d1(1.0)))
        linear = self.initial.linear_field(noise, self.amplitude(cosmologies))
        return linear * tf.cast(today, self.box.dtype)[..., tf.newaxis, tf.newaxis, tf.newaxis]

    def suggested_halo(
        self, particles: Particles, growth: float = 1.0, from_rest: float | None = None
    ) -> int:
        """Returns a halo that should do for a run [particle spacings]; the same on every rank.

        Args:
            particles: at its start.
            growth: of linear displacements to its end.
            from_rest: for a start at a = 0, where the velocity is dx/dD1: D1 at the end.

        Raises:
            FloatingPointError: the displacement is not finite.
        """
        if from_rest is None:
            reach = self.max_displacement(particles.displacement)
        else:
            reach, growth = self.max_displacement(particles.velocity), from_rest
        check_finite(reach, "initial conditions")
        halo = suggested_halo(reach, growth)
        return int(self.box.mesh.world.allreduce(tf.constant(halo), "max"))

    def compile(self, nbody: NBody, particles: Particles, a: float) -> float:
        """Lowers and compiles every function of a step, once; returns the seconds that took.

        Args:
            nbody: the evolution to compile.
            particles: the particles at the start.
            a: their scale factor, for messages.
        """
        if nbody.is_compiled:
            return 0.0
        begin = time.perf_counter()
        # nothing of this is to be differentiated
        x, v = tf.stop_gradient(particles.displacement), tf.stop_gradient(particles.velocity)
        painted = nbody.painted(x, f"start of the evolution, a = {a:.4g}")
        field = nbody.field(painted, *nbody.without_correction())
        nbody.kick(field, x, v, tf.zeros([*self.box.local_batch, 2], self.box.dtype))
        nbody.is_compiled = True
        return time.perf_counter() - begin

    def density(
        self,
        displacement: tf.Tensor,
        weights: tf.Tensor | None = None,
        *,
        halo: int,
        mesh_factor: float = 1,
        label: str = "density",
    ) -> tf.Tensor:
        """Returns the cloud-in-cell density on a mesh [..., x, y, z], mean 1.

        Args:
            displacement: block [..., x, y, z, 3] [Mpc/h].
            weights: the particles' weights, block [..., x, y, z]; 1 if None.
            halo: [particle spacings]; a wider one is taken where it is needed.
            mesh_factor: mesh cells per particle spacing.
            label: of this moment, for messages.

        Raises:
            FloatingPointError: the displacement is not finite.
        """
        reach = self.max_displacement(displacement)
        check_finite(reach, label)
        if reach >= halo:
            halo = needed_halo(reach)
        return self.nbody(halo, mesh_factor).density(displacement, label, weights)


def compiled_solver(box: Box, options: SolverOptions) -> CompiledSolver:
    """Returns the functions of a box under its options; the same ones at every call.

    They suit any cosmology, steps, halo and adjoint, and are kept in this process: a simulation of
    the same box lowers nothing again. All ranks of a mesh call this in the same order, and so lower
    the same functions in the same order.
    """
    initial, force = options.part(InitialOptions), options.part(ForceOptions)
    force_correction = options.force_correction
    basis = None if force_correction is None else force_correction.basis
    return _solver(box, initial, force, options.integrator.uses_lpt, basis)


@cached_on_mesh(16)
def _solver(
    box: Box, initial: InitialOptions, force: ForceOptions, lpt_fields: bool, basis: Basis | None
) -> CompiledSolver:
    return CompiledSolver(box, initial, force, lpt_fields, basis)


@cached_on_mesh(16)
def _max_displacement(box: Box) -> MaxDisplacement:
    return MaxDisplacement(box)


@cached_on_mesh(64)
def _nbody(box: Box, gravity: Gravity) -> NBody:
    return NBody(gravity, _max_displacement(box))


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
    solver, local, order = inputs.solver, inputs.cosmologies, inputs.options.lpt_order
    factors = local.of_growths(lambda growth: integrator.initial(growth, a, order))
    noise, amplitude = inputs.white_noise(), solver.amplitude(local)
    x, v, lpt = solver.initial.particles(noise, amplitude, local.stack(factors))
    return Particles(x, v), lpt


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
    local, end = inputs.cosmologies, inputs.edges[-1]
    growth, from_rest = float(local.growth_between(inputs.edges)[0]), None
    if not np.isfinite(growth):
        from_rest = max(local.of_growths(lambda growth: float(growth.d1(end))))
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
        observer: measures the particles during the evolution.
        after_step: called after `progress`, with a state from which the run can continue.

    Raises:
        HaloError, FloatingPointError: on every rank.
    """
    solver, edges = inputs.solver, inputs.edges
    schedule = _schedule(inputs)
    growth_left = inputs.cosmologies.growth_between(edges)
    begin = start.pop()
    before = observer.unpack(begin.measured()) if observer and begin.done else {}
    done, a, particles = begin.done, begin.a, [begin.particles]
    clock.go_on(begin.timings, complete=begin.step == len(edges) - 1)
    del begin
    initial = clock.elapsed()
    nbody = solver.nbody(halo)
    compile_seconds = solver.compile(nbody, particles[0], a)

    def report(number: int, last: Operation, here: Particles, measured: Measured) -> None:
        if after_step is not None:
            timings = copy.deepcopy({"steps": clock.steps, "phases": clock.phases})
            packed = dict if observer is None else functools.partial(observer.pack, measured)
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
        measured=before,
    )
    ready = clock.elapsed()
    if is_watched([*vars(particles[0]).values(), plan.factors, *lpt, *plan.observed]):
        end = inputs.options.adjoint.evolve(nbody, particles, plan, clock)
    else:
        end = nbody.evolve(particles, plan, clock)
    evolution = clock.elapsed() - ready
    work = inputs.box.cells * (inputs.box.batch or 1) * max(1, len(clock.steps))
    moving = sum(clock.steps) - sum(clock.phases.get("observe", ()))
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
    """Returns the schedule of all universes of this rank; factors [..., operations, 4].

    The coefficients of a correction are further columns of the factors.
    """
    edges, integrator, local = inputs.edges.tolist(), inputs.options.integrator, inputs.cosmologies
    schedules = local.of_growths(lambda growth: integrator.schedule(growth, edges))
    operations = schedules[0].operations
    factors = local.stack([as_float64(schedule.factors) for schedule in schedules])
    if inputs.from_particles:
        rows = local.of_growths(lambda growth: integrator.from_canonical(growth, edges[0]))
        if rows[0] is not None:
            first = local.stack(rows)[..., tf.newaxis, :]
            operations = (Operation("velocity", edges[0], 1), *operations)
            factors = tf.concat([first, factors], axis=-2)
    if (correction := inputs.options.force_correction) is not None:
        theta = replicated(inputs.box.mesh, as_float64(correction.theta))
        mesh = inputs.box.finer(inputs.options.mesh_factor)
        cell = force_cell(mesh.size, mesh.grid)
        a = np.array([operation.a for operation in operations])
        of = local.of_powers(lambda power: correction.coefficients(theta, power, cell, a))
        factors = tf.concat([factors, local.stack(of)], axis=-1)
    return Schedule(operations, factors)
