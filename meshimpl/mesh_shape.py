"""The shape of a mesh of ranks as text, `row:2,col:2`, and its groups. Imports no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MeshShape = str | Mapping[str, int] | Iterable[tuple[str, int]]
Ranks = tuple[int, ...]
"""The increasing ranks of a group."""


class MeshError(ValueError):
    """An invalid mesh: an axis named twice, or a size that is not the number of ranks."""


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


@dataclass(frozen=True, order=True)
class Lines:
    """Groups of ranks at equal distances, which make up a job: each of its ranks is in one.

    Attributes:
        stride: from one rank of a group to the next.
        length: ranks of a group; `stride * length` divides the number of ranks.
    """

    stride: int
    length: int

    def of(self, rank: int) -> Ranks:
        """Returns the group that a rank is in."""
        first = rank - rank // self.stride % self.length * self.stride
        return tuple(range(first, first + self.stride * self.length, self.stride))

    def groups(self, size: int) -> list[Ranks]:
        """Returns the groups of a job of `size` ranks."""
        return [self.of(rank) for rank in range(size) if rank // self.stride % self.length == 0]


def lines_of(axes: Sequence[tuple[str, int]]) -> list[Lines]:
    """Returns the groups of at least two ranks that a mesh registers with the engine, sorted.

    These are the lines of every axis, and the blocks of consecutive ranks that share their place
    along the first axes, such as a replica. Other planes have no set of their own (`Plane`): each
    set of a rank costs a round of negotiation in every cycle, whether it is used or not.
    """
    lines, block = set(), 1
    for _, size in reversed(axes):
        if size > 1:
            lines |= {Lines(block, size), Lines(1, block * size)}
        block *= size
    return sorted(lines)
