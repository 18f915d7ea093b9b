"""The plan of a job's simulations, as one object without TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowpm_dist.cosmology.time_steps import StepOptions
from flowpm_dist.evolution.integrators import FastPM, Integrator
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.grid.options import BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.particle_mesh.options import ForceOptions

if TYPE_CHECKING:
    from flowpm_dist.cosmology.parameters import Cosmology
    from flowpm_dist.simulation.simulation import Simulation
    from meshimpl.process_mesh import MeshShape, ProcessMesh


@dataclass(frozen=True)
class SimulationPlan:
    """Everything that defines a simulation, except the cosmology and the ranks.

    Attributes:
        box: the grid, and the size of the box [Mpc/h].
        steps: the time steps.
        initial: what white noise becomes.
        integrator: the time integrator with its options.
        force: the options of the particle mesh.
        run: the halo and the precision.
        adjoint: how a run under a `tf.GradientTape` is differentiated, a name in `ADJOINTS`.
    """

    box: BoxOptions
    steps: StepOptions
    initial: InitialOptions = field(default_factory=InitialOptions)
    integrator: Integrator = field(default_factory=FastPM)
    force: ForceOptions = field(default_factory=ForceOptions)
    run: RunOptions = field(default_factory=RunOptions)
    adjoint: str = "reversible"

    @property
    def a_stop(self) -> float:
        """The scale factor at which the simulation ends [1]."""
        last = self.steps.last
        assert last is not None, "a plan is made of steps that were understood"
        return last

    def simulation(self, cosmology: Cosmology, *, mesh: ProcessMesh | MeshShape) -> Simulation:
        """Returns the simulation of a cosmology.

        Args:
            cosmology: of the simulation; steps that are equal in the growth factor follow it.
            mesh: the ranks.
        """
        from flowpm_dist.simulation.simulation import Simulation

        return Simulation(
            cosmology,
            self.box.grid,
            self.box.size,
            self.steps.edges_of(cosmology),
            integrator=self.integrator,
            mesh=mesh,
            adjoint=self.adjoint,
            **self.initial.part(InitialOptions).model_dump(),
            **self.force.model_dump(),
            **self.run.model_dump(),
        )
