"""The declaration of options: once, with their types, their defaults, and what they must be.

The options of a room are a frozen `Options` model in that room. A job is given the model, and a
section of a run file is the model, so that an option is one line wherever it is used.
Nothing here imports TensorFlow.
"""

from flowpm_dist.options.base import (
    Options,
    as_written,
    constructed,
    keys_of,
    model_of,
    problems_of,
    table_of,
    unknown_key,
)
from flowpm_dist.options.named import (
    checked_name,
    checked_python_name,
    is_python_name,
    object_named,
    python_object,
)
from flowpm_dist.options.problems import Problem, ProblemsError, nearest, rounded_down, rounded_up
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
from flowpm_dist.options.variants import Variants

__all__ = [
    "A_SEED",
    "AnyPath",
    "EvenSide",
    "Length",
    "Names",
    "Options",
    "Pair",
    "Problem",
    "ProblemsError",
    "Variants",
    "Seed",
    "as_written",
    "checked_name",
    "checked_python_name",
    "constructed",
    "count",
    "distinct",
    "either",
    "from_registry",
    "is_python_name",
    "keys_of",
    "known",
    "limits",
    "listed",
    "model_of",
    "nearest",
    "problems_of",
    "table_of",
    "unknown_key",
    "python_object",
    "object_named",
    "rounded_down",
    "rounded_up",
    "rows",
    "three",
]
