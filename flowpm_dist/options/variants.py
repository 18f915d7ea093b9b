"""Keys that choose between models: a section, or a part of it, is a discriminated union."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import core_schema

from flowpm_dist.options.problems import Problem, ProblemsError, nearest


class VariantError(ValueError):
    """The keys of a chosen variant are wrong.

    Attributes:
        variants: the variants there are.
        name: the chosen one's name.
        given: its keys.
        error: pydantic's error.
    """

    def __init__(
        self, variants: Variants, name: str, given: Mapping[str, Any], error: ValidationError
    ) -> None:
        self.variants, self.name, self.given, self.error = variants, name, given, error
        super().__init__(str(error))

    @property
    def model(self) -> type[BaseModel]:
        """The chosen model."""
        return self.variants.models[self.name]


@dataclass(frozen=True)
class Variants:
    """Annotates a field that holds one of several models; a key of a run file says which.

    As a whole section, where each model declares the key (`sky: Literal["flat"] = "flat"`):

        lightcone: Annotated[
            Flat | Full | None, Variants("sky", {"flat": Flat, "full": Full}, default="flat")
        ] = None

    As a part of a section, where the variant's keys stand beside its name (`flat`):

        integrator: Annotated[Integrator, Variants("integrator", INTEGRATORS, "fastpm", flat=True)]

    A key of another variant is refused ("half_step = ...: goes with integrator = "fastpm", not
    with "bullfrog""), and a resolved run file has the chosen one's alone.

    Attributes:
        by: the key that chooses.
        models: name -> model; it is looked up when options are made, so that it may grow.
        default: the name that is taken where none is given.
        flat: whether a field is a part of its section.
    """

    by: str
    models: Mapping[str, type[BaseModel]]
    default: str
    flat: bool = False

    def keys(self) -> dict[str, None]:
        """Returns the keys of all variants, in order."""
        return {key: None for model in self.models.values() for key in model.model_fields}

    def owners(self, key: str, but: str) -> list[str]:
        """Returns the names of the variants that have a key which the variant `but` has not."""
        if key == self.by or key in self.models[but].model_fields:
            return []
        return [name for name, model in self.models.items() if key in model.model_fields]

    def name_of(self, options: Any) -> str:
        """Returns the name of the variant that an object is of."""
        return next(name for name, model in self.models.items() if type(options) is model)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Makes the model that the key names, before pydantic sees the value."""
        return core_schema.with_info_before_validator_function(self._made, handler(source))

    def _made(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and self.flat:
            value = {self.by: value}
        if not isinstance(value, Mapping):
            return value
        name = value.get(self.by, self.default)
        if not isinstance(name, str) or name not in self.models:
            hint = nearest(name, self.models) if isinstance(name, str) else ""
            *others, last = [f'"{each}"' for each in self.models]
            must = f"must be {', '.join(others)} or {last}" if others else f"must be {last}"
            what = f"= {name!r}: there is no such {self.by}{hint}; {must}"
            raise ProblemsError([Problem(self.by, what)])
        declared = self.by in self.models[name].model_fields
        own = {key: each for key, each in value.items() if declared or key != self.by}
        try:
            return self.models[name].model_validate(own, context=info.context)
        except ValidationError as error:
            raise VariantError(self, name, own, error) from error
