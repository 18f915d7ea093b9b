"""Objects that an option names, such as "package.module:object"."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, time
from importlib.machinery import PathFinder
from typing import Any, TypeVar, cast

from flowpm_dist.options.types import FORM, nearest

Thing = TypeVar("Thing")


def object_named(name: str | Thing, registry: Mapping[str, Thing | str], kind: str) -> Thing:
    """Returns the object with a name.

    Args:
        name: a key of the registry, or "package.module:object", which is imported; or the object
            itself, which Python callers can give.
        registry: the objects of this package by name, or their names "package.module:object".
        kind: the kind of object, for messages.

    Raises:
        ValueError: there is no such object; the message lists the known names.
    """
    checked = checked_name(name, registry, kind)
    entry = registry.get(checked, checked) if isinstance(checked, str) else checked
    if not isinstance(entry, str):
        return cast(Thing, entry)
    try:
        return cast(Thing, python_object(entry))
    except ValueError as error:
        raise ValueError(f"no {kind} {name!r}: {error}") from error


def checked_name(name: Any, known: Collection[str], kind: str) -> Any:
    """Returns a name if its object exists; a user's module is not imported.

    Args:
        name: a known name, or "package.module:object"; an object is returned unchanged.
        known: the names in this package.
        kind: the kind of object, for messages.

    Raises:
        ValueError: there is no such name or no such module; the message lists the known names.
    """
    if _is_object(name) or name in known:
        return name
    if not isinstance(name, str) or not is_python_name(name):
        hint = nearest(str(name), known)
        raise ValueError(f"no {kind} {name!r}{hint} (give one of {', '.join(known)}, or {FORM})")
    try:
        return checked_python_name(name)
    except ValueError as error:
        raise ValueError(f"no {kind} {name!r}: {error}") from error


def is_python_name(name: str) -> bool:
    """Returns whether a name has the form "package.module:object"."""
    return ":" in name


def _is_object(value: Any) -> bool:
    """Returns whether a value is an object of Python that no run file can hold."""
    written = str | bool | int | float | list | tuple | Mapping | date | time | None
    return not isinstance(value, written)


def checked_python_name(name: Any) -> Any:
    """Returns a name such as "package.module:object" if its module exists.

    Neither the module nor its package is imported, so no user code runs before the work. Python
    callers can give an object in place of its name; it is returned unchanged.

    Raises:
        ValueError: the name has another form, or there is no such module on Python's path and in
            the current folder.
    """
    if _is_object(name):
        return name
    module, _, attribute = str(name).partition(":")
    if module == "__main__":
        raise ValueError(
            "a run file cannot name an object of a script or a notebook: put it into a module of "
            "its own (in Python, a forward model also takes the object itself)"
        )
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"an object in a module is named as in {FORM}")
    if not _is_there(module):
        raise ValueError(
            f"there is no module {module!r} on Python's path (PYTHONPATH) or in the current folder"
        )
    return name


def _is_there(module: str) -> bool:
    """Returns whether a module can be found, without importing it or its package."""
    first, *rest = module.split(".")
    with _current_folder():
        spec = importlib.util.find_spec(first)
        for part in rest:
            folders = spec.submodule_search_locations if spec else None
            name = f"{spec.name}.{part}" if spec else part
            spec = PathFinder.find_spec(name, list(folders)) if folders is not None else None
    return spec is not None


def python_object(name: Any) -> Any:
    """Returns the object of a name such as "package.module:object"; its module is imported.

    An object that is given in place of a name is returned unchanged.

    Raises:
        ValueError: see `checked_python_name`, or the module has no such object.
        Exception: whatever the module raises while it is imported.
    """
    if _is_object(checked := checked_python_name(name)):
        return checked
    module, _, attribute = checked.partition(":")
    with _current_folder():
        value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ValueError(f"the module {module!r} has no {attribute!r}")
        value = getattr(value, part)
    return value


@contextmanager
def _current_folder() -> Iterator[None]:
    """Puts the current folder at the end of Python's path, if it is not there."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
