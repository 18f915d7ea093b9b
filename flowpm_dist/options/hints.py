"""Hints at what a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

RENAMED = {
    "differentiation": "adjoint",
    "force_mesh": "mesh_factor",
    "gradient": "force_gradient",
}
"""The present names of options that had another one."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the known name most like this one, or an empty text."""
    folded = {k.lower(): k for k in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.4)
    return f"; did you mean {folded[match[0]]}?" if match else ""
