"""Everything that is lowered for one box and one set of options.

Simulations and states of the same box and options share what is lowered, so that nothing is lowered
twice.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.plan import EvolutionPlan, Particles
from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.grid.decomposition import needed_halo, suggested_halo
from flowpm_dist.initial.conditions import (
    InitialConditions,
    linear_amplitude,
    of_modes,
    potential_amplitude,
)
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.particle_mesh.cloud_in_cell import MaxDisplacement, ParticleMesh, check_finite
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.particle_mesh.response import NeutrinoResponse, Product, Response
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.universes import LocalCosmologies


@dataclass
class CompiledSolver:
    """The functions of a box under its options, each lowered when it is first needed.

    Attributes:
        box: the box of one universe, or of a batch.
        initial_options: what white noise becomes.
        force_options: how the particles attract each other.
        lpt_fields: whether the integrator uses psi_1 and psi_2.
        response: the factor of the potential; None without one.
    """

    box: Box
    initial_options: InitialOptions
    force_options: ForceOptions
    lpt_fields: bool
    response: Response | None = None

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
        return _nbody(self.box, Gravity(pm, force, self.response))

    def amplitude(self, cosmologies: LocalCosmologies, a: float = 1.0) -> tf.Tensor:
        """Returns sqrt(P(k) / cell volume) of each universe at a, see `linear_amplitude`."""
        return cosmologies.stack(
            cosmologies.of_powers(lambda theory: linear_amplitude(self.box, theory.power, a))
        )

    def excess(self, cosmologies: LocalCosmologies, a: float) -> list[tf.Tensor]:
        """Returns the excess of the first velocity at a, see `lpt_function`; empty without one."""
        if not cosmologies.by_scale:
            return []

        def of_theory(theory: Theory) -> tf.Tensor:
            growth = theory.growth
            return of_modes(self.box, lambda k: growth.f1(a, k) / growth.f1(a) - 1.0)

        return [cosmologies.stack(cosmologies.of_growths(of_theory))]

    def primordial_noise(self, noise: tf.Tensor, cosmologies: LocalCosmologies) -> tf.Tensor:
        """Returns the noise that `amplitude` makes the linear field of, block [..., x, y, z].

        It is the white noise itself in Gaussian universes.

        Args:
            noise: white noise, block [..., x, y, z].
            cosmologies: the universes.
        """
        universes = cosmologies.cosmologies
        if all(cosmology.is_gaussian for cosmology in universes):
            return noise
        amplitude = cosmologies.stack(
            cosmologies.of_powers(lambda theory: potential_amplitude(self.box, theory.power))
        )
        f_NL = cosmologies.stack([as_float64(cosmology.f_NL) for cosmology in universes])
        return self.initial.local_noise(noise, amplitude, f_NL)

    def linear_delta(self, noise: tf.Tensor, cosmologies: LocalCosmologies) -> tf.Tensor:
        """Returns the linear overdensity at a = 1, block [..., x, y, z]."""
        today = cosmologies.stack(cosmologies.of_growths(lambda theory: theory.growth.d1(1.0)))
        noise = self.primordial_noise(noise, cosmologies)
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
        if not self.max_displacement.is_bounded:
            self.max_displacement.check_finite(particles.displacement, "initial conditions")
            return suggested_halo(0.0)
        if from_rest is None:
            reach = self.max_displacement(particles.displacement)
        else:
            reach, growth = self.max_displacement(particles.velocity), from_rest
        check_finite(reach, "initial conditions")
        halo = suggested_halo(reach, growth)
        return int(self.box.mesh.world.allreduce(tf.constant(halo), "max"))

    def compile(
        self, nbody: NBody, plan: EvolutionPlan, particles: Particles, watched: bool
    ) -> float:
        """Makes the first kick, once, which lowers and compiles its functions; returns the seconds.

        Functions of LPT fields, of plain differentiation and of observers are lowered when they are
        first called.

        Args:
            nbody: the evolution to compile.
            plan: what it will do.
            particles: the particles at the start.
            watched: whether it will be differentiated.

        Raises:
            HaloError, FloatingPointError: on every rank.
        """
        begin = time.perf_counter()
        # nothing of this is to be differentiated
        x, v = tf.stop_gradient(particles.displacement), tf.stop_gradient(particles.velocity)
        return time.perf_counter() - begin if nbody.compile(plan, x, v, watched) else 0.0

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
        if self.max_displacement.is_bounded:
            reach = self.max_displacement(displacement)
            check_finite(reach, label)
            if reach >= halo:
                halo = needed_halo(reach)
        return self.nbody(halo, mesh_factor).density(displacement, label, weights)


def compiled_solver(box: Box, options: SolverOptions, *, neutrinos: int = 0) -> CompiledSolver:
    """Returns the functions of a box under its options; the same ones at every call.

    They suit any cosmology, steps, halo and adjoint, and are kept in this process: a simulation of
    the same box lowers nothing again. All ranks of a mesh call this in the same order, and so lower
    the same functions in the same order.

    Args:
        box: the box of one universe, or of a batch.
        options: the simulation's options.
        neutrinos: how many kinds of neutrinos add to the force, see `Neutrinos.species`.
    """
    initial, force = options.part(InitialOptions), options.part(ForceOptions)
    force_correction = options.force_correction
    responses: list[Response] = [] if force_correction is None else [force_correction.response]
    if neutrinos:
        responses.append(NeutrinoResponse(2 * neutrinos))
    both = len(responses) > 1
    response = Product(tuple(responses)) if both else next(iter(responses), None)
    return _solver(box, initial, force, options.integrator.uses_lpt, response)


@cached_on_mesh(16)
def _solver(
    box: Box,
    initial: InitialOptions,
    force: ForceOptions,
    lpt_fields: bool,
    response: Response | None,
) -> CompiledSolver:
    return CompiledSolver(box, initial, force, lpt_fields, response)


@cached_on_mesh(16)
def _max_displacement(box: Box) -> MaxDisplacement:
    return MaxDisplacement(box)


@cached_on_mesh(64)
def _nbody(box: Box, gravity: Gravity) -> NBody:
    return NBody(gravity, _max_displacement(box))
