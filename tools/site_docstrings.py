"""Lets mkdocstrings read what this project writes in its own way.

Packages import names late, several arguments share an entry, and a shape stands before a unit, as
in "[bin] [h/Mpc]", which Markdown would read as a link.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

SECTION = re.compile(
    r"^(?P<indent> *)(Args|Attributes):\n(?P<body>(?:(?P=indent) +\S.*\n?|\n)+)", re.M
)
SHAPE = re.compile(r"\[([^\[\]`]*)\](?=\s*\[)")
ENTRY = re.compile(r"^ *(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+)(?=:)")


class OwnConventions(griffe.Extension):
    """Adds names that packages import late, and divides entries that several arguments share."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """See `griffe.Extension`; adds the names in `_HOMES` (`meshimpl.imports.lazy_names`)."""
        self._add(pkg)

    def _add(self, module: griffe.Module) -> None:
        if "_HOMES" in module.members:
            homes = ast.literal_eval(str(module["_HOMES"].value))
            for name, home in homes.items():
                if name not in module.members:
                    alias = griffe.Alias(name, f"{module.path}.{home}.{name}", parent=module)
                    module.set_member(name, alias)
        for inner in module.modules.values():
            if not inner.is_alias:
                self._add(inner)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """See `griffe.Extension`."""
        if obj.docstring is not None:
            text = SECTION.sub(_divided, obj.docstring.value)
            obj.docstring.value = SHAPE.sub(r"\\[\1\\]", text)


def _divided(section: re.Match[str]) -> str:
    """Returns a section of a docstring in which "a, b: text" is "a: text" and "b: text"."""
    start, body = section[0][: -len(section["body"])], section["body"]
    indent = re.search(r"^ +(?=\S)", body, re.M)
    if indent is None:
        return section[0]
    entries = re.split(rf"^(?={indent[0]}\S)", body, flags=re.M)
    found = []
    for entry in entries:
        if match := ENTRY.match(entry):
            rest = entry[match.end() :]
            rest = rest if rest.endswith("\n") else f"{rest}\n"
            found += [f"{indent[0]}{name}{rest}" for name in match["names"].split(", ")]
        else:
            found.append(entry)
    return start + "".join(found)
