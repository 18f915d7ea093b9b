"""The simulation that the sections of a run file ask for."""

from __future__ import annotations

from flowpm_dist.config.sections import BoxSection, EvolutionSection, ModesSection
from flowpm_dist.cosmology import Cosmology
from flowpm_dist.cosmology.time_steps import growth_steps, logarithmic_steps, scale_factor_steps
from flowpm_dist.evolution.integrators import COLA, BullFrog, FastPM
from flowpm_dist.simulation.simulation import Simulation
from meshimpl.process_mesh import MeshShape, ProcessMesh


def configured_simulation(
    cosmology: Cosmology,
    box: BoxSection,
    initial: ModesSection,
    evolution: EvolutionSection,
    *,
    mesh: ProcessMesh | MeshShape,
    halo: int | str = "auto",
    precision: str = "float32",
) -> Simulation:
    """A simulation of a cosmology, otherwise as sections say.

    Args:
        cosmology: its own one; also what steps equal in the growth factor follow.
        box, initial, evolution: sections.
        mesh: the ranks.
        halo: "auto" or a number of cells.
        precision: "float32" or "float64".
    """
    equal = evolution.a_start, evolution.a_stop, evolution.steps
    spacings = {
        "a": lambda: scale_factor_steps(*equal),
        "log a": lambda: logarithmic_steps(*equal),
        "D": lambda: growth_steps(cosmology, *equal),
    }
    schemes = {
        "fastpm": lambda: FastPM(evolution.half_step),
        "bullfrog": BullFrog,
        "cola": lambda: COLA(half_step=evolution.half_step),
    }
    return Simulation(
        cosmology,
        box.grid,
        box.size,
        spacings[evolution.spacing]() if evolution.edges is None else evolution.edges,
        lpt_order=initial.lpt_order,
        integrator=schemes[evolution.integrator](),
        force_gradient=evolution.force_gradient,
        mesh_factor=evolution.mesh_factor,
        deconvolve=evolution.deconvolve,
        noise=initial.noise,
        fixed_amplitude=initial.fixed_amplitude,
        mesh=mesh,
        precision=precision,  # type: ignore[arg-type]
        halo=halo,  # type: ignore[arg-type]
    )
