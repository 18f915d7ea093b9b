"""Keys that have a meaning only beside some values of another key.

Each kind of run file declares them once. A file that gives one where it has no meaning is refused,
and a resolved file leaves it out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flowpm_dist.config.checks import ParsedRunFile, Problem, as_written
from flowpm_dist.options import Options


@dataclass(frozen=True)
class DependentKeys:
    """Keys that have a meaning only beside some values of another key.

    Attributes:
        other: that key, as "section.key".
        values: those values, of which None is that of a key that is not given; no values: any, as
            long as the other key is given.
        keys: the keys, as "section.key".
        goes_with: what messages call the other key and its values, where that says more.
        default_may_stand: whether a key may be given all the same if its value is the default.
    """

    other: str
    values: tuple[Any, ...]
    keys: tuple[str, ...]
    goes_with: str = ""
    default_may_stand: bool = False

    def idle(self, config: Options) -> tuple[str, ...]:
        """Returns those of the keys that have no meaning in a checked run file."""
        section, _, key = self.other.partition(".")
        options = getattr(config, section)
        if not hasattr(options, key.partition(".")[0]):  # no such section, or of another kind
            return ()
        found = operator.attrgetter(key)(options)
        return () if self._wanted(found) else self.keys

    def problems(self, file: ParsedRunFile) -> Iterator[Problem]:
        """Yield a problem for each key that is given where it has no meaning."""
        section, _, key = self.other.partition(".")
        found = file.value(section, key)
        # What is there but wrong has a problem of its own.
        wrong = found is None and (self.values or key in file.given.get(section, {}))
        if section not in file.sections or wrong or self._wanted(found):
            return
        beside = f"{self.other} = {' or '.join(map(as_written, self.values))}"
        told = self.goes_with or f"{beside}, not with {as_written(found)}"
        for name in self.keys:
            if self._is_given(name, file):
                shown = as_written(file.given[name.partition(".")[0]][name.partition(".")[2]])
                yield Problem(name, f"= {shown}: goes with {told}")

    def _wanted(self, found: Any) -> bool:
        return found in self.values if self.values else found is not None

    def _is_given(self, name: str, file: ParsedRunFile) -> bool:
        section, _, key = name.partition(".")
        value = file.value(section, key)
        if key not in file.given.get(section, {}) or value is None:
            return False
        field = type(file.sections[section]).model_fields[key]
        return not (self.default_may_stand and value == field.default)


def idle_keys(config: Options, declared: Iterable[DependentKeys]) -> dict[str, list[str]]:
    """Returns for each section of a checked run file the keys that have no meaning."""
    idle: dict[str, list[str]] = {}
    for each in declared:
        for name in each.idle(config):
            section, _, key = name.partition(".")
            idle.setdefault(section, []).append(key)
    return idle


def idle_key_problems(file: ParsedRunFile, declared: Iterable[DependentKeys]) -> Iterator[Problem]:
    """Yield a problem for each key that is given where it has no meaning."""
    for each in declared:
        yield from each.problems(file)
