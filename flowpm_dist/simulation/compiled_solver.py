"""Everything that is lowered for one box, or batch of boxes, and one options; kept between runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import tensorflow as tf

from flowpm_dist.evolution.integrators import Integrator
from flowpm_dist.evolution.nbody import NBody, Particles, needed_halo
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.initial.linear_field import linear_amplitude
from flowpm_dist.initial.lpt import lpt_function
from flowpm_dist.initial.white_noise import noise_function
from flowpm_dist.particle_mesh.cloud_in_cell import MaxDisplacement, ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.kernels import ForceGradient
from flowpm_dist.simulation.local_cosmologies import LocalCosmologies
from meshimpl.mesh_function import MeshFunction


@dataclass(frozen=True)
class SolverOptions:
    """How a simulation is carried out, whatever its universe.

    Attributes:
        lpt_order: of the initial conditions, 1, 2 or 3.
        integrator: of the evolution.
        force_gradient: of the potential, "finite-difference" or "spectral".
        mesh_factor: cells of the force mesh per particle spacing.
        deconvolve: the cloud-in-cell window from the force.
        noise: "cells" or "nested", see `noise_function`.
        fixed_amplitude: of the white noise's modes.
    """

    lpt_order: int
    integrator: Integrator
    force_gradient: ForceGradient
    mesh_factor: int
    deconvolve: bool
    noise: str
    fixed_amplitude: bool


@dataclass
class CompiledSolver:
    """The functions of a box under a options, each lowered when it is first needed.

    Attributes:
        box: or batch of boxes.
        options: what to do in it.
    """

    box: Box
    options: SolverOptions
    _nbody: dict[tuple[int, int], NBody] = field(default_factory=dict)
    _noise: dict[bool, MeshFunction] = field(default_factory=dict)

    def noise(self, paired: bool) -> MeshFunction:
        """`f(seed)`: white noise [..., x, y, z], see `noise_function`."""
        if paired not in self._noise:
            kind, fixed = self.options.noise, self.options.fixed_amplitude
            self._noise[paired] = noise_function(self.box, kind, fixed=fixed, paired=paired)
        return self._noise[paired]

    @functools.cached_property
    def lpt(self) -> MeshFunction:
        """See `lpt_function`."""
        uses_lpt = self.options.integrator.uses_lpt
        return lpt_function(self.box, self.options.lpt_order, fields=uses_lpt)

    @functools.cached_property
    def linear(self) -> MeshFunction:
        """`f(white_noise, amplitude)`: the linear overdensity before growth [..., x, y, z]."""
        return self.box.function(
            lambda _, noise, amplitude: to_field(to_spectrum(noise) * amplitude, self.box),
            white_noise=self.box.shape,
            amplitude=self.box.mode_shape,
        )

    @functools.cached_property
    def reach(self) -> MaxDisplacement:
        """Of the particles."""
        return MaxDisplacement(self.box)

    def nbody(self, halo: int, mesh_factor: int | None = None) -> NBody:
        """The evolution with a halo [particle spacings], on the force mesh or another."""
        mesh_factor = mesh_factor or self.options.mesh_factor
        if (halo, mesh_factor) not in self._nbody:
            pm = ParticleMesh(self.box, mesh_factor, halo)
            gravity = Gravity(pm, self.options.force_gradient, self.options.deconvolve)
            self._nbody[halo, mesh_factor] = NBody(gravity, self.reach)
        return self._nbody[halo, mesh_factor]

    def amplitude(self, universes: LocalCosmologies) -> tf.Tensor:
        """sqrt(P(k) / cell volume) of each universe, see `linear_amplitude`."""
        return universes.stack(universes.of_powers(lambda p: linear_amplitude(self.box, p)))

    def linear_delta(self, noise: tf.Tensor, universes: LocalCosmologies) -> tf.Tensor:
        """Linear overdensity at a = 1 [..., x, y, z]."""
        today = universes.stack(universes.of_growths(lambda growth: growth.d1(1.0)))
        linear = self.linear(noise, self.amplitude(universes))
        return linear * tf.cast(today, self.box.dtype)[..., tf.newaxis, tf.newaxis, tf.newaxis]

    def initial(
        self, noise: tf.Tensor, universes: LocalCosmologies, factors: tf.Tensor
    ) -> tuple[Particles, tuple[tf.Tensor, ...]]:
        """The particles by LPT, and the LPT fields that the integrator uses.

        Args:
            noise: white noise [..., x, y, z].
            universes: of this rank.
            factors: of displacement and velocity, [..., 2, terms]; see `lpt_function`.
        """
        amplitude = self.amplitude(universes)
        _, x, v, *lpt = self.lpt(noise, amplitude, tf.cast(factors, self.box.dtype))
        return Particles(x, v), tuple(lpt)

    def density(
        self,
        displacement: tf.Tensor,
        weights: tf.Tensor | None = None,
        *,
        halo: int,
        mesh_factor: int = 1,
        label: str = "density",
    ) -> tf.Tensor:
        """Cloud-in-cell density on a mesh [..., x, y, z], mean 1; a wider halo where needed.

        Args:
            displacement: [..., x, y, z, 3] [Mpc/h].
            weights: of the particles [..., x, y, z]; 1 if None.
            halo: [particle spacings].
            mesh_factor: mesh cells per particle spacing.
            label: of this moment, for messages.
        """
        reach = self.reach(displacement)
        if reach >= halo:
            halo = needed_halo(reach)
        return self.nbody(halo, mesh_factor).density(displacement, label, weights)
