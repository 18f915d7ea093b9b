"""The evolution of the particles: paint, potential, kick and drift, operation by operation.

Steps of small runs are one graph, see `pairs`. Where something is called after each step, where the
state between two operations is needed, and in large runs, a kick calls the mesh functions of
`Gravity` in turn. Such a run holds one copy of the state, reports progress after each step, and
measures each phase.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

import tensorflow as tf

from flowpm_dist.evolution.observers import Measured, Moment, add_to
from flowpm_dist.evolution.operations import accelerated, drifted, kicked
from flowpm_dist.evolution.pairs import Kept, Kinds, Pairs
from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Evolved, Particles
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import (
    MaxDisplacement,
    assert_finite,
    check_halo,
)
from flowpm_dist.particle_mesh.gravity import Gravity


class NBody:
    """The particles of a box under their gravity.

    Args:
        gravity: the gravity, which holds the particles, the mesh and the halo.
        max_displacement: the box's `MaxDisplacement`; a new one if None.
    """

    def __init__(self, gravity: Gravity, max_displacement: MaxDisplacement | None = None) -> None:
        self.gravity = gravity
        self.box: Box = gravity.pm.box
        self.max_displacement = max_displacement or MaxDisplacement(self.box)
        self._compiled: set[Hashable] = set()

    def painted(
        self,
        displacement: tf.Tensor,
        label: str,
        growth: float = 1.0,
        weights: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the particles' weight in each cell of the mesh; checks the halo."""
        if weights is None:
            painted, reach = self.gravity.paint(displacement)
        else:
            painted, reach = self.gravity.paint_weighted(displacement, weights)
        self.check(reach[tf.newaxis], [(label, growth)])
        return painted

    def density(
        self, displacement: tf.Tensor, label: str = "density", weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the density of the mesh [..., x, y, z], mean 1, after checking the halo."""
        painted = self.painted(displacement, label, weights=weights)
        pm = self.gravity.pm
        return painted * pm.cells_per_particle if pm.mesh_factor > 1 else painted

    def compile(self, plan: EvolutionPlan, x: tf.Tensor, v: tf.Tensor, watched: bool) -> bool:
        """Makes a kick as a plan makes its steps, if none was made so before; returns whether.

        Args:
            plan: what will be done.
            x, v: displacement and velocity at its start, blocks [..., x, y, z, 3].
            watched: whether it will be differentiated, which takes single operations.

        Raises:
            HaloError, FloatingPointError: on every rank.
        """
        if not plan.operations:
            return False
        pairs, factors = self.pairs_of(plan), tf.cast(plan.factors[..., :2, :], self.box.dtype)
        together = not watched and bool(self.blocks(plan, ()))
        kind = pairs if together else None
        if kind in self._compiled:
            return False
        c, lpt = tf.stop_gradient(tf.zeros_like(factors)), [tf.stop_gradient(t) for t in plan.lpt]
        if together:
            _, _, reaches = pairs.forward(x, v, c, lpt)
        else:
            _, reach = kicked(self.gravity, x, v, c[..., 0, :], lpt)
            reaches = reach[tf.newaxis]
        self.check(reaches, [(f"start of the evolution, {plan.label(0)}", 1.0)])
        self._compiled.add(kind)
        return True

    def pairs_of(self, plan: EvolutionPlan) -> Pairs:
        """Returns the pairs of operations that a plan repeats."""
        order: Kinds = ("kick", "drift") if plan.ends_with_drift else ("drift", "kick")
        return Pairs(self.gravity, order, len(plan.lpt))

    def blocks(
        self, plan: EvolutionPlan, alone: Collection[int], *, back: bool = False
    ) -> dict[int, int]:
        """Returns the operations of a plan that are pairs of one call, see `EvolutionPlan.blocks`.

        They are the same on all ranks. Observers may measure at other kicks on other ranks.

        Args:
            plan, alone: as there.
            back: for the backward pass, in which nothing is called after a step.
        """
        reported = plan.is_reported or plan.progress is not None or plan.after_step is not None
        observed = plan.observer is not None and self.box.mesh.size > 1
        if observed or (reported and not back):
            return {}
        return plan.blocks(self.pairs_of(plan), alone)

    def evolve(
        self,
        particles: list[Particles],
        plan: EvolutionPlan,
        clock: Clock,
        *,
        fused: bool = True,
        keep: Mapping[int, Callable[[Particles], None]] | None = None,
        kept: Kept | None = None,
    ) -> Evolved:
        """Carries the particles through the operations of a plan.

        Args:
            particles: one, at the start; taken out of the list, so that the first state is not
                kept while others follow.
            plan: what to do.
            clock: gets an entry a step.
            fused: read and kick in one kernel, which plain differentiation cannot handle.
            keep: called before the kicks of these numbers among the operations, with the state.
            kept: gets what kicks can keep for their adjoint; None if they keep nothing.

        Raises:
            HaloError, FloatingPointError: on every rank, naming the step.
        """
        state = particles.pop()
        x, v = state.displacement, state.velocity
        del state
        factors, keep = tf.cast(plan.factors, self.box.dtype), keep or {}
        kicks, pairs = plan.kick_numbers, self.pairs_of(plan)
        observed_kicks = frozenset() if plan.observer is None else plan.observer.kicks
        measured: Measured = dict(plan.measured)
        blocks = self.blocks(plan, keep) if fused else {}
        number = 0
        while (begin := number) < len(plan.operations):
            operation, c = plan.operations[begin], factors[..., begin, :]
            number = blocks.get(begin, begin + 1)
            fields = None if kept is None else kept.setdefault((begin, number), [])
            if begin in blocks:
                x, v, reaches = pairs.forward(x, v, factors[..., begin:number, :], plan.lpt, fields)
                self.check(reaches, plan.kicks_from(begin, number))
            elif operation.kind == "drift":
                drift = functools.partial(drifted, fused=fused)
                x = clock.measure("update", drift, x, v, c, plan.lpt)
            elif operation.kind == "velocity":
                v = clock.measure("update", accelerated, v, c, plan.lpt)
            else:
                if begin in keep:
                    keep[begin](Particles(x, v))
                before = v if kicks[begin] in observed_kicks else None
                v, reach = kicked(
                    self.gravity, x, v, c, plan.lpt, fused=fused, measure=clock.measure, kept=fields
                )
                self.check(reach[tf.newaxis], plan.kicks_from(begin, number))
                if before is not None:
                    _observe(Moment(x, before, v, plan.lpt), kicks[begin], plan, clock, measured)
                del before
            _end_steps(begin, number, Particles(x, v), plan, clock, measured)
        if plan.ends_with_drift:  # each other drift is checked by the paint after it
            self.max_displacement.check_finite(x, plan.label(-1))
        return Evolved(Particles(x, v), measured)

    def check(self, reaches: tf.Tensor, moments: Iterable[tuple[str, float]]) -> None:
        """Checks the reach of the particles at moments that follow each other.

        In a graph it adds an assertion: there the rank is alone, and has no halo.

        Args:
            reaches: [moments or more, 3], see `cloud_in_cell.paint`.
            moments: label and growth of each, see `check_halo`.

        Raises:
            HaloError, FloatingPointError: on every rank, naming the first moment that is wrong.
        """
        if not tf.executing_eagerly():
            labels = [label for label, _ in moments]
            about = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
            assert_finite(reaches, about)
            return
        for reach, (label, growth) in zip(reaches.numpy(), moments, strict=False):
            check_halo(self.max_displacement.of(reach), self.gravity.pm.halo, label, growth)


def _observe(
    moment: Moment, kick: int, plan: EvolutionPlan, clock: Clock, measured: Measured
) -> None:
    """Adds the observer's measurements at a kick to those so far."""
    assert plan.observer is not None
    for measurement in plan.observer.measurements(kick):
        add_to(measured, clock.measure("observe", measurement, moment, plan.observed))


def _end_steps(
    begin: int,
    done: int,
    particles: Particles,
    plan: EvolutionPlan,
    clock: Clock,
    measured: Measured,
) -> None:
    """Ends the steps that some operations end, and calls the plan's callbacks for the last."""
    ended = [operation for operation in plan.operations[begin:done] if operation.ends_step]
    clock.end_steps(ended, plan.steps)
    if ended and plan.progress is not None:
        plan.progress(ended[-1].step, plan.steps, ended[-1].a, clock.steps[-1])
    if ended and plan.after_step is not None:
        plan.after_step(done, ended[-1], particles, dict(measured))
