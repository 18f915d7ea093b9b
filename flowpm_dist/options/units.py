"""Values that carry a unit, such as astropy's quantities: converted, or refused by name.

All numbers of this package are in the units that docstrings name, and most of these hold h. A
quantity of astropy is converted if this needs no cosmology. A length without h, for example, is
refused where Mpc/h is needed, and the message says how to convert it. Any other object with a unit
is refused. This module imports astropy only for a quantity of astropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNITS = {
    "Mpc/h": ("Mpc", 1),
    "h/Mpc": ("1/Mpc", -1),
    "(Mpc/h)^3": ("Mpc3", 3),
    "(h/Mpc)^3": ("1/Mpc3", -3),
    "1/Mpc": ("1/Mpc", 0),
    "Mpc^3": ("Mpc3", 0),
    "deg": ("deg", 0),
    "rad": ("rad", 0),
    "sr": ("sr", 0),
    "deg^2": ("deg2", 0),
    "1/arcmin^2": ("1/arcmin2", 0),
    "K": ("K", 0),
    "eV": ("eV", 0),
    "redshift": ("", 0),
    "": ("", 0),
}
"""A unit as docstrings name it -> astropy's name of it without h, and the power of h.

A number in the unit is the number in astropy's, times this power of h. "" is a number without a
unit. A "redshift" is one as well, but may have astropy's unit of redshifts. Quantities are refused
where a unit is not in this table.
"""

_PLAIN = frozenset({float, int, bool, str, type(None)})
_TEXTS = {"": ("", "1", "dimensionless"), "redshift": ("", "1", "dimensionless")}
_GIVE = "give plain numbers"
_FACTORS = {0: "", 1: " * h", 3: " * h**3", -1: " / h", -3: " / h**3"}


@dataclass(frozen=True)
class Unit:
    """Annotates a field of an `Options` model with the unit of its numbers, a key of `UNITS`."""

    text: str


def in_unit(name: str, value: Any, unit: str = "") -> Any:
    """Returns a value without a unit; one that has none is returned unchanged.

    Args:
        name: the name of the argument, for messages.
        value: a number, array, tensor, or a list or tuple of numbers; or any object at all.
        unit: the unit that the value must be in, see `UNITS`.

    Returns:
        For a quantity of astropy, a number or an array of numpy in `unit`.

    Raises:
        ValueError: the value has a unit that cannot be converted.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        if all(type(part) in _PLAIN for part in value):
            return value
        parts = [in_unit(f"{name}[{i}]", part, unit) for i, part in enumerate(value)]
        changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return (list if isinstance(value, list) else tuple)(parts) if changed else value
    there = _unit_of(value)
    if there is None:
        return value
    if isinstance(there, str) and there in _TEXTS.get(unit, (unit,)):  # an array of xarray
        return value
    if type(there).__module__.partition(".")[0] == "astropy":
        return _converted(name, value, unit)
    raise ValueError(f"{_must_be(name, value, there, unit)}; {_GIVE}")


def keep_in_units(holder: Any, **units: str) -> None:
    """Takes the units off attributes of a frozen dataclass, for its `__post_init__`.

    Args:
        holder: the object.
        units: the unit of each attribute by its name, see `in_unit`.
    """
    for name, unit in units.items():
        value = getattr(holder, name)
        if (plain := in_unit(name, value, unit)) is not value:
            object.__setattr__(holder, name, plain)


def _unit_of(value: Any) -> Any:
    """Returns the unit of a number or an array; None for one without, and for other objects."""
    unit = getattr(value, "unit", None)
    if unit is None:
        unit = getattr(value, "units", None)
    if unit is None or not (hasattr(value, "__array__") or hasattr(value, "__float__")):
        return None
    return None if hasattr(unit, "__array__") else unit  # a column of this name


def _converted(name: str, value: Any, unit: str) -> Any:
    """Returns a quantity of astropy as a number or an array in a unit."""
    from astropy.cosmology.units import littleh, redshift
    from astropy.units import Quantity, Unit, UnitsError

    quantity = value if isinstance(value, Quantity) else Quantity(value)
    how = _GIVE
    there = quantity.unit
    base, power = UNITS.get(unit, (None, 0))
    if base is not None and (redshift not in getattr(there, "bases", ()) or unit == "redshift"):
        try:
            number = quantity.to_value(Unit(base) / littleh**power)
            return number.item() if quantity.isscalar else number
        except (UnitsError, TypeError):
            if power and there.is_equivalent(base):
                quantity_name = name if isinstance(value, Quantity) else f"{name}.quantity"
                how = f"give {quantity_name}.to_value({base!r}){_FACTORS[power]}"
    raise ValueError(f"{_must_be(name, value, there, unit)}; {how}")


def _must_be(name: str, value: Any, there: Any, unit: str) -> str:
    shown = str(value) if getattr(value, "ndim", 0) == 0 else f"values in {there}"
    right = f"in {unit}" if unit not in _TEXTS else "a number without a unit"
    return f"{name} = {shown}: must be {right}"
