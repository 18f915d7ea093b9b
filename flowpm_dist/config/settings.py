"""Keys of a run file that are set from outside: on the command line, or from Python."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from flowpm_dist.io.errors import UserError

LEFT_OUT = object()
"""Value of a key that is to be left out, whatever the run file says."""

Settings = Mapping[tuple[str, str], Any]
"""Values by section and key."""

_SETTING = re.compile(r"\s*(\w+)\.(\w+)\s*=\s*(.*?)\s*", re.DOTALL)
_WORD = re.compile(r"[^\s\"'\[\]{}=,]+(?:[ ,][^\s\"'\[\]{}=]+)*")


def parse_settings(texts: Iterable[str]) -> Settings:
    """Returns the values that texts such as "evolution.steps=20" give.

    Args:
        texts: each with a section, a key, and a value as a run file has it. The quotes of a word
            may be left out. Without a value the key is left out. Of the same key the last counts.

    Raises:
        UserError: a text is not of this kind.
    """
    found: dict[tuple[str, str], Any] = {}
    for text in texts:
        match = _SETTING.fullmatch(text)
        if match is None:
            raise UserError(f"--set {text}: must be SECTION.KEY=VALUE, such as evolution.steps=20")
        section, key, value = match.groups()
        found[section, key] = _value(text, value) if value else LEFT_OUT
    return found


def _value(text: str, value: str) -> Any:
    try:
        table = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if _WORD.fullmatch(value):
            return value
        raise UserError(
            f'--set {text}: the value must be as in a run file, such as 3, [1, 2] or "a text"'
        ) from error
    if len(table) != 1:
        raise UserError(f"--set {text}: must be one value")
    return table["value"]


def with_settings(table: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns the tables of a run file with values in place of its own.

    Args:
        table: sections and their keys.
        settings: the values.
    """
    changed = dict(table)
    for (section, key), value in settings.items():
        keys = changed.get(section, {})
        if not isinstance(keys, Mapping):  # the check of the sections tells of it
            continue
        others = {name: kept for name, kept in keys.items() if name != key}
        changed[section] = others if value is LEFT_OUT else {**others, key: value}
    return changed
