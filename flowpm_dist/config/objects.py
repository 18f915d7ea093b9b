"""The simulation that the sections of a run file ask for."""

from __future__ import annotations

from flowpm_dist.config.sections import EvolutionSection
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.grid.options import BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.simulation.simulation import Simulation
from meshimpl.process_mesh import MeshShape, ProcessMesh


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
    chosen = {name: getattr(initial, name) for name in InitialOptions.model_fields}
    return Simulation(
        cosmology,
        box.grid,
        box.size,
        evolution.edges_of(cosmology),
        integrator=evolution.scheme,
        mesh=mesh,
        **chosen,
        **evolution.force.model_dump(),
        **run.model_dump(),
    )
