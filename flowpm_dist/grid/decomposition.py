"""How a grid is cut into the blocks of a mesh of ranks: `row` cuts x, `col` cuts y.

A batch of volumes is cut by `replica`.

Nothing here imports TensorFlow: it is asked before a job starts.
"""

from __future__ import annotations

import math

from flowpm_dist.options import nearest
from meshimpl.mesh_shape import parse_mesh_shape

MESH_AXES = ("replica", "row", "col")
THICK = 8
"""Layers of a slab [cells] below which its halo outweighs it."""

Grid = tuple[int, int, int]


def parse_mesh(shape: str, *, batched: bool = False) -> dict[str, int]:
    """Axis sizes of a text such as `"row:2,col:2"`, in its order.

    Args:
        shape: the text.
        batched: whether there is a batch for a replica axis to cut.

    Raises:
        ValueError: not such a text, an unknown axis or one named twice, a size below 1, or a
            replica axis with more than one place, which a single simulation cannot use.
    """
    axes = dict(parse_mesh_shape(shape))
    if not axes:
        raise ValueError(f"{shape!r} names no axis; a mesh is of the form row:2,col:2")
    for name in axes:
        if name not in MESH_AXES:
            raise ValueError(f"there is no axis {name!r}{nearest(name, MESH_AXES)}")
    if axes.get("replica", 1) != 1 and not batched:
        raise ValueError(f"replica:{axes['replica']} runs a batch, and this is one simulation")
    return axes


def misfits(axes: dict[str, int], grid: Grid, ranks: int, batch: int = 1) -> list[str]:
    """Returns the reasons why a mesh does not fit, in words; empty if it fits.

    Args:
        axes: sizes by name.
        grid: cells [nx, ny, nz].
        ranks: of the job.
        batch: volumes worked on together.
    """
    wrong = []
    places = math.prod(axes.values())
    if places != ranks:
        job = "1 rank" if ranks == 1 else f"{ranks} ranks"
        wrong.append(
            f"{places} places, but the job has {job}; use --ranks {places}, or sizes that "
            f"multiply to {ranks}"
        )
    cut = {
        "replica": (batch, "volumes of the batch"),
        "row": (grid[0], "cells of x"),
        "col": (grid[1], "cells of y"),
    }
    for axis, (count, things) in cut.items():
        size = axes.get(axis, 1)
        if count % size:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            wrong.append(
                f"{axis}:{size} does not divide the {count} {things}; sizes that do: {fits}"
            )
    return wrong


def default_mesh(ranks: int, grid: Grid) -> str:
    """The mesh for a number of ranks: slabs while they stay thick, else the squarest pencils.

    Returns:
        Such as "row:2,col:1".

    Raises:
        ValueError: no mesh of that many ranks divides the grid.
    """
    shapes = [(ranks // col, col) for col in range(1, ranks + 1) if ranks % col == 0]
    fits = [(row, col) for row, col in shapes if grid[0] % row == 0 and grid[1] % col == 0]
    if not fits:
        raise ValueError(f"no mesh of {ranks} ranks divides the grid {list(grid)} along x and y")
    slabs = [(row, col) for row, col in fits if col == 1 and grid[0] // row >= THICK]
    row, col = slabs[0] if slabs else min(fits, key=lambda fit: abs(math.log(fit[0] / fit[1])))
    return f"row:{row},col:{col}"
