"""Pages of HTML that need no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
    figures = (
        element(
            "figure",
            element("figcaption", section) if section else Html(),
            rows_of([], group),
            class_="card",
        )
        for section, group in groups.items()
    )
    return element("div", *figures, class_="columns")


def rows_of(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Html:
    """Returns a table of rows, each with a name."""
    top = (element("th", head, scope="col") for head in heads)
    lines = (
        element("tr", element("th", key, scope="row"), *(element("td", cell) for cell in row))
        for key, row in rows.items()
    )
    head = element("thead", element("tr", *top)) if heads else Html()
    return element("div", element("table", head, element("tbody", *lines)), class_="wide")


def note(text: str) -> Html:
    """Returns a short remark."""
    return element("p", text, class_="note")


MARK = Html(f'<meta name="generator" content="{GENERATOR}">')
"""What a page of ours has near its beginning."""


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
