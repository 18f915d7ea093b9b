"""The particles that an evolution starts from, and the plan of its operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.observers import Observer, Seen

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
        seen: returns what observers have seen so far, see `Observer.pack`; on all ranks together.
    """

    done: int
    step: int
    a: float
    particles: Particles
    halo: int | None = None
    timings: Mapping[str, Any] = field(default_factory=dict)
    seen: Callable[[], Mapping[str, tf.Tensor]] = dict


@dataclass(frozen=True)
class EvolutionPlan:
    """The plan of an evolution.

    Attributes:
        operations: in order.
        factors: of this rank's universes, float64 [..., operations, 4].
        lpt: psi1 and psi2 [Mpc/h], blocks [..., x, y, z, 3], where the operations use them.
        steps: their number.
        growth: of linear displacements from scale factor a to the end, see `check_halo`.
        progress: called after each step.
        observer: looks at the particles during the evolution.
        observed: the tensors that the observer receives for its inputs.
        kicks_before: the number of kicks before this plan, if it continues a run.
        after_step: called after each step and `progress`, on every rank, with the number of
            operations of this plan that are done, the last of them, the state, and what the
            observer has seen.
        seen: what the observer saw before this plan, if it continues a run.
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
    after_step: Callable[[int, Operation, Particles, Seen], None] | None = None
    seen: Seen = field(default_factory=dict)

    @property
    def kick_numbers(self) -> dict[int, int]:
        """The number of each kick among the kicks, by its number among the operations."""
        kicks = [n for n, operation in enumerate(self.operations) if operation.kind == "kick"]
        return {number: kick for kick, number in enumerate(kicks, self.kicks_before)}


@dataclass(frozen=True)
class Evolved:
    """What comes of an evolution.

    Attributes:
        particles: at its end.
        seen: by the plan's observer.
    """

    particles: Particles
    seen: Seen = field(default_factory=dict)


PHASES = ("paint", "force", "read", "update")


class Clock:
    """Seconds of each phase and of each whole step, in the order of the steps."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.steps: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.start_step()

    def go_on(self, timings: Mapping[str, Any], *, complete: bool) -> None:
        """Puts the steps of an earlier session before those to come.

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
