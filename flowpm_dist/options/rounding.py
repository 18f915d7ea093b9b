"""Numbers that a message advises: few digits, on the side that will do."""

from __future__ import annotations

import math
from collections.abc import Callable


def rounded_down(value: float, digits: int = 3) -> str:
    """Returns a number above 0, or the next one below it of so many digits, as a text."""
    return _rounded(math.floor, value, digits)


def rounded_up(value: float, digits: int = 3) -> str:
    """Returns a number above 0, or the next one above it of so many digits, as a text."""
    return _rounded(math.ceil, value, digits)


def _rounded(whole: Callable[[float], int], value: float, digits: int) -> str:
    places = digits - 1 - math.floor(math.log10(value))
    unit = 10.0**-places
    return f"{whole(value / unit) * unit:.{digits}g}"
