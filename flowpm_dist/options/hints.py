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

MOVED = {
    "model.structure": "observation.structure",
    "model.redshift_space": "observation.redshift_space",
    "model.bias": "observation.bias",
    "model.error": "likelihood.error",
    "data.kind": "observation.kind",
    "data.sigma": "observation.sigma",
    "data.mean_count": "observation.mean_count",
    "data.mask": "observation.mask",
}
"""The present names of keys of run files that stood in another section."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the known name most like this one, or an empty text."""
    folded = {k.lower(): k for k in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.4)
    return f"; did you mean {folded[match[0]]}?" if match else ""
