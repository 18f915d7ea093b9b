"""The options of a simulation, whatever its universe and its box."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from flowpm_dist.evolution.adjoints import ADJOINTS, AdjointChoice, ReversibleAdjoint
from flowpm_dist.evolution.integrators import INTEGRATORS, FastPM, IntegratorChoice
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.particle_mesh.options import ForceOptions


class SolverOptions(InitialOptions, ForceOptions, RunOptions):
    """All options of a simulation: those of initial conditions, force and run, and these.

    Attributes:
        integrator: an `Integrator`, or the name of one in `INTEGRATORS`.
        adjoint: how a run under a `tf.GradientTape` is differentiated: an `Adjoint`, or the name of
            one in `ADJOINTS`.
    """

    integrator: IntegratorChoice = Field(
        default_factory=FastPM,
        description=f"an Integrator or one of {', '.join(map(repr, INTEGRATORS))}",
    )
    adjoint: AdjointChoice = Field(
        default_factory=ReversibleAdjoint,
        description=f"an Adjoint or one of {', '.join(map(repr, ADJOINTS))}",
    )

    @model_validator(mode="after")
    def _no_rounded_messages_in_float64(self) -> Self:
        if self.exchange == "float16" and self.precision == "float64":
            raise ValueError('exchange "float16" goes with precision "float32", not "float64"')
        return self

    @model_validator(mode="after")
    def _integrator_has_its_lpt_order(self) -> Self:
        if self.integrator.uses_lpt and self.lpt_order < 2:
            raise ValueError(f"lpt_order {self.lpt_order}: this integrator follows LPT of order 2")
        return self
