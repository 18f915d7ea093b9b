"""The backward pass from the end of an evolution, see `ReversibleAdjoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.observers import Measured, Moment, Observer, measurements_vjp
from flowpm_dist.evolution.operations import Backward, undo_drift, undo_kick, undo_velocity
from flowpm_dist.evolution.plan import EvolutionPlan, Particles


class BackwardPass:
    """The backward pass from a final state.

    Args:
        nbody: what was evolved.
        plan: the plan of the evolution.
        final: its last state.
        recorded: states before kicks, by the number among the operations.
    """

    def __init__(
        self, nbody: NBody, plan: EvolutionPlan, final: Particles, recorded: dict[int, Particles]
    ) -> None:
        self._nbody, self._plan, self._recorded = nbody, plan, recorded
        self._final, self._kicks = final, plan.kick_numbers
        self._dobserved = [tf.zeros_like(t) for t in plan.observed]
        self._dmeasured: Measured = {}

    def carry(self, dx: tf.Tensor, dv: tf.Tensor, dmeasured: Measured) -> list[tf.Tensor]:
        """Returns the cotangents of start, factors, LPT fields and the observer's inputs.

        Args:
            dx, dv: cotangents of the final state.
            dmeasured: cotangents of the observer's measurements.
        """
        self._dmeasured, lpt = dmeasured, self._plan.lpt
        zeros = [tf.zeros_like(psi) for psi in lpt]
        state = Backward(self._final.displacement, self._final.velocity, dx, dv, zeros)
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
                slopes, reaches = pairs.backward(state, c, lpt, decays=decays)
                self._check(reaches, begin, end)
            else:
                slopes = undo[kind](begin, state, c[..., 0, :])[..., tf.newaxis, :]
            rows.insert(0, slopes)
            end = begin
        return [state.dx, state.dv, tf.concat(rows, axis=-2), *state.dlpt, *self._dobserved]

    def _check(self, reaches: tf.Tensor, begin: int, end: int) -> None:
        moments = [
            (f"in the backward pass of {n}", g) for n, g in self._plan.kicks_from(begin, end)
        ]
        self._nbody.check(reaches, moments)

    def _kick(self, decays: bool, number: int, state: Backward, c: tf.Tensor) -> tf.Tensor:
        recorded, observer, observe = self._recorded.get(number), self._plan.observer, None
        if observer is not None and self._kicks[number] in observer.kicks:
            observe = functools.partial(self._observe, observer, number, c, state)
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
        )

    def _observe(
        self,
        observer: Observer,
        number: int,
        c: tf.Tensor,
        state: Backward,
        field: tf.Tensor,
        after: tf.Tensor,
    ) -> tf.Tensor:
        """Adds the cotangents of measurements; returns the cotangent of the velocity before."""
        recorded, before = self._recorded.get(number), after
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
