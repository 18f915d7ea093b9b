"""The time that each phase of a training takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("simulate", "read", "augment", "halo", "compute", "allreduce", "other")
"""Making universes; drawing or reading a batch; turning and shifting it; messages within a replica;
layers and optimiser; messages that add gradients; validation, checkpoints and logs."""


class PhaseClock:
    """Seconds of each phase since the last `lap`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside the context to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def move(self, phase: str, source: str, seconds: float) -> None:
        """Moves seconds that were counted in `source` to `phase`."""
        self.seconds[phase] += seconds
        self.seconds[source] -= seconds

    def lap(self) -> dict[str, float]:
        """Returns the seconds so far, and starts again from zero."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds
