"""Equations of the documentation as MathML, made when the site is built.

A browser shows MathML without a script. docs/assets/site.css chooses the font.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What arithmatex writes in its generic form.
MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S
)
UNKNOWN = re.compile(r">\s*(\\[A-Za-z]+)|<mi>(&)</mi>")
STYLED = re.compile(r'<mi mathvariant="(bold|bold-italic)">([^<]+)</mi>')
# Of these names, the argument stands apart unless it is in parentheses.
FUNCTION = re.compile(r"<mi>(arg|cos|det|exp|lim|ln|log|max|min|sin|tan)</mi>(?!<mo|</m)")
# Letters of these styles have code points of their own; browsers know no other way to them.
STARTS = {
    "bold": {"A": 0x1D400, "a": 0x1D41A, "Α": 0x1D6A8, "α": 0x1D6C2},
    "bold-italic": {"A": 0x1D468, "a": 0x1D482, "Α": 0x1D71C, "α": 0x1D736},
}


class EquationError(Exception):
    """An equation uses a command that is not known."""


def mathml(tex: str, *, block: bool) -> str:
    """Returns an equation as MathML.

    Args:
        tex: the equation in LaTeX, without dollar signs.
        block: whether it stands in a line of its own.

    Raises:
        EquationError: the equation uses a command that is not known, or cannot be read.
    """
    text = tex.strip().replace("{aligned}", "{align*}")
    try:
        found = convert(text, display="block" if block else "inline")
    except Exception as error:
        raise EquationError(f"{tex.strip()}: {error or type(error).__name__}") from error
    bare = text.replace(r"\{", "").replace(r"\}", "")
    if bare.count("{") != bare.count("}"):
        raise EquationError(f"{tex.strip()}: braces do not match")
    if unknown := UNKNOWN.search(found):
        raise EquationError(f"{tex.strip()}: {unknown[1] or unknown[2]} is not known")
    found = FUNCTION.sub(r'<mi>\1</mi><mspace width="0.167em" />', found)
    return STYLED.sub(_styled, found)


def _styled(match: re.Match[str]) -> str:
    style, letters = match[1], html.unescape(match[2])
    return f"<mi>{''.join(_bold(each, STARTS[style]) for each in letters)}</mi>"


def _bold(letter: str, starts: dict[str, int]) -> str:
    for first, code in starts.items():
        if 0 <= (place := ord(letter) - ord(first)) < 26:
            return chr(code + place)
    return letter


def with_mathml(page: str) -> str:
    """Returns the HTML of a page with its equations as MathML.

    Raises:
        EquationError: an equation cannot be read.
    """
    return MARKED.sub(
        lambda match: mathml(html.unescape(match["tex"]), block=match["open"] == "["), page
    )
