"""Texts that describe an input of a function, for ranks to compare."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import tensorflow as tf

_SHORT = 1024
"""Largest array whose numbers are compared one by one, so that they may differ by rounding."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, tf.DType, enum.Enum)


def facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the name of each part of a value, and the part as a text.

    Equal inputs give equal texts in each process. The text of a function is its name. An object
    that is no number, text, array, container, dataclass or model of options has its type's name.

    Args:
        value: an input, or several by name.
        name: its name.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        yield name, repr(value) if isinstance(value, str) else str(value)
    elif isinstance(value, (np.ndarray, tf.Tensor, tf.Variable)):
        yield from _of_array(np.asarray(value), name)
    elif isinstance(value, (list, tuple)):
        if len(value) > _SHORT and all(isinstance(item, (int, float)) for item in value):
            yield from _of_array(np.array(value), name)
            return
        yield f"the length of {name}", str(len(value))
        for number, item in enumerate(value):
            yield from facts(item, f"{name}[{number}]")
    elif isinstance(value, Set):
        yield from facts(sorted(value, key=repr), name)
    elif isinstance(value, functools.partial):
        yield name, _name_of(value.func)
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords)
        for key, part in bound.arguments.items():
            yield from facts(part, f"{name}.{key}")
    elif (parts := _parts(value)) is not None:
        if not isinstance(value, Mapping):
            yield name, _name_of(type(value))
        for key, part in parts.items():
            yield from facts(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, _name_of(value if callable(value) else type(value))


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Returns the parts of a container by name; None of another object."""
    if isinstance(value, Mapping):  # equal ones may have another order
        return dict(sorted(value.items(), key=lambda item: str(item[0])))
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    # A model of pydantic, which this package does not need.
    return dict(value) if hasattr(type(value), "model_fields") else None


def _of_array(array: np.ndarray, name: str) -> Iterator[tuple[str, str]]:
    if array.ndim == 0:
        yield from facts(array.item(), name)
    elif array.size <= _SHORT:
        yield f"the shape of {name}", str(array.shape)
        for index in np.ndindex(array.shape):
            yield from facts(array[index], f"{name}[{', '.join(map(str, index))}]")
    else:
        flat = array.reshape(-1)
        digest = hashlib.blake2b(flat.tobytes(), digest_size=4).hexdigest()
        ends = f"from {flat[0]} to {flat[-1]}"
        yield name, f"{array.dtype} {list(array.shape)} {ends} (digest {digest})"


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
