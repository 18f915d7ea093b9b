"""The operations on the particles of a run, and each of them undone, with cotangents.

They are functions of blocks and factors alone, eager or in a graph, see `integrators.Operation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.operations.local import sum_of_products


def coefficients_in(c: tf.Tensor) -> list[tf.Tensor]:
    """Returns the coefficients of the response among the factors of a kick; none without one."""
    return [c[..., 4:]] if c.shape[-1] > 4 else []


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


def drifted(
    x: tf.Tensor, v: tf.Tensor, c: tf.Tensor, lpt: Sequence[tf.Tensor], *, fused: bool = True
) -> tf.Tensor:
    """Returns the displacement after a drift.

    Args:
        x, v: displacement and the integrator's velocity, blocks [..., x, y, z, 3].
        c: the factors of the operation, [..., 4 or more].
        lpt: psi1 and psi2, blocks [..., x, y, z, 3], where operations use them.
        fused: in one kernel, which plain differentiation cannot handle.
    """
    if fused and not lpt:
        return drift(x, v, c[..., 1])
    ones = tf.ones_like(c[..., :1])
    return combine([x, v, *lpt], tf.concat([ones, c[..., 1 : 2 + len(lpt)]], axis=-1))


def accelerated(v: tf.Tensor, c: tf.Tensor, lpt: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the velocity after an operation "velocity"; arguments as for `drifted`."""
    return combine([v, *lpt], tf.concat([c[..., :1], c[..., 2:4]], axis=-1) if lpt else c[..., :1])


def _plainly(phase: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def kicked(
    gravity: Gravity,
    x: tf.Tensor,
    v: tf.Tensor,
    c: tf.Tensor,
    lpt: Sequence[tf.Tensor],
    *,
    fused: bool = True,
    measure: Callable[..., Any] = _plainly,
    kept: list[tf.Tensor] | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the velocity after a kick, and the particles' reach, see `cloud_in_cell.paint`.

    Args:
        gravity: makes the force.
        x, v, c, lpt, fused: as for `drifted`; `c` ends with the coefficients of a response.
        measure: calls the functions of each phase, such as `Clock.measure`.
        kept: gets what `undo_kick` can use again, see `Gravity.kept_shapes`; None if it keeps
            nothing.
    """
    painted, reach = measure("paint", gravity.paint, x)
    field = measure("force", gravity.field, painted, *coefficients_in(c))
    if kept is not None:
        kept.extend([field, painted][: len(gravity.kept_shapes)])
    del painted
    if fused:
        v = measure("read", gravity.kick, field, x, v, c[..., :2])
    else:
        v = combine([v, measure("read", gravity.force, field, x)], c[..., :2])
    del field
    if lpt:
        lpt_only = tf.concat([tf.ones_like(c[..., :1]), c[..., 2:4]], axis=-1)
        v = measure("update", combine, [v, *lpt], lpt_only)
    return v, reach


@dataclass
class Backward:
    """The state of a backward pass; undoing an operation changes it.

    Attributes:
        x, v: displacement and the integrator's velocity, blocks [..., x, y, z, 3].
        dx, dv: their cotangents.
        dlpt: the cotangents of the LPT fields so far.
    """

    x: tf.Tensor
    v: tf.Tensor
    dx: tf.Tensor
    dv: tf.Tensor
    dlpt: list[tf.Tensor]

    def add_to_lpt(self, cotangent: tf.Tensor, c: tf.Tensor, lpt: Any) -> list[tf.Tensor]:
        """Adds an operation's cotangents of the LPT fields; returns its factors' cotangents."""
        for i in range(len(lpt)):
            factors = tf.stack([tf.ones_like(c[..., 0]), c[..., 2 + i]], axis=-1)
            self.dlpt[i] = combine([self.dlpt[i], cotangent], factors)
        return [inner(cotangent, psi) for psi in lpt]


def undo_drift(state: Backward, c: tf.Tensor, lpt: Sequence[tf.Tensor]) -> tf.Tensor:
    """Undoes a drift; returns the cotangents of its factors, see `row_of`."""
    shape = [-1, *state.dx.shape[-4:]]
    x, v, dx, dv = (tf.reshape(t, shape) for t in (state.x, state.v, state.dx, state.dv))
    before, dv, slope = kernels().drift_vjp(x, v, dx, dv, tf.reshape(c[..., 1], [-1]))
    state.x, state.dv = tf.reshape(before, state.dx.shape), tf.reshape(dv, state.dx.shape)
    slopes = [tf.reshape(slope, c.shape[:-1])]
    if lpt:
        state.x = combine([state.x, *lpt], _undone(c[..., 2:4]))
        slopes += state.add_to_lpt(state.dx, c, lpt)
    return row_of([None, *slopes], c)


def undo_velocity(state: Backward, c: tf.Tensor, lpt: Sequence[tf.Tensor]) -> tf.Tensor:
    """Undoes an operation "velocity"; returns the cotangents of its factors, see `row_of`."""
    if lpt:
        state.v = combine([state.v, *lpt], _undone(c[..., 2:4]))
    slopes = state.add_to_lpt(state.dv, c, lpt)
    state.v = state.v / broadcast_per_universe(c[..., 0])
    decay = inner(state.dv, state.v)
    state.dv = state.dv * broadcast_per_universe(c[..., 0])
    return row_of([decay, None, *slopes], c)


def undo_kick(
    gravity: Gravity,
    state: Backward,
    c: tf.Tensor,
    lpt: Sequence[tf.Tensor],
    *,
    decays: bool,
    check: Callable[[tf.Tensor], None],
    before: tuple[tf.Tensor, tf.Tensor] | None = None,
    observe: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
    kept: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Undoes a kick; returns the cotangents of its factors, see `row_of`.

    Args:
        gravity, lpt: as for `kicked`.
        state: after the kick.
        c: the factors of the kick.
        decays: whether c0 may differ from 1.
        check: called with the particles' reach, if they are painted.
        before: displacement and velocity before the kick, if they were recorded.
        observe: called with the field and the velocity after the kick, once the displacement and
            the velocity without the kick's LPT fields are there. It adds the cotangents of
            measurements, and returns the cotangent of the velocity before the kick.
        kept: what `kicked` kept; without it the particles are painted again.
    """
    after = state.v
    if lpt:
        state.v = combine([state.v, *lpt], _undone(c[..., 2:4]))
    if before is not None:
        state.x = before[0]
    field, needed = _field_of_kick(gravity, state.x, coefficients_in(c), check, kept)
    slope_before = None if observe is None else observe(field, after)
    del after
    slopes = state.add_to_lpt(state.dv, c, lpt)
    decay = c[..., :1] if before is None else tf.ones_like(c[..., :1])
    used = tf.concat([decay, c[..., 1:2]], axis=-1)
    state.v, dfield, dx, sums = gravity.kick_adjoint(
        field, state.x, state.v, state.dv, state.dx, used
    )
    cotangents = gravity.field_adjoint(dfield, *needed)
    dpainted, *of_coefficients = cotangents if needed else [cotangents]
    state.dx = gravity.paint_adjoint(dpainted, state.x, dx)
    del dpainted, cotangents, needed
    along = sums[..., 0]
    if before is not None:
        state.v = before[1]
        along = inner(state.dv, state.v)
    if decays:
        state.dv = state.dv * broadcast_per_universe(c[..., 0])
    if slope_before is not None:
        state.dv = state.dv + slope_before
    return row_of([along, sums[..., 1], *slopes], c, *of_coefficients)


def _field_of_kick(
    gravity: Gravity,
    x: tf.Tensor,
    coefficients: list[tf.Tensor],
    check: Callable[[tf.Tensor], None],
    kept: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the field of a kick, and what its adjoint needs besides a cotangent."""
    if kept:
        field, *painted = kept
    else:
        again, reach = gravity.paint(x)
        check(reach)
        field, painted = gravity.field(again, *coefficients), [again]
    return field, [*coefficients, *painted] if coefficients else []


def _undone(factors: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.ones_like(factors[..., :1]), -factors], axis=-1)


@tf.function(jit_compile=True, autograph=False)
def inner(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the sum of products over this rank's block of each universe, float64 [...]."""
    axes = list(range(x.shape.rank - 4, x.shape.rank))
    lines = tf.reduce_sum(x * y, axis=axes[2:])
    return tf.reduce_sum(tf.cast(lines, tf.float64), axis=axes[:2])


def row_of(
    slopes: Sequence[tf.Tensor | None], c: tf.Tensor, of_coefficients: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns cotangents of an operation's factors, float64, of the shape of c; 0 for None."""
    zero = tf.zeros(c.shape[:-1], tf.float64)
    full = [zero if s is None else tf.cast(s, tf.float64) for s in slopes]
    row = tf.stack([*full, *[zero] * (4 - len(full))], axis=-1)
    if of_coefficients is None:
        of_coefficients = tf.zeros_like(c[..., 4:], tf.float64)
    return tf.concat([row, of_coefficients], axis=-1)
