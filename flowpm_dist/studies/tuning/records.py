"""How the runs of a tuning ended. Nothing here imports optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowpm_dist.studies.process import COMPLETE, FAILED, NO_MEMORY

PRUNED, COLLAPSED, LOST = "pruned", "collapsed", "lost"
"""How a run ended, besides how its process did."""
COUNTED = (COMPLETE, PRUNED, COLLAPSED, FAILED, NO_MEMORY)
"""How the trials ended that count."""


@dataclass(frozen=True)
class JudgedRun:
    """A run that has ended, and the value by which it is judged.

    Attributes:
        state: one of `COUNTED`; "stopped" for a run that is to be continued; `LOST` for a trial
            whose worker died before it had its values.
        value: its value; None if it has none. A pruned trial has its best value so far.
        seconds: its duration since it was begun or resumed [s].
        message: why it is not complete.
    """

    state: str
    value: float | None = None
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class TrialRecord(JudgedRun):
    """A trial that has ended or was stopped.

    Attributes:
        number: number of the trial.
        values: the values that it tried, by key.
        folder: name of its folder.
    """

    number: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
