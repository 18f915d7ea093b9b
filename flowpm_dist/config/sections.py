"""The sections that run files of several kinds share.

The options themselves are declared in the rooms that use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
)

from flowpm_dist.cosmology.time_steps import EQUAL_STEPS, StepOptions
from flowpm_dist.evolution.integrators import INTEGRATORS, Integrator
from flowpm_dist.evolution.options import AdjointOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.options import A_SEED, AnyPath, Options, Seed, either, known
from flowpm_dist.particle_mesh.options import ForceOptions


class InitialSection(InitialOptions):
    """The section [initial]: what the universe starts from."""

    seed: Seed | None = Field(default=None, description=A_SEED)
    white_noise: AnyPath | None = Field(
        default=None, description="a .npy file: real, shaped as box.grid, unit normal in real space"
    )
    paired: bool = Field(default=False, description="true or false")


def _options_of_integrators() -> dict[str, Any]:
    """Returns the fields of all integrators' own options, each None unless it is given."""
    return {
        name: (field.annotation | None, Field(default=None, description=field.description))  # type: ignore[operator]
        for kind in INTEGRATORS.values()
        for name, field in kind.model_fields.items()
    }


if TYPE_CHECKING:

    class IntegratorOptions(Options):
        """The options of all integrators, each None unless it is given."""

else:
    IntegratorOptions = create_model(
        "IntegratorOptions", __base__=Options, **_options_of_integrators()
    )


ROUNDED = ("evolution.exchange",)
"""Goes with a run in float32; the default may stand beside float64."""


class EvolutionSection(StepOptions, IntegratorOptions, ForceOptions):
    """The section [evolution]: time steps, integrator with its own options, and force."""

    integrator: Annotated[str, AfterValidator(known(INTEGRATORS, "integrator"))] = Field(
        default="fastpm", description=either(INTEGRATORS)
    )

    @property
    def scheme(self) -> Integrator:
        """The integrator, with those of its options that are given.

        Raises:
            ValidationError: it does not take one of them.
        """
        kind = INTEGRATORS[self.integrator]
        given = {name: getattr(self, name) for name in kind.model_fields}
        return kind(**{name: value for name, value in given.items() if value is not None})

    @property
    def force(self) -> ForceOptions:
        """The options of the force alone."""
        return self.part(ForceOptions)

    @model_serializer(mode="wrap")
    def _dump_what_has_a_meaning(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The scheme's own options stand with their defaults, those of others not at all."""
        idle = {*IntegratorOptions.model_fields, *(EQUAL_STEPS if self.edges else ())}
        dumped = {name: value for name, value in handler(self).items() if name not in idle}
        return dumped | self.scheme.model_dump()


class DifferentiatedEvolutionSection(EvolutionSection, AdjointOptions):
    """The section [evolution] of a command that takes gradients of the run."""


class ResultsSection(Options):
    """The section [results]: what to measure besides the power spectrum."""

    multipoles: Literal["x", "y", "z"] | None = Field(
        default=None, description='the line of sight of redshift space: "x", "y" or "z"'
    )
