"""The shape of a mesh of ranks as text: `row:2,col:2`. Imports no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MeshShape = str | Mapping[str, int] | Iterable[tuple[str, int]]


class MeshError(ValueError):
    """A mesh that cannot be: an axis named twice, or a size that is not the number of ranks."""


def parse_mesh_shape(shape: MeshShape) -> tuple[tuple[str, int], ...]:
    """Returns `"row:2,col:2"` (or a mapping, or pairs) as a tuple of (axis, size).

    Raises:
        MeshError: the text has another form, an axis is named twice, or a size is below 1.
    """
    if isinstance(shape, str):
        pieces = [p.strip() for p in re.split("[,;]", shape) if p.strip()]
        matches = [re.fullmatch(r"([A-Za-z_]\w*)\s*:\s*(\d+)", p) for p in pieces]
        for piece, match in zip(pieces, matches, strict=True):
            if match is None:
                raise MeshError(
                    f"mesh shape {shape!r}: {piece!r} is not of the form axis:size, as in row:2"
                )
        axes = tuple((m.group(1), int(m.group(2))) for m in matches if m is not None)
    else:
        items = shape.items() if isinstance(shape, Mapping) else shape
        axes = tuple((str(name), int(size)) for name, size in items)
    names = [name for name, _ in axes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MeshError(f"mesh shape {format_mesh_shape(axes)}: axis {twice[0]!r} is named twice")
    for name, size in axes:
        if size < 1:
            raise MeshError(f"mesh axis {name!r} has size {size}; it must be at least 1")
    return axes


def format_mesh_shape(axes: Iterable[tuple[str, int]]) -> str:
    """Returns the text that `parse_mesh_shape` reads."""
    return ",".join(f"{name}:{size}" for name, size in axes)
