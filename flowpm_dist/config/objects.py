"""The simulation that the sections of a run file ask for."""

from __future__ import annotations

from flowpm_dist.config.sections import EvolutionSection
from flowpm_dist.cosmology.time_steps import StepOptions
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.grid.options import BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.simulation.plan import SimulationPlan


def simulation_plan(
    box: BoxOptions, initial: InitialOptions, evolution: EvolutionSection, run: RunOptions
) -> SimulationPlan:
    """Returns the simulation that sections of a run file describe, without its cosmology."""
    return SimulationPlan(
        box=box,
        steps=evolution.part(StepOptions),
        initial=initial,
        integrator=evolution.scheme,
        force=evolution.force,
        run=run,
    )
