"""Time integration schemes; each is a file of its own that provides a `Schedule`."""

from flowpm_dist.evolution.integrators.base import Integrator, Operation, Schedule
from flowpm_dist.evolution.integrators.bullfrog import BullFrog
from flowpm_dist.evolution.integrators.cola import COLA
from flowpm_dist.evolution.integrators.fastpm import FastPM

INTEGRATORS: dict[str, type[Integrator]] = {"fastpm": FastPM, "bullfrog": BullFrog, "cola": COLA}
"""Name in a configuration -> scheme."""

__all__ = ["COLA", "INTEGRATORS", "BullFrog", "FastPM", "Integrator", "Operation", "Schedule"]
