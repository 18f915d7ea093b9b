"""HTML of objects: elements that escape, and what notebooks show of an object."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Mapping
from html import escape

WIDTH = 240
"""Width of a picture in a notebook [pixels]."""
_VOID = ("img", "meta")


class Html(str):
    """Text that is HTML already."""


def element(name: str, /, *inside: str, **attributes: str) -> Html:
    """Returns an element. Text that is not `Html` is escaped, attributes always are.

    Args:
        name: name of the element.
        inside: its children.
        attributes: its attributes, of which empty ones are left out; an underscore in a name is a
            hyphen, and at the end nothing.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    text = "".join(part if isinstance(part, Html) else escape(part) for part in inside)
    return Html(f"<{name}{written}>{text}</{name}>")


def png_source(data: bytes) -> str:
    """Returns a PNG file as the source of an image."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def as_html(
    shown: object,
    facts: Callable[[], Mapping[str, object]],
    picture: Callable[[], bytes | None] = lambda: None,
) -> str:
    """Returns the HTML of an object for a notebook. It never raises: a part that fails is left out.

    Args:
        shown: the object, whose class is the title.
        facts: a function that returns texts or numbers by name.
        picture: a function that returns a PNG file, or None.
    """
    parts = [element("b", type(shown).__name__)]
    with contextlib.suppress(Exception):
        rows = [element("tr", element("th", n), element("td", str(v))) for n, v in facts().items()]
        parts.append(element("table", *rows))
    with contextlib.suppress(Exception):
        if png := picture():
            parts.append(element("img", width=str(WIDTH), src=png_source(png)))
    return "\n".join(parts)
