"""Objects of a user's own, by the names that run files give them: "package.module:object"."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORM = '"package.module:object"'


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
