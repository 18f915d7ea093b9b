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
)
from flowpm_dist.options.types import (
    A_SEED,
    AnyPath,
    EvenSide,
    Length,
    Names,
    OneOrMore,
    Pair,
    Problem,
    ProblemsError,
    Seed,
    Variants,
    checked_name,
    checked_python_name,
    count,
    distinct,
    either,
    from_registry,
    is_python_name,
    known,
    limits,
    listed,
    nearest,
    object_named,
    python_object,
    rounded_down,
    rounded_up,
    rows,
    three,
)
