"""The declaration of options: once, with their types, their defaults, and what they must be.

The options of a room are a frozen `Options` model in that room. A job is given the model, and a
section of a run file is the model, so that an option is one line wherever it is used.
Nothing here imports TensorFlow.
"""

from flowpm_dist.options.base import Options, constructed
from flowpm_dist.options.hints import MOVED, RENAMED, nearest
from flowpm_dist.options.named import checked_name, object_named
from flowpm_dist.options.python_names import checked_python_name, is_python_name, python_object
from flowpm_dist.options.rounding import rounded_down, rounded_up
from flowpm_dist.options.types import (
    A_SEED,
    AnyPath,
    EvenSide,
    Length,
    Names,
    Pair,
    Seed,
    count,
    distinct,
    either,
    from_registry,
    known,
    limits,
    listed,
    rows,
    three,
)

__all__ = [
    "A_SEED",
    "MOVED",
    "RENAMED",
    "AnyPath",
    "EvenSide",
    "Length",
    "Names",
    "Options",
    "Pair",
    "Seed",
    "checked_name",
    "checked_python_name",
    "constructed",
    "count",
    "distinct",
    "either",
    "from_registry",
    "is_python_name",
    "known",
    "limits",
    "listed",
    "nearest",
    "python_object",
    "object_named",
    "rounded_down",
    "rounded_up",
    "rows",
    "three",
]
