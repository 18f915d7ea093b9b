"""Time integration schemes; each is a file of its own that provides a list of `Step`s."""

from flowpm_dist.integrators.base import Integrator, Step
from flowpm_dist.integrators.fastpm import FastPM

INTEGRATORS: dict[str, type[Integrator]] = {"fastpm": FastPM}
"""Name in a configuration -> scheme."""

__all__ = ["INTEGRATORS", "FastPM", "Integrator", "Step"]
