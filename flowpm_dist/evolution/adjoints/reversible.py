"""The gradient of an evolution by going back in time: memory flat in the number of steps.

Kicks and drifts are undone one by one from the final state, each force is computed again, and the
cotangents of positions, velocities and factors are carried along. Of the way forward the end is
kept, and a few states from which to go on where rounding errors would have grown too far.
The adjoint method of Li, Modi, Jamieson and others 2022 (arXiv:2211.09815), for any schedule of
kicks and drifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from pydantic import Field

from flowpm_dist.evolution.adjoints.base import Adjoint
from flowpm_dist.evolution.arithmetic import broadcast_per_universe, combine
from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.observers import Moment, Observer, Seen, look_back
from flowpm_dist.evolution.plan import EvolutionPlan, Evolved, Particles
from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.tapes import is_watched, not_recorded, once_differentiable


class ReversibleAdjoint(Adjoint):
    """Undoes the operations from the final state.

    Rounding errors grow on the way back: there the decaying mode of linear theory grows. The state
    before a kick is kept, and taken up on the way back, where they would grow too far. How many
    states these are depends on how far the run goes, not on its number of steps.

    Attributes:
        max_error_growth: how many times the rounding error of the positions, relative to the
            displacements of the moment, may grow between two kept states.
    """

    max_error_growth: float = Field(default=32.0, ge=1, description="a number of at least 1")

    def evolve(
        self, nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock
    ) -> Evolved:
        """See `Adjoint.evolve`."""
        start = particles.pop()
        inputs = [start.displacement, start.velocity, plan.factors, *plan.lpt, *plan.observed]
        terms = len(plan.lpt)
        x, v, factors, *more = (tf.stop_gradient(t) for t in inputs)
        lpt, observed = tuple(more[:terms]), tuple(more[terms:])
        here = replace(plan, factors=factors, lpt=lpt, observed=observed)
        chosen = kicks_to_keep(here, self.max_error_growth)
        kept: dict[int, Particles] = {}

        def keep(number: int, before: Particles) -> None:
            if number in chosen:
                kept[number] = before

        first = [Particles(x, v)]
        del x, v
        # What an observer does is recorded, to find out what else it depends on.
        with not_recorded() if plan.observer is None else nullcontext():
            done = nbody.evolve(first, here, clock, keep=keep)
        final, names = done.particles, list(done.seen)
        if is_watched(list(done.seen.values())):
            raise ValueError(
                "what is seen on the way depends on watched tensors besides the particles and the "
                "cosmology: gradients to those would be lost"
            )

        def carry(*tensors: tf.Tensor) -> list[tf.Tensor]:
            dx, dv, *rest = tensors[: 2 + len(names)]
            back = BackwardPass(nbody, here, final, kept)
            return back.carry(dx, dv, dict(zip(names, rest, strict=True)))

        once = once_differentiable(carry, "an evolution by the adjoint method")

        @tf.custom_gradient
        def run(*inputs: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
            def gradient(*cotangents: tf.Tensor) -> list[tf.Tensor]:
                return once(*cotangents, *inputs)

            return (final.displacement, final.velocity, *done.seen.values()), gradient

        x, v, *seen = run(*inputs)
        return Evolved(Particles(x, v), dict(zip(names, seen, strict=True)))


def kicks_to_keep(plan: EvolutionPlan, max_error_growth: float) -> list[int]:
    """Returns the numbers of the kicks before which the state is to be kept, the last one first.

    Errors are followed back from the end in linear theory, where the force is the displacement, so
    that drifts and kicks are linear in position and velocity. Positions are rounded in proportion
    to the displacement of the moment, 1 / `plan.growth`. That velocities are rounded adds nothing
    larger, as they are sums of kicks.

    Args:
        plan: its factors, of all universes of this rank, and its growth.
        max_error_growth: see `ReversibleAdjoint`.
    """
    factors = np.abs(plan.factors.numpy()).reshape(-1, *plan.factors.shape[-2:])
    kicks = [n for n, operation in enumerate(plan.operations) if operation.kind == "kick"]
    scales = [1.0 / plan.growth(plan.operations[n].a) for n in kicks]

    def undone(x: np.ndarray, v: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the errors before the operations from `begin` to `end`, from those after them."""
        for number in reversed(range(begin, end)):
            c0, c1 = factors[:, number, 0], factors[:, number, 1]
            kind = plan.operations[number].kind
            if kind == "drift":
                x = x + c1 * v
            else:
                v = (v + (c1 * x if kind == "kick" else 0.0)) / c0
        return x, v

    kept: list[int] = []
    if not kicks:
        return kept
    zero = np.zeros(len(factors))
    with np.errstate(divide="ignore", invalid="ignore"):
        x, v = undone(zero + 1.0, zero, kicks[-1] + 1, len(plan.operations))
        for i in reversed(range(len(kicks))):
            earlier = max(i - 1, 0)
            before = undone(x, v, kicks[i - 1] + 1 if i else 0, kicks[i] + 1)
            small = (x <= max_error_growth * scales[i]).all()
            stays_small = (before[0] <= max_error_growth * scales[earlier]).all()
            if not (small and stays_small):
                kept.append(kicks[i])
                before = zero + scales[i], zero
            x, v = before
    return kept


class BackwardPass:
    """The way back in time from a final state."""

    def __init__(
        self, nbody: NBody, plan: EvolutionPlan, final: Particles, kept: dict[int, Particles]
    ) -> None:
        self._nbody, self._plan, self._kept = nbody, plan, kept
        self._x, self._v = final.displacement, final.velocity
        self._dlpt = [tf.zeros_like(psi) for psi in plan.lpt]
        self._kicks = plan.kick_numbers
        self._dobserved = [tf.zeros_like(t) for t in plan.observed]
        self._seen: Seen = {}

    def carry(self, dx: tf.Tensor, dv: tf.Tensor, seen: Seen) -> list[tf.Tensor]:
        """Returns the cotangents of start, factors, LPT fields and the observer's inputs.

        Args:
            dx, dv: cotangents of the final state.
            seen: of what the observer saw.
        """
        self._seen = seen
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
            self._x = combine([self._x, *lpt], _undone(c[..., 2:]))
            slopes += self._lpt_slopes(dx, c)
        return dx, dv, _row([None, *slopes], c)

    def _velocity(
        self, _: int, __: Operation, c: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        lpt = self._plan.lpt
        if lpt:
            self._v = combine([self._v, *lpt], _undone(c[..., 2:]))
        slopes = self._lpt_slopes(dv, c)
        self._v = self._v / broadcast_per_universe(c[..., 0])
        decay = _inner(dv, self._v)
        return dx, dv * broadcast_per_universe(c[..., 0]), _row([decay, None, *slopes], c)

    def _kick(
        self, number: int, operation: Operation, c: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        nbody, lpt = self._nbody, self._plan.lpt
        after = self._v
        if lpt:
            self._v = combine([self._v, *lpt], _undone(c[..., 2:]))
        kept = self._kept.get(number)
        if kept is not None:
            self._x = kept.displacement
        label = f"on the way back through step {operation.step}, a = {operation.a:.4g}"
        field = nbody.field(nbody.painted(self._x, label))
        slope_before = None
        observer, kick = self._plan.observer, self._kicks[number]
        if observer is not None and kick in observer.kicks:
            before = after
            if observer.needs_before:
                before = self._undone_kick(field, c) if kept is None else kept.velocity
            moment = Moment(self._x, before, after, lpt)
            slopes_of = self._look_back(observer, kick, moment)
            dx, dv, slope_before = (
                dx + slopes_of.displacement,
                dv + slopes_of.after,
                slopes_of.before,
            )
            del moment, before, slopes_of
        del after
        slopes = self._lpt_slopes(dv, c)
        decay = c[..., :1] if kept is None else tf.ones_like(c[..., :1])
        used = tf.concat([decay, c[..., 1:2]], axis=-1)
        self._v, dfield, dx, sums = nbody.kick_adjoint(field, self._x, self._v, dv, dx, used)
        dx = nbody.paint_adjoint(nbody.field_adjoint(dfield), self._x, dx)
        along = sums[..., 0]
        if kept is not None:
            self._v = kept.velocity
            along = _inner(dv, self._v)
        if (c[..., 0].numpy() != 1).any():
            dv = dv * broadcast_per_universe(c[..., 0])
        if slope_before is not None:
            dv = dv + slope_before
        return dx, dv, _row([along, sums[..., 1], *slopes], c)

    def _undone_kick(self, field: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        """Returns the velocity before the kick by a field, from the one after it."""
        undone = tf.stack([1.0 / c[..., 0], -c[..., 1] / c[..., 0]], axis=-1)
        return self._nbody.kick(field, self._x, self._v, undone)

    def _look_back(self, observer: Observer, kick: int, moment: Moment) -> Moment:
        """Returns the cotangents of the particles at a kick; those of other inputs are added up."""
        slopes, of_inputs = look_back(observer, kick, moment, self._plan.observed, self._seen)
        for i, slope in enumerate(of_inputs):
            if slope is not None:
                self._dobserved[i] += slope
        for i, slope in enumerate(slopes.lpt):
            self._dlpt[i] += slope
        return slopes

    def _lpt_slopes(self, cotangent: tf.Tensor, c: tf.Tensor) -> list[tf.Tensor]:
        """Returns cotangents of the factors of psi1 and psi2; those of the fields are added up."""
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


def _row(slopes: Sequence[tf.Tensor | None], c: tf.Tensor) -> tf.Tensor:
    """Returns cotangents of an operation's factors, float64 [..., 4]."""
    zero = tf.zeros(c.shape[:-1], tf.float64)
    full = [zero if s is None else tf.cast(s, tf.float64) for s in slopes]
    return tf.stack([*full, *[zero] * (4 - len(full))], axis=-1)
