"""The backward pass from the end of an evolution, see `ReversibleAdjoint`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.nbody import (
    EvolutionPlan,
    NBody,
    Particles,
    broadcast_per_universe,
    coefficients_in,
    combine,
)
from flowpm_dist.evolution.observers import Measured, Moment, Observer, measurements_vjp
from flowpm_dist.particle_mesh.kernels import kernels


class BackwardPass:
    """The backward pass from a final state."""

    def __init__(
        self, nbody: NBody, plan: EvolutionPlan, final: Particles, recorded: dict[int, Particles]
    ) -> None:
        self._nbody, self._plan, self._recorded = nbody, plan, recorded
        self._x, self._v = final.displacement, final.velocity
        self._dlpt = [tf.zeros_like(psi) for psi in plan.lpt]
        self._kicks = plan.kick_numbers
        self._dobserved = [tf.zeros_like(t) for t in plan.observed]
        self._dmeasured: Measured = {}

    def carry(self, dx: tf.Tensor, dv: tf.Tensor, dmeasured: Measured) -> list[tf.Tensor]:
        """Returns the cotangents of start, factors, LPT fields and the observer's inputs.

        Args:
            dx, dv: cotangents of the final state.
            dmeasured: cotangents of the observer's measurements.
        """
        self._dmeasured = dmeasured
        undo = {"drift": self._drift, "velocity": self._velocity, "kick": self._kick}
        rows: list[tf.Tensor] = []
        factors = tf.cast(self._plan.factors, self._nbody.box.dtype)
        for number in reversed(range(len(self._plan.operations))):
            operation = self._plan.operations[number]
            c = factors[..., number, :]
            dx, dv, row = undo[operation.kind](number, operation, c, dx, dv)
            rows.insert(0, row)
        return [dx, dv, tf.stack(rows, axis=-2), *self._dlpt, *self._dobserved]

    def _drift(
        self, _: int, __: Operation, c: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        lpt = self._plan.lpt
        shape = [-1, *dx.shape[-4:]]
        x, v, to_x, to_v = (tf.reshape(t, shape) for t in (self._x, self._v, dx, dv))
        factor = tf.reshape(c[..., 1], [-1])
        before, dv_new, slope = kernels().drift_vjp(x, v, to_x, to_v, factor)
        self._x, dv = tf.reshape(before, dx.shape), tf.reshape(dv_new, dx.shape)
        slopes = [tf.reshape(slope, c.shape[:-1])]
        if lpt:
            self._x = combine([self._x, *lpt], _undone(c[..., 2:4]))
            slopes += self._lpt_slopes(dx, c)
        return dx, dv, _row([None, *slopes], c)

    def _velocity(
        self, _: int, __: Operation, c: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        lpt = self._plan.lpt
        if lpt:
            self._v = combine([self._v, *lpt], _undone(c[..., 2:4]))
        slopes = self._lpt_slopes(dv, c)
        self._v = self._v / broadcast_per_universe(c[..., 0])
        decay = _inner(dv, self._v)
        return dx, dv * broadcast_per_universe(c[..., 0]), _row([decay, None, *slopes], c)

    def _kick(
        self, number: int, operation: Operation, c: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        nbody, gravity, lpt = self._nbody, self._nbody.gravity, self._plan.lpt
        after = self._v
        if lpt:
            self._v = combine([self._v, *lpt], _undone(c[..., 2:4]))
        recorded = self._recorded.get(number)
        if recorded is not None:
            self._x = recorded.displacement
        label = f"in the backward pass of step {operation.step}, a = {operation.a:.4g}"
        painted, coefficients = nbody.painted(self._x, label), coefficients_in(c)
        field = gravity.field(painted, *coefficients)
        needed = [*coefficients, painted] if coefficients else []
        del painted
        slope_before = None
        observer, kick = self._plan.observer, self._kicks[number]
        if observer is not None and kick in observer.kicks:
            before = after
            if observer.needs_before:
                before = self._undone_kick(field, c) if recorded is None else recorded.velocity
            moment = Moment(self._x, before, after, lpt)
            slopes_of = self._measurements_vjp(observer, kick, moment)
            dx, dv, slope_before = (
                dx + slopes_of.displacement,
                dv + slopes_of.after,
                slopes_of.before,
            )
            del moment, before, slopes_of
        del after
        slopes = self._lpt_slopes(dv, c)
        decay = c[..., :1] if recorded is None else tf.ones_like(c[..., :1])
        used = tf.concat([decay, c[..., 1:2]], axis=-1)
        self._v, dfield, dx, sums = gravity.kick_adjoint(field, self._x, self._v, dv, dx, used)
        cotangents = gravity.field_adjoint(dfield, *needed)
        dpainted, *of_coefficients = cotangents if needed else [cotangents]
        dx = gravity.paint_adjoint(dpainted, self._x, dx)
        del dpainted, cotangents, needed
        along = sums[..., 0]
        if recorded is not None:
            self._v = recorded.velocity
            along = _inner(dv, self._v)
        if (c[..., 0].numpy() != 1).any():
            dv = dv * broadcast_per_universe(c[..., 0])
        if slope_before is not None:
            dv = dv + slope_before
        return dx, dv, _row([along, sums[..., 1], *slopes], c, *of_coefficients)

    def _undone_kick(self, field: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        """Returns the velocity before a kick from the velocity after it, given the field."""
        undone = tf.stack([1.0 / c[..., 0], -c[..., 1] / c[..., 0]], axis=-1)
        return self._nbody.gravity.kick(field, self._x, self._v, undone)

    def _measurements_vjp(self, observer: Observer, kick: int, moment: Moment) -> Moment:
        """Returns the particles' cotangents at a kick; accumulates the other inputs' cotangents."""
        slopes, of_inputs = measurements_vjp(
            observer, kick, moment, self._plan.observed, self._dmeasured
        )
        for i, slope in enumerate(of_inputs):
            if slope is not None:
                self._dobserved[i] += slope
        for i, slope in enumerate(slopes.lpt):
            self._dlpt[i] += slope
        return slopes

    def _lpt_slopes(self, cotangent: tf.Tensor, c: tf.Tensor) -> list[tf.Tensor]:
        """Returns the cotangents of psi1's and psi2's factors; accumulates their fields' ones."""
        lpt = self._plan.lpt
        for i in range(len(lpt)):
            factors = tf.stack([tf.ones_like(c[..., 0]), c[..., 2 + i]], axis=-1)
            self._dlpt[i] = combine([self._dlpt[i], cotangent], factors)
        return [_inner(cotangent, psi) for psi in lpt]


def _undone(factors: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.ones_like(factors[..., :1]), -factors], axis=-1)


@tf.function(jit_compile=True, autograph=False)
def _inner(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the sum of products over this rank's block of each universe, float64 [...]."""
    axes = list(range(x.shape.rank - 4, x.shape.rank))
    lines = tf.reduce_sum(x * y, axis=axes[2:])
    return tf.reduce_sum(tf.cast(lines, tf.float64), axis=axes[:2])


def _row(
    slopes: Sequence[tf.Tensor | None], c: tf.Tensor, of_coefficients: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns cotangents of an operation's factors, float64, of the shape of c."""
    zero = tf.zeros(c.shape[:-1], tf.float64)
    full = [zero if s is None else tf.cast(s, tf.float64) for s in slopes]
    row = tf.stack([*full, *[zero] * (4 - len(full))], axis=-1)
    if of_coefficients is None:
        of_coefficients = tf.zeros_like(c[..., 4:], tf.float64)
    return tf.concat([row, of_coefficients], axis=-1)
