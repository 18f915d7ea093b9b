"""Time integration schemes, one a file; a new scheme derives from `Integrator`."""

from flowpm_dist.evolution.integrators.base import (
    INTEGRATORS,
    Integrator,
    Interpolation,
    Operation,
    Schedule,
    drift_kick_drift,
    kick_drift_kick,
    name_of,
    rows,
)
from flowpm_dist.evolution.integrators.bullfrog import BullFrog
from flowpm_dist.evolution.integrators.cola import COLA
from flowpm_dist.evolution.integrators.fastpm import FastPM

INTEGRATORS.update({"fastpm": FastPM, "bullfrog": BullFrog, "cola": COLA})

__all__ = [
    "COLA",
    "INTEGRATORS",
    "BullFrog",
    "FastPM",
    "Integrator",
    "Interpolation",
    "Operation",
    "Schedule",
    "drift_kick_drift",
    "kick_drift_kick",
    "name_of",
    "rows",
]
