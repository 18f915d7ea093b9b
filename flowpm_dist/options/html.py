"""Objects as notebooks show them: a table of facts, and a picture."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Mapping
from html import escape

WIDTH = 240
"""Width of a picture [pixels]."""


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
    parts = [f"<b>{escape(type(shown).__name__)}</b>"]
    with contextlib.suppress(Exception):
        rows = (
            f"<tr><th>{escape(n)}</th><td>{escape(str(v))}</td></tr>" for n, v in facts().items()
        )
        parts.append(f"<table>{''.join(rows)}</table>")
    with contextlib.suppress(Exception):
        if png := picture():
            data = base64.b64encode(png).decode()
            parts.append(f'<img width="{WIDTH}" src="data:image/png;base64,{data}">')
    return "\n".join(parts)
