"""The base class of all options, and how they are made from Python."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from flowpm_dist.options.hints import RENAMED, nearest

Model = TypeVar("Model", bound="Options")


class Options(BaseModel):
    """Options that belong together, checked at construction and frozen.

    The description of a field says what its value must be. Messages about a run file and about the
    options of a `Simulation` show it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False
    )

    def part(self, model: type[Model]) -> Model:
        """Returns the options of a narrower model that these hold as well."""
        return model.model_construct(**{name: getattr(self, name) for name in model.model_fields})


def constructed(model: type[Model], given: Mapping[str, Any], context: Any = None) -> Model:
    """Returns the options that a Python caller has given by name.

    Args:
        model: the options there are.
        given: values by name.
        context: of the validation, such as the folder of relative paths.

    Raises:
        TypeError: there is no option of such a name; the message names the nearest one, or the
            present one of an option that was renamed.
        ValueError: a value is not allowed; the message says what is.
    """
    fields = model.model_fields
    for name in given:
        if name not in fields:
            if (new := RENAMED.get(name)) in fields:
                raise TypeError(f"the option {name!r} is now {new}")
            known = ", ".join(fields)
            raise TypeError(
                f"there is no option {name!r}{nearest(name, fields)} (options: {known})"
            )
    try:
        plain = {name: _plain(value) for name, value in given.items()}
        return model.model_validate(plain, context=context)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            cause = detail.get("ctx", {}).get("error")
            if not detail["loc"]:  # between options
                lines.append(str(cause))
                continue
            name = str(detail["loc"][0])
            if name not in given:
                lines.append(f"{name} is missing: must be {fields[name].description}")
                continue
            said = f"{cause}; " if isinstance(cause, ValueError) else ""
            value = reprlib.repr(given.get(name))
            lines.append(f"{name} = {value}: {said}must be {fields[name].description}")
        raise ValueError("; ".join(dict.fromkeys(lines))) from None


def _plain(value: Any) -> Any:
    """Returns a number of numpy's as Python's own, and any other value as it is."""
    numpy = sys.modules.get("numpy")  # without it there is none; it takes long to import
    return value.item() if numpy and isinstance(value, numpy.generic) else value
