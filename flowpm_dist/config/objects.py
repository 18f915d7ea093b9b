"""The simulation that the sections of a run file ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowpm_dist.config.sections import EvolutionSection
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.grid.options import BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.simulation.plan import SimulationPlan

if TYPE_CHECKING:
    from flowpm_dist.cosmology.parameters import Cosmology
    from flowpm_dist.simulation.simulation import Simulation
    from meshimpl.process_mesh import MeshShape, ProcessMesh


def simulation_plan(
    box: BoxOptions, initial: InitialOptions, evolution: EvolutionSection, run: RunOptions
) -> SimulationPlan:
    """Returns the simulation that sections of a run file describe, without its cosmology."""
    return SimulationPlan(
        box=box,
        steps=evolution,
        initial=initial,
        integrator=evolution.scheme,
        force=evolution.force,
        run=run,
    )


def simulation_of(
    cosmology: Cosmology,
    box: BoxOptions,
    initial: InitialOptions,
    evolution: EvolutionSection,
    run: RunOptions,
    *,
    mesh: ProcessMesh | MeshShape,
) -> Simulation:
    """Returns the simulation of a cosmology that the sections of a run file describe.

    Args:
        cosmology: of the simulation; steps equal in the growth factor follow it.
        box, initial, evolution, run: sections.
        mesh: the ranks.
    """
    return simulation_plan(box, initial, evolution, run).simulation(cosmology, mesh=mesh)
