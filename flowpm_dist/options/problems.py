"""Mistakes in options, and what messages about them advise: likely names, rounded numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A mistake in options.

    Attributes:
        key: the key that is wrong, such as "a_start", or "evolution.a_start" in a whole run file;
            an empty text for all of the options.
        what: what is wrong, and what is allowed.
    """

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key} {self.what}".lstrip()


class ProblemsError(ValueError):
    """Values that are valid each, but not together.

    Attributes:
        problems: all of them; their keys are those of the model that found them.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the known name most like this one, or an empty text."""
    folded = {k.lower(): k for k in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.4)
    return f"; did you mean {folded[match[0]]}?" if match else ""


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
