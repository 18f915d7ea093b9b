"""Parts of declarations of options: types, keys that choose a model, and problems."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import core_schema


@dataclass(frozen=True)
class Problem:
    """A mistake in options.

    Attributes:
        key: the key that is wrong, such as "a_start", or "evolution.a_start" in a whole run file;
            an empty text for all of the options.
        what: what is wrong, and what is allowed.
    """

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key:.200} {self.what}".lstrip()


class ProblemsError(ValueError):
    """Each value is valid, but they are not valid together.

    Attributes:
        problems: all problems, with the keys of the model that found them.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the most similar known name, or an empty text."""
    folded = {k.lower(): k for k in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.4)
    return f"; did you mean {folded[match[0]]}?" if match else ""


def rounded_down(value: float) -> str:
    """Returns a number above 0 as a text, rounded down to three digits."""
    return _rounded(math.floor, value)


def rounded_up(value: float) -> str:
    """Returns a number above 0 as a text, rounded up to three digits."""
    return _rounded(math.ceil, value)


def _rounded(whole: Callable[[float], int], value: float) -> str:
    places = 2 - math.floor(math.log10(value))
    unit = 10.0**-places
    return f"{whole(value / unit) * unit:.3g}"


T = TypeVar("T")


def three(value: Any) -> Any:
    """Returns one value for each axis."""
    return tuple(value) if isinstance(value, list | tuple) else (value, value, value)


def listed(value: Any) -> Any:
    """Returns a list of TOML as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def rows(value: Any) -> Any:
    """Returns a list of lists of TOML as a tuple of tuples."""
    return tuple(map(listed, value)) if isinstance(value, list) else value


def count(default: int, least: int = 1) -> Any:
    """Returns the field of a whole number of at least `least`."""
    return Field(default=default, ge=least, description=f"a whole number of at least {least}")


def known(names: Collection[str], what: str) -> Callable[[str], str]:
    """Returns the validator of a name.

    Args:
        names: the known names, looked up at each validation.
        what: the kind of thing that they name, for the message about an unknown name.
    """

    def checked(name: str) -> str:
        if name not in names:
            raise ValueError(f"there is no such {what}{nearest(name, names)}")
        return name

    return checked


def either(names: Iterable[str]) -> str:
    """Returns the description of a field that holds one of some names."""
    *others, last = [f'"{name}"' for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def limits(what: str) -> Any:
    """Returns the field of a `Pair` that may be left out.

    Args:
        what: the description of each of the two numbers.
    """
    return Field(default=None, description=f"[low, high] with low below high, each {what}")


def _from_folder(value: Any, info: ValidationInfo) -> Any:
    """Returns an absolute path from one relative to the run file's folder."""
    folder = (info.context or {}).get("folder", Path())
    return (folder / Path(value).expanduser()).absolute() if isinstance(value, str) else value


def _file_or_folder(path: Path) -> Path:
    try:
        usable = not path.exists() or path.is_file() or path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise ValueError(error.strerror) from None
    if not usable:
        raise ValueError("a device or a pipe")
    return path


def _low_below_high(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    low, high = pair
    if low >= high:
        raise ValueError(f"{low:g} is not below {high:g}")
    return pair


def distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names, or raises ValueError if one occurs twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice")
    return names


MOST_CELLS = 2**20
"""Largest number of cells along a side, so that the number of cells of a grid fits int64."""
EvenSide = Annotated[int, Field(ge=4, le=MOST_CELLS, multiple_of=2)]
Length = Annotated[float, Field(gt=0)]
"""[Mpc/h] where it is a distance."""
MOST_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
A_SEED = "a whole number from 0 to 2^63 - 1"
"""Description of a `Seed`."""
Pair = Annotated[tuple[T, T], BeforeValidator(listed), AfterValidator(_low_below_high)]
"""The lowest and the highest value."""
OneOrMore = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(listed)]
"""A list of TOML that is not empty."""
Names = Annotated[OneOrMore[str], AfterValidator(distinct)]
AnyPath = Annotated[Path, BeforeValidator(_from_folder), AfterValidator(_file_or_folder)]
"""A path; one in a run file is relative to the file's folder."""


FORM = '"package.module:object"'
"""How an option names an object of Python."""


def name_in(models: Mapping[str, type], thing: object) -> str:
    """Returns the name under which the class of an object is known, else the name of the class."""
    kind = type(thing)
    return next((name for name, model in models.items() if model is kind), kind.__name__)


class VariantError(ValueError):
    """The keys of a chosen variant are wrong.

    Attributes:
        variants: all variants.
        name: the name of the chosen variant.
        given: the keys and values that it was given.
        error: pydantic's error.
    """

    def __init__(
        self, variants: Variants, name: str, given: Mapping[str, Any], error: ValidationError
    ) -> None:
        self.variants, self.name, self.given, self.error = variants, name, given, error
        super().__init__(str(error))


@dataclass(frozen=True)
class Variants:
    """Annotates a field that holds one of several models, which a key of the run file chooses.

    As a whole section, where each model declares the key (`sky: Literal["flat"] = "flat"`):

        lightcone: Annotated[
            Flat | Full | None, Variants("sky", {"flat": Flat, "full": Full}, default="flat")
        ] = None

    As a part of a section, which then also has the variant's keys (`flat`):

        integrator: Annotated[Integrator, Variants("integrator", INTEGRATORS, "fastpm", flat=True)]

    A key of another variant is refused ("half_step = ...: goes with integrator = "fastpm", not
    with "bullfrog""), and a resolved run file has only the keys of the chosen variant.

    Attributes:
        by: the key that chooses.
        models: name -> model; it is looked up when options are made, so that it may grow.
        default: the name of the default model.
        flat: whether the section has the keys of the variant.
        load: imports a user's model that is named `FORM`, which then joins the models. It raises a
            ValueError if there is no such model. None if a run file cannot name one.
    """

    by: str
    models: dict[str, type[Any]]
    default: str
    flat: bool = False
    load: Callable[[str], type[BaseModel]] | None = None

    @property
    def must(self) -> str:
        """What the value of the key must be."""
        ours = [name for name in self.models if ":" not in name]
        return either(ours) + (f", or {FORM}" if self.load else "")

    def add_named(self, name: Any) -> None:
        """Adds a user's model with this name to the models, where the key can have one.

        A module that was loaded again has another model of this name, which replaces the first.

        Raises:
            ProblemsError: there is no such model.
        """
        if self.load is None or not isinstance(name, str) or ":" not in name:
            return
        try:
            self.models[name] = self.load(name)
        except ValueError as error:
            raise ProblemsError([Problem(self.by, f"= {name!r}: {error}")]) from error

    def keys(self) -> dict[str, None]:
        """Returns the keys of all variants, in order."""
        return {key: None for model in self.models.values() for key in model.model_fields}

    def owners(self, key: str, but: str) -> list[str]:
        """Returns the names of the variants with a key, if the variant `but` lacks this key."""
        if key == self.by or key in self.models[but].model_fields:
            return []
        return [name for name, model in self.models.items() if key in model.model_fields]

    def name_of(self, options: Any) -> str:
        """Returns the name of the variant of an object; of another class the name of the class."""
        return name_in(self.models, options)

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
        self.add_named(name)
        if not isinstance(name, str) or name not in self.models:
            hint = nearest(name, self.models) if isinstance(name, str) else ""
            mistake = f"= {name!r}: there is no such {self.by}{hint}; must be {self.must}"
            raise ProblemsError([Problem(self.by, mistake)])
        declared = self.by in self.models[name].model_fields
        options = {key: each for key, each in value.items() if declared or key != self.by}
        try:
            return self.models[name].model_validate(options, context=info.context)
        except ValidationError as error:
            raise VariantError(self, name, options, error) from error
