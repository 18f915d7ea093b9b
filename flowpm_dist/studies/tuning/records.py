"""The trials of a tuning that have ended. Nothing here imports optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowpm_dist.studies.process import COMPLETE, FAILED, NO_MEMORY

PRUNED, COLLAPSED, LOST = "pruned", "collapsed", "lost"
"""How a trial ended, besides how its run did."""
COUNTED = (COMPLETE, PRUNED, COLLAPSED, FAILED, NO_MEMORY)
"""How the trials ended that count."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial that has ended.

    Attributes:
        number: number of the trial.
        state: one of `COUNTED`, or `LOST` or "stopped" for one whose values were tried again.
        value: its value; None if it has none. A pruned trial has its best value so far.
        values: the values that it tried, by key.
        seconds: its duration since it was begun or resumed [s].
        folder: name of its folder.
        message: why it is not complete.
    """

    number: int
    state: str
    value: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    folder: str = ""
    message: str = ""
