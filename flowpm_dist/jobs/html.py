"""Pages of HTML that need no other file and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowpm_dist.io.files import GENERATOR
from flowpm_dist.options.html import Html, element

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = Path(__file__).with_name("report.css")


def in_groups(rows: Mapping[str, Sequence[str]]) -> Html:
    """Returns a table for each section of keys such as "box.grid", and one for the other keys."""
    groups: dict[str, dict[str, Sequence[str]]] = {}
    for key, row in rows.items():
        section, _, name = key.rpartition(".") if " " not in key else ("", "", key)
        groups.setdefault(section, {})[name] = row
    figures = (card(section, rows_of([], group)) for section, group in groups.items())
    return element("div", *figures, class_="columns")


def card(caption: str, content: Html) -> Html:
    """Returns a figure; its caption may be empty."""
    above = element("figcaption", caption) if caption else Html()
    return element("figure", above, content, class_="card")


def rows_of(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Html:
    """Returns a table of rows, each with a name."""
    top = (element("th", head, scope="col") for head in heads)
    lines = (
        element("tr", element("th", key, scope="row"), *(element("td", cell) for cell in row))
        for key, row in rows.items()
    )
    head = element("thead", element("tr", *top)) if heads else Html()
    return element("div", element("table", head, element("tbody", *lines)), class_="wide")


def bars(title: str, durations: Any) -> Html:
    """Returns durations as bars; nothing if a value is not a mapping from names to durations."""
    if not isinstance(durations, Mapping):
        return Html()
    seconds = {name: _seconds(value) for name, value in durations.items()}
    known = {name: value for name, value in seconds.items() if value is not None}
    total = sum(known.values())
    if len(known) < len(seconds) or not 0 < total < math.inf:
        return Html()
    most = max(known.values())
    parts = []
    for name, value in sorted(known.items(), key=lambda item: -item[1]):
        bar = element("div", Html(), style=f"width: {100 * value / most:.1f}%")
        share = f"{value:.3g} s, {100 * value / total:.0f} %"
        parts += [element("span", name), element("div", bar), element("span", share)]
    heading = element("figcaption", title.replace("_", " "))
    return Html(heading + element("div", *parts, class_="bars"))


def _seconds(value: Any) -> float | None:
    """Returns a duration, or the sum of a list of durations; None for anything else."""
    parts = value if isinstance(value, list) else [value]
    known = [part for part in parts if type(part) in (int, float) and part >= 0]
    return float(sum(known)) if len(known) == len(parts) else None


def note(text: str) -> Html:
    """Returns a short remark."""
    return element("p", text, class_="note")


MARK = Html(f'<meta name="generator" content="{GENERATOR}">')
"""Text near the beginning of every page that this package writes."""


def whole_page(title: str, facts: Sequence[str], sections: Mapping[str, Html]) -> str:
    """Returns a page.

    Args:
        title: its title.
        facts: lines below the title.
        sections: the contents by their headings, which are linked at the top.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        MARK,
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} - {GENERATOR}"),
        element("style", Html("\n" + _STYLE.read_text(encoding="utf-8"))),
    )
    links = (element("a", name, href=f"#{name.lower()}") for name in sections)
    top = element(
        "header",
        element("h1", title),
        *(element("p", fact) for fact in facts),
        element("nav", *links),
    )
    body = (
        element("section", element("h2", name), content, id=name.lower())
        for name, content in sections.items()
    )
    whole = element("html", head, element("body", top, element("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"
