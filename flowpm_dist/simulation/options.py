"""The options of a simulation, whatever its universe and its box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypedDict

from pydantic import Field

from flowpm_dist.evolution.adjoints import (
    ADJOINTS,
    Adjoint,
    AdjointChoice,
    ReversibleAdjoint,
)
from flowpm_dist.evolution.corrections import (
    LPT_ONLY,
    Correction,
    CorrectionChoice,
    ForceCorrection,
    StateCorrection,
)
from flowpm_dist.evolution.integrators import (
    INTEGRATORS,
    FastPM,
    Integrator,
    IntegratorChoice,
)
from flowpm_dist.evolution.options import CorrectedForceOptions, RunOptions
from flowpm_dist.grid.decomposition import PyramidChoice
from flowpm_dist.initial.options import InitialOptions, LptOrder, Noise
from flowpm_dist.options import Problem
from flowpm_dist.particle_mesh.lattice import instability
from flowpm_dist.particle_mesh.options import Exchange, ForceGradient, ForceOptions


class SolverOptions(InitialOptions, CorrectedForceOptions, RunOptions):
    """All options of a simulation: of initial conditions, force and run, and these.

    Attributes:
        integrator: an `Integrator`, or the name of one in `INTEGRATORS`.
        adjoint: how a run under a `tf.GradientTape` is differentiated: an `Adjoint`, or the name of
            one in `ADJOINTS`.
        correction: a `Correction` of the force or of the states that leave a run, "default",
            "default-2", "network", or the path of a file; None for none.
    """

    integrator: IntegratorChoice = Field(
        default_factory=FastPM,
        description=f"an Integrator or one of {', '.join(map(repr, INTEGRATORS))}",
    )
    adjoint: AdjointChoice = Field(
        default_factory=ReversibleAdjoint,
        description=f"an Adjoint or one of {', '.join(map(repr, ADJOINTS))}",
    )
    correction: CorrectionChoice | None = Field(
        default=None,
        description='a Correction, "default", "default-2", "network", or the path of a file',
    )

    @property
    def force_correction(self) -> ForceCorrection | None:
        """What corrects the force of each kick, if anything does."""
        return None if self.correction is None else self.correction.in_force

    @property
    def state_correction(self) -> StateCorrection | None:
        """What corrects the states that leave a run, if anything does."""
        return None if self.correction is None else self.correction.of_states

    @property
    def brought(self) -> frozenset[str]:
        """Names of the options that are what the correction was trained with."""
        if self.correction is None or self.correction.trained is None:
            return frozenset()
        trained = self.correction.trained.force
        return frozenset(name for name, value in trained.items() if getattr(self, name) == value)

    def instability(
        self, cell: Sequence[float], a: tuple[float, float], values: Mapping[str, float | None]
    ) -> str | None:
        """Returns a warning of `lattice.instability`, if there is one.

        Args:
            cell: sides of a cell of the particle lattice [Mpc/h].
            a: the first scale factor above 0 and the last one of the steps.
            values: parameters of the cosmology by name, where they are known.
        """
        sigma8, early = values.get("sigma8"), values.get("A_s")
        if sigma8 is None:  # as in Planck's universe
            sigma8 = 0.82 * math.sqrt((early or 2.1e-9) / 2.1e-9)
        return instability(self.part(ForceOptions), cell, a, sigma8)

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        if self.exchange == "float16" and self.precision == "float64":
            what = 'goes with precision = "float32", not with "float64"'
            yield self.problem("exchange", what)
        yield from self._pyramid_problems()
        if self.integrator.uses_lpt and self.lpt_order < 2:
            name = type(self.integrator).__name__
            yield self.problem("lpt_order", f"{name} follows LPT of order 2; must be 2 or 3")
        if self.correction is not None and self.correction.trained is not None:
            force = dict(self.part(ForceOptions))
            for key, what in self.correction.trained.other_force(**force):
                yield self.problem(key, what)
        state = self.state_correction
        if state is not None and state.of_lpt and self.lpt_order != 2:
            yield self.problem(
                "lpt_order", f"the correction was learned from {LPT_ONLY}; must be 2"
            )

    def _pyramid_problems(self) -> Iterator[Problem]:
        """Yields what a force from two meshes cannot be combined with: kernels of long reach."""
        if self.pyramid == "off":
            return
        if self.force_gradient != "finite-difference":
            yield self.problem("pyramid", 'goes with force_gradient = "finite-difference"')
        if self.deconvolve and (self.pyramid != "1%" or self.mesh_factor != 1):
            yield self.problem(
                "pyramid", 'needs deconvolve = false, unless it is "1%" with mesh_factor 1'
            )
        if self.force_correction is not None:
            yield self.problem("pyramid", "cannot have a correction of the force: leave one out")


class SolverKeys(TypedDict, total=False):
    """The options of `SolverOptions` as keywords of `Simulation`, for editors and type checkers."""

    integrator: Integrator | str
    adjoint: Adjoint | str
    correction: Correction | str | None
    lpt_order: LptOrder
    noise: Noise
    fixed_amplitude: bool
    force_gradient: ForceGradient
    mesh_factor: float
    deconvolve: bool
    exchange: Exchange
    pyramid: PyramidChoice
    halo: Literal["auto"] | int
    precision: Literal["float32", "float64"]
