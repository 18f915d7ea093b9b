"""The plan of an evolution, its states, its result and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.evolution.integrators import Operation
from flowpm_dist.evolution.observers import Measured, Observer
from flowpm_dist.evolution.pairs import Pairs

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
        numbers: the factors as numbers. In a graph, the factors of a similar one; None if the
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

        A kick with which drift-kick pairs begin is a pair without its drift, see `Pairs.forward`.
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
        kinds = tuple(operation.kind for operation in self.operations)
        while begin < len(kinds):
            half = begin == end and pairs.kinds[1] == kinds[end] == "kick"
            wanted = pairs.kinds[1:] if half else pairs.kinds
            after = end + len(wanted)
            matches = kinds[end:after] == wanted and not {*range(end, after)} & apart
            if matches and after - begin <= longest:
                end = after
                continue
            if end - begin > 2:
                blocks[begin] = end
            begin = end = max(end, begin + 1)
        return blocks

    @property
    def ends_with_drift(self) -> bool:
        """Whether the last operation but those on the velocity is a drift."""
        kinds = [operation.kind for operation in self.operations if operation.kind != "velocity"]
        return kinds[-1:] == ["drift"]

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
