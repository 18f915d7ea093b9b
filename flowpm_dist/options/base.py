"""The base class of all options: their values, the rules between them, and their written form.

A model has the rules between its own keys, which apply to Python and to run files:

    class SourceOptions(Options):
        redshift: float | None = Field(default=None, gt=0, description="a number above 0")
        file: AnyPath | None = Field(default=None, description="a text file")
        column: int = Field(default=1, ge=1, description="a whole number of at least 1")

        def idle(self) -> dict[str, str]:  # keys that mean nothing here
            return {} if self.file else {"column": "file"}

        def problems(self) -> Iterator[Problem]:  # all other rules between keys
            yield from self.exactly_one("redshift", "file")
            if self.redshift == 3.0:
                yield self.problem("redshift", "must not be 3")

A key in `idle` is refused ("column = 2: goes with file") and is left out of resolved run files. Its
default value is accepted, because it changes nothing and may be in an edited resolved run file.
`flowpm_dist.options.types` declares keys that choose between whole models.
"""

from __future__ import annotations

import operator
import reprlib
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from flowpm_dist.options.types import (
    Problem,
    ProblemsError,
    VariantError,
    Variants,
    nearest,
)
from flowpm_dist.options.units import Unit, in_unit

Model = TypeVar("Model", bound="Options")


class Options(BaseModel):
    """Options that belong together, checked at construction and frozen.

    The description of a field says what its value must be. Messages about a run file and about the
    options of a `Simulation` show it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False
    )

    def problems(self) -> Iterator[Problem]:
        """Yields the problems between keys; each value alone is valid. Models override it."""
        yield from ()

    def idle(self) -> dict[str, str]:
        """Returns the keys that mean nothing with the present values, and what each goes with.

        Models override it. Such a key is refused if it is given.
        """
        return {}

    def problem(self, key: str, what: str) -> Problem:
        """Returns the problem of a key, with its value; "evolution.steps" is a key of a section."""
        part, name = self._holder(key)
        value, variants = getattr(part, name), flat_variants(type(part)).get(name)
        shown = as_written(variants.name_of(value) if variants else _as_toml(value))
        return Problem(key, f"= {shown}: {what}")

    def exactly_one(self, *keys: str) -> Iterator[Problem]:
        """Yields a problem unless exactly one of several keys is given."""
        named = [key for key in keys if self.is_given(key)]
        if len(named) != 1:
            several = "both are" if len(named) == 2 else "all are"
            number = several if named else "neither is" if len(keys) == 2 else "none is"
            yield Problem(", ".join(named or keys), f"{number} given: give exactly one")

    def is_given(self, key: str) -> bool:
        """Returns whether a key, such as "steps" or "evolution.steps", was given a value.

        None, which Python callers may give, is no value.
        """
        first, _, rest = key.partition(".")
        if not rest:
            return first in self.model_fields_set and getattr(self, first) is not None
        part = getattr(self, first)
        return isinstance(part, Options) and part.is_given(rest)

    def _holder(self, key: str) -> tuple[Options, str]:
        """Returns the options that have a key, such as "evolution.steps", and its name there."""
        section, _, name = key.rpartition(".")
        return (operator.attrgetter(section)(self) if section else self), name

    def _is_default(self, key: str) -> bool:
        part, name = self._holder(key)
        field = type(part).model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data=dict(part))
        return bool(getattr(part, name) == default)

    def part(self, model: type[Model]) -> Model:
        """Returns the options of a model that has some of the same fields."""
        return model.model_construct(**{name: getattr(self, name) for name in model.model_fields})

    def to_table(self) -> dict[str, Any]:
        """Returns keys and values for a run file, without idle and empty keys."""
        table: dict[str, Any] = {}
        idle = self.idle()
        for name in (*type(self).model_fields, *(self.model_extra or ())):
            value = getattr(self, name)
            if value is None or name in idle:
                continue
            if (variants := flat_variants(type(self)).get(name)) is not None:
                table |= {name: variants.name_of(value), **value.to_table()}
            else:
                table[name] = _as_toml(value)
        for key in idle:  # of sections
            section, _, rest = key.partition(".")
            if rest and section in table:
                part, name = self._holder(key)
                variants = flat_variants(type(part)).get(name)
                for each in (rest, *(variants.keys() if variants else ())):
                    table[section].pop(each, None)
        return table

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, keys: Any) -> Any:
        """Takes units off, and moves the keys of a flat variant into a table of their own."""
        if not isinstance(keys, Mapping):
            return keys
        keys = _without_units(cls, keys)
        for name, variants in flat_variants(cls).items():
            chosen = keys.get(name, variants.default)
            variants.add_named(chosen)
            model = variants.models.get(chosen) if isinstance(chosen, str) else None
            twice = [key for key in model.model_fields if key in cls.model_fields] if model else []
            if twice:
                mistake = f"= {chosen!r}: its field {twice[0]!r} is a key of the section: rename it"
                raise ProblemsError([Problem(name, mistake)])
            others = [key for key in variants.keys() if key not in cls.model_fields]
            if isinstance(chosen, BaseModel) and (apart := [key for key in others if key in keys]):
                mistake = f"is an option of the {name}, which is given as an object: give it there"
                raise ProblemsError([Problem(apart[0], mistake)])
            if isinstance(chosen, Mapping | BaseModel):
                continue
            options = {key: keys.pop(key) for key in others if key in keys}
            # A value that is no name is reported elsewhere; the keys then mean nothing.
            if isinstance(chosen, str) and (name in keys or options):
                keys[name] = {variants.by: chosen, **options}
        return keys

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        problems = [
            self.problem(key, f"goes with {needed}")
            for key, needed in self.idle().items()
            if self.is_given(key) and not self._is_default(key)
        ]
        problems += self.problems()
        if problems:
            raise ProblemsError(problems)
        return self


def _without_units(model: type[BaseModel], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by key, quantities as plain numbers; see `Unit` and `in_unit`."""
    plain, problems = dict(keys), []
    for name, value in keys.items():
        if (field := model.model_fields.get(name)) is None:
            continue
        unit = next((each.text for each in field.metadata if isinstance(each, Unit)), "")
        try:
            if (number := in_unit(name, value, unit)) is not value:
                plain[name] = number.tolist() if hasattr(number, "tolist") else number
        except ValueError as error:
            key, _, mistake = str(error).partition(" ")
            problems.append(Problem(key, mistake))
    if problems:
        raise ProblemsError(problems)
    return plain


def flat_variants(model: type[BaseModel]) -> dict[str, Variants]:
    """Returns the fields of a model whose variants have their keys in the model's section."""
    return {
        name: variants
        for name, field in model.model_fields.items()
        for variants in field.metadata
        if isinstance(variants, Variants) and variants.flat
    }


def keys_of(model: type[BaseModel]) -> list[str]:
    """Returns the keys of a model in a run file, including the keys of flat variants."""
    flat = flat_variants(model).values()
    return list(
        dict.fromkeys([*model.model_fields, *(key for each in flat for key in each.keys())])
    )


def as_written(value: Any) -> str:
    """Returns the text of a value in a run file."""
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {as_written(each)}' for key, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_toml(value: Any) -> Any:
    if isinstance(value, Options):
        return value.to_table()
    if isinstance(value, list | tuple):
        return [_as_toml(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _as_toml(each) for key, each in value.items()}
    return value if isinstance(value, str | int | float) else str(value)


def problems_of(
    model: type[BaseModel], given: Mapping[str, Any], error: ValidationError
) -> list[Problem]:
    """Returns one problem for each wrong key of a model, however many of its parts are wrong.

    Args:
        model: the model that could not be made.
        given: the keys and values it was given.
        error: pydantic's error.
    """
    sections = {name: part for name in model.model_fields if (part := model_of(model, name))}
    return list(dict.fromkeys(_found(model, given, _details(error), sections)))


_Detail = tuple[tuple[int | str, ...], str, BaseException | None]
"""The place, the kind and the cause of an error of pydantic."""


def _details(error: ValidationError) -> list[_Detail]:
    return [
        (each["loc"], each["type"], each.get("ctx", {}).get("error"))
        for each in error.errors(include_url=False)
        if each["type"] != "default_factory_not_called"  # another key is wrong
    ]


def _found(
    model: type[BaseModel],
    given: Mapping[str, Any],
    details: list[_Detail],
    sections: Mapping[str, type[BaseModel]],
) -> Iterator[Problem]:
    """Yields the problems of a model, one for each wrong value in any of its parts."""
    wrong = set()
    for loc, kind, cause in details:
        key = str(loc[0]) if loc else ""
        prefix = f"{key}." if key and key not in flat_variants(model) else ""
        inner: Iterator[Problem] | list[Problem]
        if isinstance(cause, ProblemsError) and len(loc) <= 1:
            inner = cause.problems
        elif isinstance(cause, VariantError):
            inner = _of_variant(cause, sections)
        elif key in sections and len(loc) > 1 and isinstance(given.get(key, {}), Mapping):
            if key in wrong:
                continue
            wrong.add(key)
            inside = [(at[1:], its, why) for at, its, why in details if at[:1] == loc[:1]]
            inner = _found(sections[key], given.get(key, {}), inside, sections)
        else:
            if key not in wrong:
                yield Problem(key, _what(key, model, given, kind, cause, sections))
            wrong.add(key)
            continue
        for each in inner:  # "A_s, sigma8" are two keys
            keys = [f"{prefix}{name}".rstrip(".") for name in each.key.split(", ")]
            yield Problem(", ".join(keys), each.what)


def _what(
    key: str,
    model: type[BaseModel],
    given: Mapping[str, Any],
    kind: str,
    cause: BaseException | None,
    sections: Mapping[str, type[BaseModel]],
) -> str:
    """Returns what is wrong with one key, and what is allowed."""
    if kind == "extra_forbidden":
        return _unknown_key(key, model, sections)
    section = f"a section [{key}] with keys below it"
    field = model.model_fields.get(key)
    variants = flat_variants(model).get(key)
    described = variants.must if variants else field.description if field else ""
    must = f"must be {described or (section if field else '[low, high]')}"
    if key not in given:
        return f"is missing: {must}"
    reason = f"{cause}; " if isinstance(cause, ValueError) else ""
    return f"= {reprlib.repr(given[key])}: {reason}{must}"


def _of_variant(error: VariantError, sections: Mapping[str, type[BaseModel]]) -> Iterator[Problem]:
    """Yields the problems of a chosen variant; for other variants' keys it names the variant."""
    model, details = error.variants.models[error.name], _details(error.error)
    for problem in _found(model, error.given, details, sections):
        if others := error.variants.owners(problem.key, but=error.name):
            named = " or ".join(map(as_written, others))
            value = as_written(error.given[problem.key])
            there = f"{error.variants.by} = {named}, not with {as_written(error.name)}"
            yield Problem(problem.key, f"= {value}: goes with {there}")
        else:
            yield problem


def model_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Returns the model of a section of a run file; the default one if there are variants."""
    field = model.model_fields[name]
    for each in field.metadata:
        if isinstance(each, Variants) and not each.flat:
            return each.models[each.default]
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _unknown_key(key: str, model: type[BaseModel], sections: Mapping[str, type[BaseModel]]) -> str:
    """Returns what is wrong with a key that a model does not have."""
    known = keys_of(model)
    homes = [f"[{name}]" for name, other in sections.items() if key in keys_of(other)]
    hint = f"; it belongs in {' or '.join(homes)}" if homes else nearest(key, known)
    name = next((f"[{name}]" for name, other in sections.items() if other is model), "")
    return f"is not a key{hint} (keys{' of ' if name else ''}{name}: {', '.join(known)})"


def constructed(model: type[Model], given: Mapping[str, Any], context: Any = None) -> Model:
    """Returns the options that a Python caller has given by name.

    Args:
        model: the model of the options.
        given: values by name.
        context: the context of the validation, such as the folder of relative paths.

    Raises:
        TypeError: there is no option of such a name; the message names the nearest one.
        ValueError: values are not allowed; the message says what is wrong with each.
    """
    known = keys_of(model)
    for name in given:
        if name not in known:
            raise TypeError(
                f"there is no option {name!r}{nearest(name, known)} (options: {', '.join(known)})"
            )
    try:
        plain = {name: _plain(value) for name, value in given.items()}
        return model.model_validate(plain, context=context)
    except ValidationError as error:
        raise ValueError("; ".join(map(str, problems_of(model, given, error)))) from None


def _plain(value: Any) -> Any:
    """Returns a number of numpy as a number of Python, and any other value unchanged."""
    numpy = sys.modules.get("numpy")  # without numpy there are none; it takes long to import
    return value.item() if numpy and isinstance(value, numpy.generic) else value


def table_of(model: type[Options]) -> BeforeValidator:
    """Returns the validator of a table or of a list of tables, which names every wrong key."""

    def made(value: Any, where: str, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            return constructed(model, value, info.context)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}{error}") from None

    def read(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list | tuple):
            return made(value, "", info)
        return tuple(made(each, f"{info.field_name}[{n}]: ", info) for n, each in enumerate(value))

    return BeforeValidator(read)
