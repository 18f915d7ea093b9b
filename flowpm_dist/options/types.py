"""Types that several options share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from flowpm_dist.options.problems import nearest

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
        names: the names there are, looked up when one is given.
        what: they are names of, for the message about another one.
    """

    def checked(name: str) -> str:
        if name not in names:
            raise ValueError(f"there is no such {what}{nearest(name, names)}")
        return name

    return checked


def either(names: Iterable[str]) -> str:
    """Returns the description of a field that holds one of some names."""
    *others, last = [f'"{name}"' for name in names]
    return f"{', '.join(others)} or {last}"


def limits(what: str) -> Any:
    """Returns the field of a `Pair` that may be left out.

    Args:
        what: each of the two must be.
    """
    return Field(default=None, description=f"[low, high] with low below high, each {what}")


def from_registry(registry: Mapping[str, Callable[[], T]], what: str) -> Callable[[Any], Any]:
    """Returns the validator of a field that holds an object, or is given the name of one.

    Args:
        registry: name -> how the object is made; looked up when a name is given.
        what: the object is, for the message about an unknown name.
    """

    def made(value: Any) -> Any:
        return registry[checked(value)]() if isinstance(value, str) else value

    checked = known(registry, what)
    return made


def _from_folder(value: Any, info: ValidationInfo) -> Any:
    """Returns an absolute path from one relative to the run file's folder."""
    folder = (info.context or {}).get("folder", Path())
    return (folder / Path(value).expanduser()).absolute() if isinstance(value, str) else value


def _low_below_high(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    low, high = pair
    if low >= high:
        raise ValueError(f"{low:g} is not below {high:g}")
    return pair


def distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns names of which none stands there twice; a ValueError otherwise."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice")
    return names


EvenSide = Annotated[int, Field(ge=4, multiple_of=2)]
Length = Annotated[float, Field(gt=0)]
"""[Mpc/h] where it is a distance."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
A_SEED = "a whole number from 0 to 2^63 - 1"
"""What a `Seed` must be, for the description of a field."""
Pair = Annotated[tuple[T, T], BeforeValidator(listed), AfterValidator(_low_below_high)]
"""The lowest and the highest value."""
Names = Annotated[
    tuple[str, ...], Field(min_length=1), BeforeValidator(listed), AfterValidator(distinct)
]
AnyPath = Annotated[Path, BeforeValidator(_from_folder)]
"""A path; one in a run file is relative to the file's folder."""
