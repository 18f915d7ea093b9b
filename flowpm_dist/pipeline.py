"""Everything that is lowered for one box, or batch of boxes, and one scheme; kept between runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import tensorflow as tf

from flowpm_dist.fields import Box
from flowpm_dist.gravity import Gravity
from flowpm_dist.initial import linear_amplitude, noise_function
from flowpm_dist.integrators import Integrator
from flowpm_dist.lpt import lpt_function
from flowpm_dist.native import Gradient
from flowpm_dist.nbody import NBody, Particles, needed_halo
from flowpm_dist.painting import ParticleMesh, Reach
from flowpm_dist.spectral import to_field, to_spectrum
from flowpm_dist.universes import Universes
from meshimpl.mesh_function import MeshFunction


@dataclass(frozen=True)
class Scheme:
    """How a simulation is carried out, whatever its universe.

    Attributes:
        lpt_order: of the initial conditions, 1, 2 or 3.
        integrator: of the evolution.
        gradient: of the potential, "finite-difference" or "spectral".
        force_mesh: cells of the force mesh per particle spacing.
        deconvolve: the cloud-in-cell window from the force.
        noise: "cells" or "nested", see `noise_function`.
        fixed_amplitude: of the white noise's modes.
    """

    lpt_order: int
    integrator: Integrator
    gradient: Gradient
    force_mesh: int
    deconvolve: bool
    noise: str
    fixed_amplitude: bool


@dataclass
class Pipeline:
    """The functions of a box under a scheme, each lowered when it is first needed.

    Attributes:
        box: or batch of boxes.
        scheme: what to do in it.
    """

    box: Box
    scheme: Scheme
    _nbody: dict[tuple[int, int], NBody] = field(default_factory=dict)
    _noise: dict[bool, MeshFunction] = field(default_factory=dict)

    def noise(self, paired: bool) -> MeshFunction:
        """`f(seed)`: white noise [..., x, y, z], see `noise_function`."""
        if paired not in self._noise:
            kind, fixed = self.scheme.noise, self.scheme.fixed_amplitude
            self._noise[paired] = noise_function(self.box, kind, fixed=fixed, paired=paired)
        return self._noise[paired]

    @functools.cached_property
    def lpt(self) -> MeshFunction:
        """See `lpt_function`."""
        uses_lpt = self.scheme.integrator.uses_lpt
        return lpt_function(self.box, self.scheme.lpt_order, fields=uses_lpt)

    @functools.cached_property
    def linear(self) -> MeshFunction:
        """`f(white_noise, amplitude)`: the linear overdensity before growth [..., x, y, z]."""
        return self.box.function(
            lambda _, noise, amplitude: to_field(to_spectrum(noise) * amplitude, self.box),
            white_noise=self.box.shape,
            amplitude=self.box.mode_shape,
        )

    @functools.cached_property
    def reach(self) -> Reach:
        """Of the particles."""
        return Reach(self.box)

    def nbody(self, halo: int, refinement: int | None = None) -> NBody:
        """The evolution with a halo [particle spacings], on the force mesh or another."""
        refinement = refinement or self.scheme.force_mesh
        if (halo, refinement) not in self._nbody:
            pm = ParticleMesh(self.box, refinement, halo)
            gravity = Gravity(pm, self.scheme.gradient, self.scheme.deconvolve)
            self._nbody[halo, refinement] = NBody(gravity, self.reach)
        return self._nbody[halo, refinement]

    def amplitude(self, universes: Universes) -> tf.Tensor:
        """sqrt(P(k) / cell volume) of each universe, see `linear_amplitude`."""
        return universes.stack(universes.of_powers(lambda p: linear_amplitude(self.box, p)))

    def linear_delta(self, noise: tf.Tensor, universes: Universes) -> tf.Tensor:
        """Linear overdensity at a = 1 [..., x, y, z]."""
        today = universes.stack(universes.of_growths(lambda growth: growth.d1(1.0)))
        linear = self.linear(noise, self.amplitude(universes))
        return linear * tf.cast(today, self.box.dtype)[..., tf.newaxis, tf.newaxis, tf.newaxis]

    def initial(
        self, noise: tf.Tensor, universes: Universes, factors: tf.Tensor
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
        refinement: int = 1,
        label: str = "density",
    ) -> tf.Tensor:
        """Cloud-in-cell density on a mesh [..., x, y, z], mean 1; a wider halo where needed.

        Args:
            displacement: [..., x, y, z, 3] [Mpc/h].
            weights: of the particles [..., x, y, z]; 1 if None.
            halo: [particle spacings].
            refinement: mesh cells per particle spacing.
            label: of this moment, for messages.
        """
        reach = self.reach(displacement)
        if reach >= halo:
            halo = needed_halo(reach)
        return self.nbody(halo, refinement).density(displacement, label, weights)
