"""The sections that run files of several kinds share.

The options themselves are declared in the rooms that use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from flowpm_dist.cosmology.time_steps import EQUAL_STEPS, StepOptions
from flowpm_dist.evolution.integrators import INTEGRATORS, Integrator
from flowpm_dist.evolution.options import AdjointOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.options import A_SEED, AnyPath, Options, Seed, nearest
from flowpm_dist.particle_mesh.options import ForceOptions


class InitialSection(InitialOptions):
    """The section [initial]: what the universe starts from."""

    seed: Seed | None = Field(default=None, description=A_SEED)
    white_noise: AnyPath | None = Field(
        default=None, description="a .npy file: real, shaped as box.grid, unit normal in real space"
    )
    paired: bool = Field(default=False, description="true or false")


DEFAULT = "fastpm"


_QUOTED = [f'"{name}"' for name in INTEGRATORS]
_SCHEMES = f"{', '.join(_QUOTED[:-1])} or {_QUOTED[-1]}"


def _known_integrator(name: str) -> str:
    if name not in INTEGRATORS:
        raise ValueError(f"there is no such scheme{nearest(name, INTEGRATORS)}")
    return name


class _Evolution(StepOptions, ForceOptions, AdjointOptions):
    """The section [evolution]: time steps, integrator with its own options, force and adjoint."""

    integrator: Annotated[str, AfterValidator(_known_integrator)] = Field(
        default=DEFAULT, description=_SCHEMES
    )

    @model_validator(mode="wrap")
    @classmethod
    def _with_defaults_of_the_scheme(
        cls, keys: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        if not isinstance(keys, Mapping):
            return handler(keys)
        kind = INTEGRATORS.get(str(keys.get("integrator", DEFAULT)))
        section = handler({**kind().model_dump(), **keys} if kind else keys)
        section.__pydantic_fields_set__ = set(keys)
        return section

    @model_serializer(mode="wrap")
    def _dump_what_has_a_meaning(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        idle = set(EQUAL_STEPS if self.edges is not None else ())
        idle |= set(integrator_options()) - set(INTEGRATORS[self.integrator].model_fields)
        return {name: value for name, value in handler(self).items() if name not in idle}

    @property
    def scheme(self) -> Integrator:
        """The integrator, with the options that are given."""
        kind = INTEGRATORS[self.integrator]
        given = {name: getattr(self, name) for name in kind.model_fields}
        return kind(**{name: value for name, value in given.items() if value is not None})

    @property
    def force(self) -> ForceOptions:
        """The options of the force alone."""
        return self.part(ForceOptions)


def integrators_with(option: str) -> list[str]:
    """Returns the names of the integrators that have an option."""
    return [name for name, kind in INTEGRATORS.items() if option in kind.model_fields]


def integrator_options() -> dict[str, Any]:
    """Returns the fields of all integrators' own options, each None unless it is given."""
    return {
        name: (field.annotation | None, Field(default=None, description=field.description))  # type: ignore[operator]
        for kind in INTEGRATORS.values()
        for name, field in kind.model_fields.items()
    }


if TYPE_CHECKING:
    EvolutionSection = _Evolution
else:
    EvolutionSection = create_model("EvolutionSection", __base__=_Evolution, **integrator_options())


class ResultsSection(Options):
    """The section [results]: what to measure besides the power spectrum."""

    multipoles: Literal["x", "y", "z"] | None = Field(
        default=None, description='the line of sight of redshift space: "x", "y" or "z"'
    )
