"""The evolution of the particles: paint, potential, kick and drift, operation by operation.

Each phase is a mesh function, lowered once and called in turn. A run of any number of steps
therefore holds one copy of the state, reports progress after each step, and measures each phase.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from flowpm_dist.evolution.observers import Moment, Seen, add_to
from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Evolved, Particles
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import MaxDisplacement, paint, paint_adjoint
from flowpm_dist.particle_mesh.gravity import FACTORS, Gravity
from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import sum_of_products

HALO_MARGIN = 1.2
"""How much further than linear theory's largest displacement a suggested halo reaches."""


class HaloError(RuntimeError):
    """A particle strayed beyond the halo. Raised on every rank, before any mass is lost.

    Attributes:
        needed: halo that should do for the whole run [particle spacings].
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


def check_finite(reach: float, label: str) -> None:
    """Checks that displacements are finite, from their reach, which is infinite where one is not.

    Args:
        reach: largest displacement, as `MaxDisplacement` gives it.
        label: of this moment of the run, for the message.

    Raises:
        FloatingPointError: one is not.
    """
    if not math.isfinite(reach):
        raise FloatingPointError(f"{label}: the displacement has values that are not finite")


def check_halo(reach: float, halo: int, label: str, growth: float = 1.0) -> None:
    """Checks that particles that stray `reach` cells are all within a halo.

    Args:
        reach: largest displacement [particle spacings].
        halo: [particle spacings].
        label: of this moment of the run, for the message.
        growth: of linear displacements from here to the end of the run, for the halo to suggest.

    Raises:
        FloatingPointError: the displacement is not finite.
        HaloError: names the step, the reach and the halo that would do.
    """
    check_finite(reach, label)
    if reach >= halo:
        whole_run = suggested_halo(reach, growth)
        raise HaloError(
            f"{label}: a particle is {reach:.2f} cells from its lattice site, beyond the halo of "
            f"{halo}; halo = {needed_halo(reach)} would do for this step, "
            f"halo = {whole_run} should for the whole run",
            whole_run,
        )


def needed_halo(reach: float) -> int:
    """Returns the smallest halo [particle spacings] for particles that stray `reach` cells."""
    return math.floor(reach) + 1


def suggested_halo(reach: float, growth: float = 1.0) -> int:
    """Returns a halo [particle spacings] that should do for a whole run.

    Args:
        reach: largest displacement now [particle spacings].
        growth: of linear displacements from now to the end of the run.
    """
    return needed_halo(HALO_MARGIN * reach * growth) + 1


@tf.function(jit_compile=True, autograph=False)
def combine(fields: Sequence[tf.Tensor], factors: tf.Tensor) -> tf.Tensor:
    """Returns the sum of factor times field, in one pass.

    Args:
        fields: blocks [..., x, y, z, 3].
        factors: [..., at least as many as fields].
    """
    return sum_of_products(*tf.unstack(factors, axis=-1)[: len(fields)], *fields)


def drift(x: tf.Tensor, v: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns x + factor v, in one pass of the kernels.

    Args:
        x, v: blocks [..., x, y, z, 3].
        factor: for each universe [...].
    """
    shape = [-1, *x.shape[-4:]]
    moved = kernels().linear(tf.reshape(x, shape), tf.reshape(v, shape), tf.reshape(factor, [-1]))
    return tf.reshape(moved, x.shape)


def broadcast_per_universe(factor: tf.Tensor) -> tf.Tensor:
    """Returns a number for each universe [...] as a factor of blocks [..., x, y, z, 3]."""
    return factor[..., tf.newaxis, tf.newaxis, tf.newaxis, tf.newaxis]


class NBody:
    """The particles of a box under their gravity.

    Args:
        gravity: the gravity, which holds the particles, the mesh and the halo.
        max_displacement: the box's `MaxDisplacement`; a new one if None.
    """

    def __init__(self, gravity: Gravity, max_displacement: MaxDisplacement | None = None) -> None:
        self.gravity, self.pm = gravity, gravity.pm
        self.box: Box = gravity.pm.box
        self.max_displacement = max_displacement or MaxDisplacement(self.box)
        self.factor_shape = mtf.Shape([*self.box.number_shape.dims, FACTORS])

    @functools.cached_property
    def paint(self) -> MeshFunction:
        """The function `f(displacement)`: particles in each cell of the mesh, and their reach."""
        return self.box.function(lambda _, s: paint(s, self.pm), displacement=self.box.vector_shape)

    @functools.cached_property
    def paint_weighted(self) -> MeshFunction:
        """The function `f(displacement, weights)`: `paint` with weights [..., x, y, z]."""
        return self.box.function(
            lambda _, s, w: paint(s, self.pm, w),
            displacement=self.box.vector_shape,
            weights=self.box.shape,
        )

    @functools.cached_property
    def field(self) -> MeshFunction:
        """The function `f(painted)`: the field that is read, see `Gravity.field`."""
        return self.box.function(lambda _, n: self.gravity.field(n), painted=self.pm.mesh.shape)

    @functools.cached_property
    def field_adjoint(self) -> MeshFunction:
        """The function `f(cotangent of the field)`: the cotangent of what was painted."""
        if self.gravity.is_symmetric:
            return self.field
        return self.box.function(
            lambda _, dy: self.gravity.field_adjoint(dy), cotangent=self.gravity.field_shape
        )

    @functools.cached_property
    def force(self) -> MeshFunction:
        """The function `f(field, displacement)`, see `Gravity.force`."""
        return self.box.function(
            lambda _, f, s: self.gravity.force(f, s),
            field=self.gravity.field_shape,
            displacement=self.box.vector_shape,
        )

    @functools.cached_property
    def kick(self) -> MeshFunction:
        """The function `f(field, displacement, velocity, factors)`, see `Gravity.kick`."""
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
        """Returns what is in each cell of the mesh, after checking the halo; see `check_halo`."""
        if weights is None:
            painted, along = self.paint(displacement)
        else:
            painted, along = self.paint_weighted(displacement, weights)
        check_halo(self.max_displacement.of(along), self.pm.halo, label, growth)
        return painted

    def density(
        self, displacement: tf.Tensor, label: str = "density", weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the density of the mesh [..., x, y, z], mean 1, after checking the halo."""
        painted = self.painted(displacement, label, weights=weights)
        return painted * self.pm.mesh_factor**3 if self.pm.mesh_factor > 1 else painted

    def evolve(
        self,
        particles: list[Particles],
        plan: EvolutionPlan,
        clock: Clock,
        *,
        fused: bool = True,
        keep: Callable[[int, Particles], None] | None = None,
    ) -> Evolved:
        """Carries the particles through the operations of a plan.

        Args:
            particles: one, at the start; taken out of the list, so that the first state is not
                kept while others follow.
            plan: what to do.
            clock: gets an entry a step.
            fused: read and kick in one kernel, which plain differentiation cannot look into.
            keep: called before each kick with its number and the state.

        Raises:
            HaloError, FloatingPointError: on every rank, naming the step.
        """
        state = particles.pop()
        x, v = state.displacement, state.velocity
        del state
        factors = tf.cast(plan.factors, self.box.dtype)
        observer, kicks = plan.observer, plan.kick_numbers
        looked_at = frozenset() if observer is None else observer.kicks
        seen: Seen = dict(plan.seen)
        begin = time.perf_counter()
        unpainted = False
        for number, operation in enumerate(plan.operations):
            c = factors[..., number, :]
            if operation.kind == "drift":
                unpainted = True
                x = clock.measure("update", _drift, x, v, c, plan.lpt, fused)
            elif operation.kind == "velocity":
                v = clock.measure("update", combine, [v, *plan.lpt], _without_force(c))
            else:
                if keep is not None:
                    keep(number, Particles(x, v))
                label = f"step {operation.step} of {plan.steps}, a = {operation.a:.4g}"
                growth = plan.growth(operation.a)
                painted = clock.measure("paint", self.painted, x, label, growth)
                field = clock.measure("force", self.field, painted)
                del painted
                unpainted = False
                before = v if kicks[number] in looked_at else None
                v = clock.measure("read", self._kick, field, x, v, c, fused)
                del field
                if plan.lpt:
                    v = clock.measure("update", combine, [v, *plan.lpt], _lpt_only(c))
                if observer is not None and before is not None:
                    moment = Moment(x, before, v, plan.lpt)
                    for look in observer.looks(kicks[number]):
                        add_to(seen, clock.measure("look", look, moment, plan.observed))
                    del moment
                del before
            if operation.ends_step:
                clock.steps.append(time.perf_counter() - begin)
                if plan.progress is not None:
                    plan.progress(operation.step, plan.steps, operation.a, clock.steps[-1])
                if plan.after_step is not None:
                    plan.after_step(number + 1, operation, Particles(x, v), dict(seen))
                begin = time.perf_counter()
                if operation.step < plan.steps:
                    clock.start_step()
        if unpainted:  # each other drift is checked by the paint after it
            label = f"step {operation.step} of {plan.steps}, a = {operation.a:.4g}"
            check_finite(self.max_displacement(x), label)
        return Evolved(Particles(x, v), seen)

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
        return drift(x, v, c[..., 1])
    ones = tf.ones_like(c[..., :1])
    return combine([x, v, *lpt], tf.concat([ones, c[..., 1 : 2 + len(lpt)]], axis=-1))


def _without_force(c: tf.Tensor) -> tf.Tensor:
    return tf.concat([c[..., :1], c[..., 2:]], axis=-1)


def _lpt_only(c: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.ones_like(c[..., :1]), c[..., 2:]], axis=-1)
