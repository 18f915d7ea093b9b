"""Objects that run files name: one of a registry, or a user's own as "package.module:object"."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from flowpm_dist.options.problems import nearest

Thing = TypeVar("Thing")
FORM = '"package.module:object"'


def object_named(name: str, registry: Mapping[str, Thing | str], kind: str) -> Thing:
    """Returns what a name stands for.

    Args:
        name: a key of the registry, or "package.module:object", which is imported.
        registry: what this package brings: things, or their names "package.module:object".
        kind: what it is, for messages.

    Raises:
        ValueError: there is no such thing; the message says what there is.
    """
    found = registry.get(checked_name(name, registry, kind), name)
    if not isinstance(found, str):
        return found
    try:
        return cast(Thing, python_object(found))
    except ValueError as error:
        raise ValueError(f"no {kind} {name!r}: {error}") from error


def checked_name(name: str, known: Collection[str], kind: str) -> str:
    """Returns a name if it stands for something; a module of a user's own is not imported.

    Args:
        name: a known one, or "package.module:object".
        known: names of what this package brings.
        kind: what it is, for messages.

    Raises:
        ValueError: there is no such thing, or no such module; the message says what there is.
    """
    if name in known:
        return name
    if not is_python_name(name):
        raise ValueError(
            f"no {kind} {name!r}{nearest(name, known)} (give one of {', '.join(known)}, or {FORM})"
        )
    try:
        return checked_python_name(name)
    except ValueError as error:
        raise ValueError(f"no {kind} {name!r}: {error}") from error


def is_python_name(name: str) -> bool:
    """Returns whether a name is meant as one of an object in a module."""
    return ":" in name


def checked_python_name(name: str) -> str:
    """Returns a name such as "package.module:object" whose module is there.

    The module itself is not imported, so that what it imports is not loaded; its package is.

    Raises:
        ValueError: it is no such name, or there is no such module on Python's path and in the
            current folder.
    """
    module, _, attribute = name.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"an object in a module is named as in {FORM}")
    with _current_folder():
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
    if found is None:
        raise ValueError(
            f"there is no module {module!r} on Python's path (PYTHONPATH) or in the current folder"
        )
    return name


def python_object(name: str) -> Any:
    """Returns the object of a name such as "package.module:object"; its module is imported.

    Raises:
        ValueError: see `checked_python_name`, or the module has no such object.
        Exception: whatever the module raises while it is imported.
    """
    module, _, attribute = checked_python_name(name).partition(":")
    with _current_folder():
        found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"the module {module!r} has no {attribute!r}")
        found = getattr(found, part)
    return found


@contextmanager
def _current_folder() -> Iterator[None]:
    """The current folder at the end of Python's path, where a command does not have it."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
