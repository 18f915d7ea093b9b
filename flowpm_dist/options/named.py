"""Things of a name: those of a registry, and a user's own by "package.module:object"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from flowpm_dist.options.hints import nearest
from flowpm_dist.options.python_names import FORM, is_python_name, python_object

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
    if name in registry:
        return registry[name]
    if is_python_name(name):
        try:
            return cast(Thing, python_object(name))
        except ValueError as error:
            raise ValueError(f"no {kind} {name!r}: {error}") from error
    known = ", ".join(registry)
    raise ValueError(
        f"no {kind} {name!r}{nearest(name, registry)} (give one of {known}, or {FORM})"
    )
