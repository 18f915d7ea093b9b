"""The groups of ranks of a mesh, found by numbering its places."""

from __future__ import annotations

import itertools
import math

import numpy as np

from meshimpl import ProcessMesh


def groups_of(mesh: ProcessMesh) -> dict[tuple[str, ...], list[tuple[int, ...]]]:
    """The groups of ranks that differ only in some axes, for each set of axes."""
    numbers, axes = np.arange(mesh.size).reshape(mesh.shape), range(len(mesh.axes))
    groups = {}
    for chosen in itertools.chain(*(itertools.combinations(axes, n + 1) for n in axes)):
        kept = [axis for axis in axes if axis not in chosen]
        length = math.prod(mesh.shape[axis] for axis in chosen)
        table = numbers.transpose([*kept, *chosen]).reshape(-1, length)
        groups[tuple(mesh.names[axis] for axis in chosen)] = [*map(tuple, table.tolist())]
    return groups
