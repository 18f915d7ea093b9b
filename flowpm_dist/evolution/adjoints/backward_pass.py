"""The backward pass from the end of an evolution, see `ReversibleAdjoint`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.observers import Measured, Moment, Observer, measurements_vjp
from flowpm_dist.evolution.operations import Backward, undo_drift, undo_kick, undo_velocity
from flowpm_dist.evolution.pairs import Kept, Pairs
from flowpm_dist.evolution.plan import EvolutionPlan, Particles
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError


class BackwardPass:
    """The backward pass from a final state.

    Args:
        nbody: what was evolved.
        plan: the plan of the evolution.
        state: its last state, with cotangents; changed.
        dmeasured: the cotangents of the observer's measurements.
        recorded: states before kicks, by the number among the operations; each is taken out when
            the pass continues from it.
        kept: what kicks kept; empty if they kept nothing.
    """

    def __init__(
        self,
        nbody: NBody,
        plan: EvolutionPlan,
        state: Backward,
        dmeasured: Measured,
        recorded: dict[int, Particles],
        kept: Kept,
    ) -> None:
        self._nbody, self._plan, self._recorded, self._kept = nbody, plan, recorded, kept
        self._state, self._kicks = state, plan.kick_numbers
        self._dobserved = [tf.zeros_like(t) for t in plan.observed]
        self._dmeasured = dmeasured

    def carry(self) -> list[tf.Tensor]:
        """Returns the cotangents of start, factors, LPT fields and the observer's inputs.

        It can be called once.
        """
        lpt, state = self._plan.lpt, self._state
        factors = tf.cast(self._plan.factors, self._nbody.box.dtype)
        decays = bool((self._plan.known_factors[..., list(self._kicks), 0] != 1).any())
        pairs = self._nbody.pairs_of(self._plan)
        blocks = self._nbody.blocks(self._plan, self._recorded, back=True)
        ends = {end: begin for begin, end in blocks.items()}
        undo: dict[str, Callable[[int, Backward, tf.Tensor], tf.Tensor]] = {
            "drift": lambda _, state, c: undo_drift(state, c, lpt),
            "velocity": lambda _, state, c: undo_velocity(state, c, lpt),
            "kick": functools.partial(self._kick, decays),
        }
        rows: list[tf.Tensor] = []
        end = len(self._plan.operations)
        while end > 0:
            begin = ends.get(end, end - 1)
            kind, c = self._plan.operations[begin].kind, factors[..., begin:end, :]
            if end in ends:
                fields = self._kept_of_pairs(pairs, begin, end)
                slopes, reaches = pairs.backward(state, c, lpt, decays=decays, kept=fields)
                if not fields:
                    self._check(reaches, begin, end)
            else:
                slopes = undo[kind](begin, state, c[..., 0, :])[..., tf.newaxis, :]
            rows.insert(0, slopes)
            end = begin
        self._check_inside(state, self._plan.label(0))
        return [state.dx, state.dv, tf.concat(rows, axis=-2), *state.dlpt, *self._dobserved]

    def _kept_of_pairs(self, pairs: Pairs, begin: int, end: int) -> Sequence[tf.Tensor]:
        """Returns what pairs kept; they may have been single operations in the forward pass."""
        if (begin, end) in self._kept or not self._kept:
            return self._kept.get((begin, end), [])
        return pairs.lists([self._kept[n, n + 1] for n in range(begin, end) if n in self._kicks])

    def _check_inside(self, state: Backward, label: str) -> None:
        """Checks that no particle was beyond the halo in a kick with a kept field.

        Such a kick sets its velocity to NaN.

        Raises:
            HaloError: one did; on every rank.
        """
        largest, halo = self._nbody.max_displacement, self._nbody.gravity.pm.halo
        if self._kept and largest.is_bounded and not math.isfinite(largest(state.v)):
            raise HaloError(
                f"in the backward pass to {label}: a particle left the halo of {halo}; "
                f"halo = {halo + 1} would do",
                halo + 1,
            )

    def _check(self, reaches: tf.Tensor, begin: int, end: int) -> None:
        moments = [
            (f"in the backward pass of {n}", g) for n, g in self._plan.kicks_from(begin, end)
        ]
        self._nbody.check(reaches, moments)

    def _kick(self, decays: bool, number: int, state: Backward, c: tf.Tensor) -> tf.Tensor:
        recorded, observer, observe = self._recorded.pop(number, None), self._plan.observer, None
        if recorded is not None:  # a state in which nothing is NaN takes the place of this one
            self._check_inside(state, self._plan.label(number))
        if observer is not None and self._kicks[number] in observer.kicks:
            observe = functools.partial(self._observe, observer, number, c, state, recorded)
        before = None if recorded is None else (recorded.displacement, recorded.velocity)
        return undo_kick(
            self._nbody.gravity,
            state,
            c,
            self._plan.lpt,
            decays=decays,
            check=lambda reach: self._check(reach[tf.newaxis], number, number + 1),
            before=before,
            observe=observe,
            kept=self._kept.get((number, number + 1), ()),
        )

    def _observe(
        self,
        observer: Observer,
        number: int,
        c: tf.Tensor,
        state: Backward,
        recorded: Particles | None,
        field: tf.Tensor,
        after: tf.Tensor,
    ) -> tf.Tensor:
        """Adds the cotangents of measurements; returns the cotangent of the velocity before."""
        before = after
        if observer.needs_before:
            before = self._before(field, state, c) if recorded is None else recorded.velocity
        moment = Moment(state.x, before, after, self._plan.lpt)
        slopes, of_inputs = measurements_vjp(
            observer, self._kicks[number], moment, self._plan.observed, self._dmeasured
        )
        for i, slope in enumerate(of_inputs):
            if slope is not None:
                self._dobserved[i] += slope
        for i, slope in enumerate(slopes.lpt):
            state.dlpt[i] += slope
        state.dx, state.dv = state.dx + slopes.displacement, state.dv + slopes.after
        return slopes.before

    def _before(self, field: tf.Tensor, state: Backward, c: tf.Tensor) -> tf.Tensor:
        """Returns the velocity before a kick from the velocity after it, given the field."""
        undone = tf.stack([1.0 / c[..., 0], -c[..., 1] / c[..., 0]], axis=-1)
        return self._nbody.gravity.kick(field, state.x, state.v, undone)
