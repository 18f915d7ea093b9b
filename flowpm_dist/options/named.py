"""Things of a name: those of a registry, and a user's own by "package.module:object"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar, cast

from flowpm_dist.options.hints import nearest
from flowpm_dist.options.python_names import (
    FORM,
    checked_python_name,
    is_python_name,
    python_object,
)

Thing = TypeVar("Thing")


def object_named(name: str, registry: Mapping[str, Thing], kind: str) -> Thing:
    """Returns what a name stands for.

    Args:
        name: a key of the registry, or "package.module:object", which is imported.
        registry: of what this package brings.
        kind: what it is, for messages.

    Raises:
        ValueError: there is no such thing; the message says what there is.
    """
    if checked_name(name, registry, kind) in registry:
        return registry[name]
    try:
        return cast(Thing, python_object(name))
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
