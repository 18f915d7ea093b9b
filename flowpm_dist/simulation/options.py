"""The options of a simulation, whatever its universe and its box."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from flowpm_dist.evolution.adjoints import ADJOINTS, AdjointChoice, ReversibleAdjoint
from flowpm_dist.evolution.integrators import INTEGRATORS, FastPM, IntegratorChoice
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.options import Problem
from flowpm_dist.particle_mesh.options import ForceOptions


class SolverOptions(InitialOptions, ForceOptions, RunOptions):
    """All options of a simulation: of initial conditions, force and run, and these.

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

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        if self.exchange == "float16" and self.precision == "float64":
            what = 'goes with precision = "float32", not with "float64"'
            yield self.problem("exchange", what)
        if self.integrator.uses_lpt and self.lpt_order < 2:
            name = type(self.integrator).__name__
            yield self.problem("lpt_order", f"{name} follows LPT of order 2; must be 2 or 3")
