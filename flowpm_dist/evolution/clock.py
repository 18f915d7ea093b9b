"""The time that each phase of an evolution takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

PHASES = ("paint", "force", "read", "update")


class Clock:
    """Seconds of each phase and of each whole step, in the order of the steps."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.steps: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.start_step()

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
