"""How options are declared: once, with type, default and a description of valid values.

The options of a room are a frozen `Options` model in that room. Run files have the model as a
section, and jobs receive the model, so that a new option is a single line.
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
from flowpm_dist.options.names import (
    checked_name,
    checked_python_name,
    is_python_name,
    object_named,
    python_object,
)
from flowpm_dist.options.types import (
    A_SEED,
    MOST_SEED,
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
    count,
    distinct,
    either,
    known,
    limits,
    listed,
    name_in,
    nearest,
    rounded_down,
    rounded_up,
    rows,
    three,
)
from flowpm_dist.options.units import Unit, in_unit, keep_in_units
