"""The evolution of the particles: paint, potential, kick and drift, operation by operation.

Each phase is a mesh function of its own, lowered once and called in turn: a run of any number of
steps holds one copy of the state, reports progress after each step, and knows where its time goes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import MaxDisplacement, paint, paint_adjoint
from flowpm_dist.particle_mesh.gravity import FACTORS, Gravity
from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.pointwise import sum_of_products

Progress = Callable[[int, int, float, float], None]
"""Called on every rank after each step: step, number of steps, scale factor, seconds."""

PHASES = ("paint", "force", "read", "update")

HALO_MARGIN = 1.2
"""How much further than linear theory's largest displacement a suggested halo reaches."""


class HaloError(RuntimeError):
    """A particle strayed beyond the halo. Raised on every rank; nothing was lost.

    Attributes:
        needed: halo that should do for the whole run [particle spacings].
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class Clock:
    """Seconds of each phase, step by step."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.start_step()

    def start_step(self) -> None:
        """Begin a new entry of every phase."""
        for seconds in self.phases.values():
            seconds.append(0.0)

    def measure(self, phase: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call, and add the time it took to a phase."""
        begin = time.perf_counter()
        with tf.profiler.experimental.Trace(f"phase:{phase}"):  # for `profiling`
            result = function(*args)
        self.phases[phase][-1] += time.perf_counter() - begin
        return result


def check_reach(reach: float, halo: int, label: str, growth: float = 1.0) -> None:
    """Raise unless particles that stray `reach` cells are all within a halo.

    Args:
        reach: largest displacement [particle spacings].
        halo: [particle spacings].
        label: of this moment of the run, for the message.
        growth: of linear displacements from here to the end of the run, for the halo to suggest.

    Raises:
        FloatingPointError: the displacement is not finite.
        HaloError: names the step, the reach and the halo that would do.
    """
    if not math.isfinite(reach):
        raise FloatingPointError(f"{label}: the displacement has values that are not finite")
    if reach >= halo:
        whole_run = needed_halo(HALO_MARGIN * reach * growth) + 1
        raise HaloError(
            f"{label}: a particle is {reach:.2f} cells from its lattice site, beyond the halo of "
            f"{halo}; halo = {needed_halo(reach)} would do for this step, "
            f"halo = {whole_run} should for the whole run",
            whole_run,
        )


def needed_halo(reach: float) -> int:
    """The smallest halo [particle spacings] for particles that stray up to `reach` cells."""
    return math.floor(reach) + 1


@dataclass(frozen=True)
class Particles:
    """Displacement [Mpc/h] and a velocity, blocks [..., x, y, z, 3].

    The velocity is the canonical one, a^2 dx/dt [Mpc/h H0], where nothing else is said.
    """

    displacement: tf.Tensor
    velocity: tf.Tensor


@dataclass(frozen=True)
class EvolutionPlan:
    """What a run is to carry out.

    Attributes:
        operations: in order.
        factors: of this rank's universes, float64 [..., operations, 4].
        lpt: psi1 and psi2 [Mpc/h], blocks [..., x, y, z, 3], where the operations use them.
        steps: their number.
        growth: of linear displacements from scale factor a to the end, see `check_reach`.
        progress: called after each step.
    """

    operations: Sequence[Operation]
    factors: tf.Tensor
    lpt: tuple[tf.Tensor, ...] = ()
    steps: int = 1
    growth: Callable[[float], float] = lambda a: 1.0
    progress: Progress | None = None


class NBody:
    """The particles of a box under their gravity.

    Args:
        gravity: with the particles, the mesh and the halo.
        reach: of the box, where there is one already.
    """

    def __init__(self, gravity: Gravity, reach: MaxDisplacement | None = None) -> None:
        self.gravity, self.pm = gravity, gravity.pm
        self.box: Box = gravity.pm.box
        self.reach = reach or MaxDisplacement(self.box)
        self.factor_shape = mtf.Shape([*self.box.number_shape.dims, FACTORS])

    @functools.cached_property
    def paint(self) -> MeshFunction:
        """`f(displacement)`: particles in each cell of the mesh, and their reach."""
        return self.box.function(lambda _, s: paint(s, self.pm), displacement=self.box.vector_shape)

    @functools.cached_property
    def paint_weighted(self) -> MeshFunction:
        """`f(displacement, weights)`: as `paint`, of particles with weights [..., x, y, z]."""
        return self.box.function(
            lambda _, s, w: paint(s, self.pm, w),
            displacement=self.box.vector_shape,
            weights=self.box.shape,
        )

    @functools.cached_property
    def field(self) -> MeshFunction:
        """`f(painted)`: what is read, see `Gravity.field`."""
        return self.box.function(lambda _, n: self.gravity.field(n), painted=self.pm.mesh.shape)

    @functools.cached_property
    def field_adjoint(self) -> MeshFunction:
        """`f(cotangent of the field)`: of what was painted."""
        if self.gravity.force_gradient == "finite-difference":
            return self.field  # symmetric
        return self.box.function(
            lambda _, dy: self.gravity.field_adjoint(dy), cotangent=self.gravity.field_shape
        )

    @functools.cached_property
    def force(self) -> MeshFunction:
        """`f(field, displacement)`: see `Gravity.force`."""
        return self.box.function(
            lambda _, f, s: self.gravity.force(f, s),
            field=self.gravity.field_shape,
            displacement=self.box.vector_shape,
        )

    @functools.cached_property
    def kick(self) -> MeshFunction:
        """`f(field, displacement, velocity, factors)`: see `Gravity.kick`."""
        vector = self.box.vector_shape
        return self.box.function(
            lambda _, *inputs: self.gravity.kick(*inputs),
            field=self.gravity.field_shape,
            displacement=vector,
            velocity=vector,
            factors=self.factor_shape,
        )

    @functools.cached_property
    def kick_adjoint(self) -> MeshFunction:
        """`f(field, displacement, velocity, dv, ds, factors)`: see `Gravity.kick_adjoint`."""
        vector = self.box.vector_shape
        return self.box.function(
            lambda _, *inputs: self.gravity.kick_adjoint(*inputs),
            field=self.gravity.field_shape,
            displacement=vector,
            velocity=vector,
            dv=vector,
            ds=vector,
            factors=self.factor_shape,
        )

    @functools.cached_property
    def paint_adjoint(self) -> MeshFunction:
        """`f(cotangent of what was painted, displacement, ds)`: ds and the paint's part."""
        vector = self.box.vector_shape
        return self.box.function(
            lambda _, dy, s, ds: paint_adjoint(dy, [s], self.pm, add=ds)[0],
            cotangent=self.pm.mesh.shape,
            displacement=vector,
            ds=vector,
        )

    def painted(
        self,
        displacement: tf.Tensor,
        label: str,
        growth: float = 1.0,
        weights: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """What is in each cell of the mesh, after checking the halo; see `check_reach`."""
        if weights is None:
            painted, along = self.paint(displacement)
        else:
            painted, along = self.paint_weighted(displacement, weights)
        check_reach(self.reach.of(along), self.pm.halo, label, growth)
        return painted

    def density(
        self, displacement: tf.Tensor, label: str = "density", weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Cloud-in-cell density of the mesh [..., x, y, z], mean 1, after checking the halo."""
        painted = self.painted(displacement, label, weights=weights)
        return painted * self.pm.mesh_factor**3 if self.pm.mesh_factor > 1 else painted

    def evolve(
        self,
        particles: list[Particles],
        course: EvolutionPlan,
        clock: Clock,
        *,
        fused: bool = True,
        keep: Callable[[int, tf.Tensor], None] | None = None,
    ) -> Particles:
        """Carry the particles through the operations of a course.

        Args:
            particles: one, at the start; taken out of the list, so that the first state is not
                kept while others follow.
            course: what to do.
            clock: gets an entry a step.
            fused: read and kick in one kernel, which plain differentiation cannot look into.
            keep: called before each kick with its number and the velocity.

        Raises:
            HaloError, FloatingPointError: on every rank, naming the step.
        """
        state = particles.pop()
        x, v = state.displacement, state.velocity
        del state
        factors = tf.cast(course.factors, self.box.dtype)
        begin = time.perf_counter()
        for number, operation in enumerate(course.operations):
            c = factors[..., number, :]
            if operation.kind == "drift":
                x = clock.measure("update", _drift, x, v, c, course.lpt, fused)
            elif operation.kind == "velocity":
                v = clock.measure("update", combine, [v, *course.lpt], _without_force(c))
            else:
                if keep is not None:
                    keep(number, v)
                label = f"step {operation.step} of {course.steps}, a = {operation.a:.4g}"
                growth = course.growth(operation.a)
                painted = clock.measure("paint", self.painted, x, label, growth)
                field = clock.measure("force", self.field, painted)
                del painted
                v = clock.measure("read", self._kick, field, x, v, c, fused)
                del field
                if course.lpt:
                    v = clock.measure("update", combine, [v, *course.lpt], _lpt_only(c))
            if operation.ends_step:
                if course.progress is not None:
                    now = time.perf_counter()
                    course.progress(operation.step, course.steps, operation.a, now - begin)
                    begin = now
                if operation.step < course.steps:
                    clock.start_step()
        return Particles(x, v)

    def _kick(
        self, field: tf.Tensor, x: tf.Tensor, v: tf.Tensor, c: tf.Tensor, fused: bool
    ) -> tf.Tensor:
        if fused:
            return self.kick(field, x, v, c[..., :2])
        return combine([v, self.force(field, x)], c[..., :2])


def _drift(
    x: tf.Tensor, v: tf.Tensor, c: tf.Tensor, lpt: tuple[tf.Tensor, ...], fused: bool
) -> tf.Tensor:
    if fused and not lpt:
        shape = [-1, *x.shape[-4:]]
        factor = tf.reshape(c[..., 1], [-1])
        moved = kernels().linear(tf.reshape(x, shape), tf.reshape(v, shape), factor)
        return tf.reshape(moved, x.shape)
    ones = tf.ones_like(c[..., :1])
    return combine([x, v, *lpt], tf.concat([ones, c[..., 1 : 2 + len(lpt)]], axis=-1))


def _without_force(c: tf.Tensor) -> tf.Tensor:
    return tf.concat([c[..., :1], c[..., 2:]], axis=-1)


def _lpt_only(c: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.ones_like(c[..., :1]), c[..., 2:]], axis=-1)


@tf.function(jit_compile=True, autograph=False)
def combine(fields: Sequence[tf.Tensor], factors: tf.Tensor) -> tf.Tensor:
    """Sum of factor times field, in one pass.

    Args:
        fields: blocks [..., x, y, z, 3].
        factors: [..., at least as many as fields].
    """
    return sum_of_products(*tf.unstack(factors, axis=-1)[: len(fields)], *fields)


def spread(factor: tf.Tensor) -> tf.Tensor:
    """A number for each universe [...] as a factor of blocks [..., x, y, z, 3]."""
    return factor[..., tf.newaxis, tf.newaxis, tf.newaxis, tf.newaxis]
