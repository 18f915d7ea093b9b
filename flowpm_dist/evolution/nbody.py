"""The evolution of the particles: paint, potential, kick and drift, operation by operation.

Steps of small runs are one graph, see `pairs`. Where something is called after each step, where the
state between two operations is needed, and in large runs, a kick calls the mesh functions of
`Gravity` in turn. Such a run holds one copy of the state, reports progress after each step, and
measures each phase.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.observers import Measured, Moment, Observer, add_to
from flowpm_dist.evolution.operations import accelerated, drifted, kicked
from flowpm_dist.evolution.pairs import Kinds, Pairs
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import (
    MaxDisplacement,
    assert_finite,
    check_halo,
)
from flowpm_dist.particle_mesh.gravity import Gravity

StepCallback = Callable[[int, int, float, float], None]
"""Called on every rank after each step: step, number of steps, scale factor, seconds."""


@dataclass(frozen=True)
class Particles:
    """Displacement [Mpc/h] and a velocity, blocks [..., x, y, z, 3].

    The velocity is the canonical one, a^2 dx/dt [Mpc/h H0], where nothing else is said.
    """

    displacement: tf.Tensor
    velocity: tf.Tensor


@dataclass(frozen=True)
class MidRun:
    """A run between two of its operations, from which it can continue to the same bits.

    Attributes:
        done: number of operations that are done.
        step: number of steps that are done.
        a: scale factor that the last of them led to.
        particles: their velocity is the integrator's own.
        halo: the halo of the run [particle spacings]; None if it is not chosen yet.
        timings: "steps" and "phases" of the steps that are done, as a `State` has them.
        measured: returns the observers' measurements so far, see `Observer.pack`; on all ranks
            together.
    """

    done: int
    step: int
    a: float
    particles: Particles
    halo: int | None = None
    timings: Mapping[str, Any] = field(default_factory=dict)
    measured: Callable[[], Mapping[str, tf.Tensor]] = dict


@dataclass(frozen=True)
class EvolutionPlan:
    """The plan of an evolution.

    Attributes:
        operations: in order.
        factors: of this rank's universes, float64 [..., operations, 4]. Where the force has a
            response, more columns follow: its coefficients.
        lpt: psi1 and psi2 [Mpc/h], blocks [..., x, y, z, 3], where the operations use them.
        numbers: the factors as numbers. In a graph, those of a similar evolution; None if the
            factors are not symbols.
        steps: their number.
        growth: of linear displacements from scale factor a to the end, see `check_halo`.
        progress: called after each step.
        is_reported: whether something is called after each step, on this rank or another.
        observer: measures the particles during the evolution.
        observed: the tensors that the observer receives for its inputs.
        kicks_before: the number of kicks before this plan, if it continues a run.
        after_step: called after each step and `progress`, on every rank, with the number of
            operations of this plan that are done, the last of them, the state, and the
            observer's measurements so far.
        measured: the observer's measurements before this plan, if it continues a run.
    """

    operations: Sequence[Operation]
    factors: tf.Tensor
    lpt: tuple[tf.Tensor, ...] = ()
    numbers: np.ndarray | None = None
    steps: int = 1
    growth: Callable[[float], float] = lambda a: 1.0
    progress: StepCallback | None = None
    is_reported: bool = False
    observer: Observer | None = None
    observed: tuple[tf.Tensor, ...] = ()
    kicks_before: int = 0
    after_step: Callable[[int, Operation, Particles, Measured], None] | None = None
    measured: Measured = field(default_factory=dict)

    @property
    def known_factors(self) -> np.ndarray:
        """The factors as numbers, float64 [..., operations, 4 or more]; see `numbers`."""
        return self.factors.numpy() if self.numbers is None else self.numbers

    def blocks(self, pairs: Pairs, alone: Collection[int]) -> dict[int, int]:
        """Returns the operations that are pairs of one call: the first and one after the last.

        Observed kicks are not among them.

        Args:
            pairs: the pairs.
            alone: numbers of operations that must not be among them, either.
        """
        observed = frozenset() if self.observer is None else self.observer.kicks
        apart = {number for number, kick in self.kick_numbers.items() if kick in observed}
        apart.update(alone)
        blocks: dict[int, int] = {}
        begin, end, longest = 0, 0, 2 * pairs.most
        while begin < len(self.operations):
            both = self.operations[end : end + 2]
            matches = tuple(operation.kind for operation in both) == pairs.kinds
            if matches and not {end, end + 1} & apart and end - begin < longest:
                end += 2
                continue
            if end - begin > 2:
                blocks[begin] = end
            begin = end = max(end, begin + 1)
        return blocks

    def label(self, number: int) -> str:
        """Returns the step and the scale factor of an operation, for messages."""
        operation = self.operations[number]
        return f"step {operation.step} of {self.steps}, a = {operation.a:.4g}"

    def kicks_from(self, begin: int, end: int) -> list[tuple[str, float]]:
        """Returns label and growth of each kick among operations, see `NBody.check`."""
        return [
            (self.label(number), self.growth(self.operations[number].a))
            for number in range(begin, end)
            if self.operations[number].kind == "kick"
        ]

    @property
    def kick_numbers(self) -> dict[int, int]:
        """Maps the index of each kick among the operations to its index among the kicks."""
        kicks = [n for n, operation in enumerate(self.operations) if operation.kind == "kick"]
        return {number: kick for kick, number in enumerate(kicks, self.kicks_before)}


@dataclass(frozen=True)
class Evolved:
    """The result of an evolution.

    Attributes:
        particles: at its end.
        measured: the measurements of the plan's observer.
    """

    particles: Particles
    measured: Measured = field(default_factory=dict)


PHASES = ("paint", "force", "read", "update")


class Clock:
    """Seconds of each phase and of each whole step, in the order of the steps."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.steps: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.start_step()

    def go_on(self, timings: Mapping[str, Any], *, complete: bool) -> None:
        """Adds the steps of an earlier session, before the steps of this one.

        Args:
            timings: "steps" and "phases" of the earlier session; may be empty.
            complete: whether no step is to come.
        """
        self.steps = [*timings.get("steps", ()), *self.steps]
        for phase, before in timings.get("phases", {}).items():
            now = [] if complete else self.phases.get(phase, [0.0])
            self.phases[phase] = [*before, *now]

    def elapsed(self) -> float:
        """Returns the seconds since the clock was made."""
        return time.perf_counter() - self._begin

    def start_step(self) -> None:
        """Begins a new entry of every phase."""
        self._begin_step = time.perf_counter()
        for seconds in self.phases.values():
            seconds.append(0.0)

    def end_steps(self, last: Sequence[Operation], steps: int) -> None:
        """Ends steps, which have taken equal times, and begins the next one, if any is to come.

        Args:
            last: the last operations of the steps; none if nothing ends.
            steps: the number of steps of the run.
        """
        begin = self._begin_step
        for operation in last:
            self.steps.append((time.perf_counter() - begin) / len(last))
            if operation.step < steps:
                self.start_step()

    def measure(self, phase: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function and adds the time it took to a phase."""
        begin = time.perf_counter()
        with tf.profiler.experimental.Trace(f"phase:{phase}"):  # for `profiling`
            result = function(*args)
        if phase not in self.phases:  # one that not every run has
            self.phases[phase] = [0.0] * len(self.phases[PHASES[0]])
        self.phases[phase][-1] += time.perf_counter() - begin
        return result


class NBody:
    """The particles of a box under their gravity.

    Args:
        gravity: the gravity, which holds the particles, the mesh and the halo.
        max_displacement: the box's `MaxDisplacement`; a new one if None.

    Attributes:
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

    def compile(self, plan: EvolutionPlan, x: tf.Tensor, v: tf.Tensor) -> bool:
        """Makes a kick as a plan makes its steps, if none was made so before; returns whether.

        Args:
            plan: what will be done.
            x, v: displacement and velocity at its start, blocks [..., x, y, z, 3].

        Raises:
            HaloError, FloatingPointError: on every rank.
        """
        pairs, factors = self.pairs_of(plan), tf.cast(plan.factors[..., :2, :], self.box.dtype)
        together = bool(self.blocks(plan, ()))
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
        kinds = [operation.kind for operation in plan.operations if operation.kind != "velocity"]
        order: Kinds = ("drift", "kick") if kinds[-1:] == ["kick"] else ("kick", "drift")
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
    ) -> Evolved:
        """Carries the particles through the operations of a plan.

        Pairs of operations are one graph where nothing looks at the state between them.

        Args:
            particles: one, at the start; taken out of the list, so that the first state is not
                kept while others follow.
            plan: what to do.
            clock: gets an entry a step.
            fused: read and kick in one kernel, which plain differentiation cannot handle.
            keep: called before the kicks of these numbers among the operations, with the state.

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
        unpainted, number = False, 0
        while (begin := number) < len(plan.operations):
            operation, c = plan.operations[begin], factors[..., begin, :]
            number = blocks.get(begin, begin + 1)
            if begin in blocks:
                rows = factors[..., begin:number, :]
                x, v, reaches = pairs.forward(x, v, rows, plan.lpt)
                self.check(reaches, plan.kicks_from(begin, number))
                unpainted = pairs.kinds[-1] == "drift"
            elif operation.kind == "drift":
                unpainted = True
                drift = functools.partial(drifted, fused=fused)
                x = clock.measure("update", drift, x, v, c, plan.lpt)
            elif operation.kind == "velocity":
                v = clock.measure("update", accelerated, v, c, plan.lpt)
            else:
                if begin in keep:
                    keep[begin](Particles(x, v))
                unpainted = False
                before = v if kicks[begin] in observed_kicks else None
                v, reach = kicked(
                    self.gravity, x, v, c, plan.lpt, fused=fused, measure=clock.measure
                )
                self.check(reach[tf.newaxis], plan.kicks_from(begin, number))
                if before is not None:
                    _observe(Moment(x, before, v, plan.lpt), kicks[begin], plan, clock, measured)
                del before
            ended = [each for each in plan.operations[begin:number] if each.ends_step]
            clock.end_steps(ended, plan.steps)
            if ended:
                _report(number, ended[-1], Particles(x, v), plan, clock, measured)
        if unpainted:  # each other drift is checked by the paint after it
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


def _report(
    done: int,
    last: Operation,
    particles: Particles,
    plan: EvolutionPlan,
    clock: Clock,
    measured: Measured,
) -> None:
    """Calls the plan's callbacks after `done` operations, the last of which ends a step."""
    if plan.progress is not None:
        plan.progress(last.step, plan.steps, last.a, clock.steps[-1])
    if plan.after_step is not None:
        plan.after_step(done, last, particles, dict(measured))
