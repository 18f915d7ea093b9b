"""The evolution of the particles: paint, potential, kick and drift, operation by operation.

A kick calls the mesh functions of `Gravity` in turn. A run of any number of steps therefore holds
one copy of the state, reports progress after each step, and measures each phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.observers import Measured, Moment, Observer, add_to
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import (
    MaxDisplacement,
    check_finite,
    check_halo,
)
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.operations.local import sum_of_products

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
        steps: their number.
        growth: of linear displacements from scale factor a to the end, see `check_halo`.
        progress: called after each step.
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
    steps: int = 1
    growth: Callable[[float], float] = lambda a: 1.0
    progress: StepCallback | None = None
    observer: Observer | None = None
    observed: tuple[tf.Tensor, ...] = ()
    kicks_before: int = 0
    after_step: Callable[[int, Operation, Particles, Measured], None] | None = None
    measured: Measured = field(default_factory=dict)

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
        for seconds in self.phases.values():
            seconds.append(0.0)

    def measure(self, phase: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function and adds the time it took to a phase."""
        begin = time.perf_counter()
        with tf.profiler.experimental.Trace(f"phase:{phase}"):  # for `profiling`
            result = function(*args)
        if phase not in self.phases:  # one that not every run has
            self.phases[phase] = [0.0] * len(self.phases[PHASES[0]])
        self.phases[phase][-1] += time.perf_counter() - begin
        return result


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


class NBody:
    """The particles of a box under their gravity.

    Args:
        gravity: the gravity, which holds the particles, the mesh and the halo.
        max_displacement: the box's `MaxDisplacement`; a new one if None.

    Attributes:
        is_compiled: whether the functions of a step are lowered and compiled.
    """

    def __init__(self, gravity: Gravity, max_displacement: MaxDisplacement | None = None) -> None:
        self.gravity = gravity
        self.box: Box = gravity.pm.box
        self.max_displacement = max_displacement or MaxDisplacement(self.box)
        self.is_compiled = False

    def painted(
        self,
        displacement: tf.Tensor,
        label: str,
        growth: float = 1.0,
        weights: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the particles' weight in each cell of the mesh; checks the halo."""
        if weights is None:
            painted, along = self.gravity.paint(displacement)
        else:
            painted, along = self.gravity.paint_weighted(displacement, weights)
        check_halo(self.max_displacement.of(along), self.gravity.pm.halo, label, growth)
        return painted

    def density(
        self, displacement: tf.Tensor, label: str = "density", weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the density of the mesh [..., x, y, z], mean 1, after checking the halo."""
        painted = self.painted(displacement, label, weights=weights)
        pm = self.gravity.pm
        return painted * pm.cells_per_particle if pm.mesh_factor > 1 else painted

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
            fused: read and kick in one kernel, which plain differentiation cannot handle.
            keep: called before each kick with its number among the operations, and the state.

        Raises:
            HaloError, FloatingPointError: on every rank, naming the step.
        """
        state = particles.pop()
        x, v = state.displacement, state.velocity
        del state
        factors = tf.cast(plan.factors, self.box.dtype)
        kick = self.gravity.kick if fused else self._read_and_kick
        kicks = plan.kick_numbers
        observed_kicks = frozenset() if plan.observer is None else plan.observer.kicks
        measured: Measured = dict(plan.measured)
        begin = time.perf_counter()
        unpainted = False
        for number, operation in enumerate(plan.operations):
            c = factors[..., number, :]
            if operation.kind == "drift":
                unpainted = True
                x = clock.measure("update", _drift, x, v, c, plan.lpt, fused)
            elif operation.kind == "velocity":
                without_force = tf.concat([c[..., :1], c[..., 2:4]], axis=-1)
                v = clock.measure("update", combine, [v, *plan.lpt], without_force)
            else:
                if keep is not None:
                    keep(number, Particles(x, v))
                field = self._field(x, operation, c, plan, clock)
                unpainted = False
                before = v if kicks[number] in observed_kicks else None
                v = clock.measure("read", kick, field, x, v, c[..., :2])
                del field
                if plan.lpt:
                    lpt_only = tf.concat([tf.ones_like(c[..., :1]), c[..., 2:4]], axis=-1)
                    v = clock.measure("update", combine, [v, *plan.lpt], lpt_only)
                if before is not None:
                    _observe(Moment(x, before, v, plan.lpt), kicks[number], plan, clock, measured)
                del before
            if operation.ends_step:
                clock.steps.append(time.perf_counter() - begin)
                _report(number, Particles(x, v), plan, clock, measured)
                begin = time.perf_counter()
                if operation.step < plan.steps:
                    clock.start_step()
        if unpainted:  # each other drift is checked by the paint after it
            check_finite(self.max_displacement(x), _label(operation, plan))
        return Evolved(Particles(x, v), measured)

    def _field(
        self, x: tf.Tensor, operation: Operation, c: tf.Tensor, plan: EvolutionPlan, clock: Clock
    ) -> tf.Tensor:
        """Returns the field that a kick reads, for particles with displacement x."""
        label, growth = _label(operation, plan), plan.growth(operation.a)
        painted = clock.measure("paint", self.painted, x, label, growth)
        return clock.measure("force", self.gravity.field, painted, *coefficients_in(c))

    def _read_and_kick(
        self, field: tf.Tensor, x: tf.Tensor, v: tf.Tensor, factors: tf.Tensor
    ) -> tf.Tensor:
        return combine([v, self.gravity.force(field, x)], factors)


def _observe(
    moment: Moment, kick: int, plan: EvolutionPlan, clock: Clock, measured: Measured
) -> None:
    """Adds the observer's measurements at a kick to those so far."""
    assert plan.observer is not None
    for measurement in plan.observer.measurements(kick):
        add_to(measured, clock.measure("observe", measurement, moment, plan.observed))


def _report(
    number: int, particles: Particles, plan: EvolutionPlan, clock: Clock, measured: Measured
) -> None:
    """Calls the plan's callbacks after operation `number`, which ends a step."""
    operation = plan.operations[number]
    if plan.progress is not None:
        plan.progress(operation.step, plan.steps, operation.a, clock.steps[-1])
    if plan.after_step is not None:
        plan.after_step(number + 1, operation, particles, dict(measured))


def _label(operation: Operation, plan: EvolutionPlan) -> str:
    return f"step {operation.step} of {plan.steps}, a = {operation.a:.4g}"


def _drift(
    x: tf.Tensor, v: tf.Tensor, c: tf.Tensor, lpt: tuple[tf.Tensor, ...], fused: bool
) -> tf.Tensor:
    if fused and not lpt:
        return drift(x, v, c[..., 1])
    ones = tf.ones_like(c[..., :1])
    return combine([x, v, *lpt], tf.concat([ones, c[..., 1 : 2 + len(lpt)]], axis=-1))
