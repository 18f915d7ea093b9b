"""Pages of HTML that need no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowpm_dist.io.files import GENERATOR
from flowpm_dist.options.html import Html, element

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2330; --soft: #5d6878;
  --line: #e1e5eb; --accent: #2f5fc4; --warn: #8a5a00; --warned: #fff6e0; }
@media (prefers-color-scheme: dark) { :root { --page: #12151b; --card: #1a1f28; --text: #e4e8ee;
  --soft: #97a3b4; --line: #2c3440; --accent: #86aaf5; --warn: #f0c060; --warned: #2d2614; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, header { max-width: 72rem; margin: auto; padding: 0 1rem; }
main { padding-bottom: 3rem; }
header { padding-top: 2rem; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .7rem; font-size: 1.15rem; }
h3 { margin: 1.2rem 0 .5rem; font-size: .95rem; }
header p { margin: .4rem 0; color: var(--soft); overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin-top: .8rem; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.card, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .8rem; min-width: 0; }
figure, ul { margin: 0; }
.beside { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.warnings { background: var(--warned); color: var(--warn); border-radius: 6px;
  padding: .6rem .8rem .6rem 2rem; }
figure img { display: block; width: 100%; max-width: 46rem; margin: auto; background: #fff;
  border-radius: 6px; }
figcaption { margin-bottom: .5rem; font-weight: 600; font-size: .9rem; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .85rem; margin: .4rem 0 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .9rem .28rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; color: var(--soft); }
thead th { white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 4.5rem; }
.data td { white-space: nowrap; }
thead ~ tbody td { overflow-wrap: break-word; min-width: 6rem; }
.data tbody td { min-width: 0; }
tbody th { position: sticky; left: 0; background: var(--card); }
td.number { text-align: right; white-space: nowrap; }
thead th.number { text-align: right; }
section > :not(h2) + :not(h3) { margin-top: 1rem; }
.card details { border: 0; padding: 0; margin: 0; }
.columns { columns: 20rem; column-gap: 1rem; }
.columns > * { break-inside: avoid; margin-bottom: 1rem; }
summary { cursor: pointer; font-weight: 600; font-size: .9rem; overflow-wrap: anywhere; }
summary + * { margin-top: .6rem; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .35rem .8rem;
  align-items: center; font-size: .86rem; font-variant-numeric: tabular-nums; }
.bars > div { background: var(--line); border-radius: 4px; height: .75rem; }
.bars > div > div { background: var(--accent); border-radius: 4px; height: 100%; }
@media print { body { background: #fff; } nav { display: none; } }
"""


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
        element("style", Html(_STYLE)),
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
