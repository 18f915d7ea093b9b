"""A universe at one scale factor, or a batch of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.particle_mesh.redshift_space import redshift_space
from flowpm_dist.simulation.compiled_solver import CompiledSolver
from flowpm_dist.simulation.local_cosmologies import LocalCosmologies

AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Provenance:
    """Where a state came from.

    Attributes:
        pipeline: that made it.
        universes: their cosmologies.
        halo: of the evolution [particle spacings].
        noise: the white noise that was given; or
        seed: what it was drawn from, and whether as the paired one. Neither: given particles.
    """

    pipeline: CompiledSolver
    universes: LocalCosmologies
    halo: int
    noise: tf.Tensor | None = None
    seed: Any = None
    paired: bool = False


@dataclass(frozen=True)
class State:
    """A universe at one scale factor, or a batch of them.

    Attributes:
        displacement: comoving, from the Lagrangian lattice [Mpc/h].
        velocity: canonical, a^2 dx/dt [Mpc/h H0].
        a: scale factor [1].
        timings: "phases" {name: [seconds per step]}, "steps" [seconds], "compile", "initial",
            "evolution" and "total" seconds (the latter without compilation),
            "ns_per_particle_per_step" of the evolution over all particles, and "halo", the planes
            that were exchanged.
    """

    displacement: Field
    velocity: Field
    a: float
    timings: dict[str, Any]
    _origin: Provenance

    @property
    def box(self) -> Box:
        """Grid, size, ranks and batch."""
        return self.displacement.box

    @property
    def halo(self) -> int:
        """That the evolution had [particle spacings]; of a state by LPT, what one would have."""
        return self._origin.halo

    @functools.cached_property
    def white_noise(self) -> Field:
        """The unit normal noise that the universe came from; drawn again from the seed.

        Raises:
            ValueError: it came from given particles.
        """
        origin = self._origin
        if origin.noise is not None:
            return Field(origin.noise, self.box)
        if origin.seed is None:
            raise ValueError("this universe came from given particles: its noise is not known")
        return Field(origin.pipeline.noise(origin.paired)(origin.seed), self.box)

    @functools.cached_property
    def linear_delta(self) -> Field:
        """Linear overdensity of the initial conditions, extrapolated to a = 1 [1].

        Raises:
            ValueError: as for `white_noise`.
        """
        origin = self._origin
        return Field(
            origin.pipeline.linear_delta(self.white_noise.block, origin.universes), self.box
        )

    def density(
        self,
        mesh_factor: int = 1,
        *,
        redshift_space: Literal["x", "y", "z"] | None = None,
        shift: float = 0.0,
        weights: tf.Tensor | None = None,
    ) -> Field:
        """Cloud-in-cell density, mean 1.

        Args:
            mesh_factor: mesh cells per particle spacing.
            redshift_space: the line of sight, along which peculiar velocities move the particles.
            shift: of all particles along each axis [mesh cells]; 0.5 for the second density of an
                interlaced spectrum.
            weights: of the particles, block [..., x, y, z]; then the mean is theirs.
        """
        if mesh_factor < 1 or mesh_factor != int(mesh_factor):
            raise ValueError(f"mesh_factor {mesh_factor}: a whole number of at least 1 is needed")
        displacement = self.displacement.block
        if redshift_space is not None:
            displacement = self.redshift_space(redshift_space)
        box = self.box.finer(int(mesh_factor))
        if shift:
            displacement += tf.constant([shift * cell for cell in box.cell], box.dtype)
        label = f"density, a = {self.a:.4g}"
        density = self._origin.pipeline.density(
            displacement, weights, halo=self._origin.halo, mesh_factor=int(mesh_factor), label=label
        )
        return Field(density, box)

    @property
    def linear_growth(self) -> tf.Tensor:
        """D1(a) / D1(1), of each universe of this rank, float64 [...]."""
        universes = self._origin.universes
        return universes.stack(universes.of_growths(lambda g: g.d1(self.a) / g.d1(1.0)))

    def redshift_space(self, axis: Literal["x", "y", "z"]) -> tf.Tensor:
        """Displacement to where a distant observer along an axis sees the particles [Mpc/h].

        Returns:
            This rank's block [..., x, y, z, 3].
        """
        if axis not in AXES:
            raise ValueError(f"redshift_space {axis!r} is not one of {', '.join(AXES)}")
        universes = self._origin.universes
        rate = universes.stack(universes.of_growths(lambda g: g.background.e(self.a)))
        return redshift_space(self.displacement.block, self.velocity.block, self.a, rate, axis)
