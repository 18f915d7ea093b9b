"""How a grid is cut into the blocks of a mesh of ranks: `row` cuts x, `col` cuts y.

A batch of volumes is cut by `replica`.

Nothing here imports TensorFlow: it is asked before a job starts.
"""

from __future__ import annotations

import functools
import itertools
import math

from flowpm_dist.grid.step_traffic import StepTraffic
from flowpm_dist.options import nearest
from meshimpl.mesh_shape import parse_mesh_shape

MESH_AXES = ("replica", "row", "col")
HALO = 8
"""Width of the halo for which a mesh is chosen [cells]: that of a run is known only later."""
COLLECTIVE = 2**20
"""What a collective costs, however small: as long as so many bytes take."""

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
    """The mesh for a number of ranks: the one whose ranks send least in a step.

    What counts are bytes and the number of collectives. So slabs, which have half as many of both
    in a transform, are taken while they are thick, and pencils where halos outweigh thin slabs.

    Returns:
        Such as "row:2,col:1".

    Raises:
        ValueError: no mesh of that many ranks divides the grid.
    """
    fits = fitting_shapes(ranks, grid)
    if not fits:
        told = f"no mesh of {ranks} ranks divides the grid {list(grid)} along x and y"
        near = (n for away in range(1, ranks) for n in (ranks - away, ranks + away))
        would = itertools.islice((n for n in near if fitting_shapes(n, grid)), 2)
        raise ValueError(f"{told}; {' or '.join(map(str, sorted(would)))} ranks would do")
    row, col = min(fits, key=lambda fit: _cost(grid, *fit))
    return f"row:{row},col:{col}"


def why_default_mesh(ranks: int, grid: Grid) -> str:
    """Returns a sentence that says why `default_mesh` is the mesh it is."""
    fits = fitting_shapes(ranks, grid)
    if ranks == 1:
        return "one rank has the whole box"
    if len(fits) == 1:
        return f"it is the only mesh of {ranks} ranks that divides the grid"
    least, other = sorted(fits, key=lambda fit: _cost(grid, *fit))[:2]
    sent = [StepTraffic(grid, *fit, HALO).total for fit in (least, other)]
    mib = [f"{total.sent / 2**20:,.2f} MiB" for total in sent]
    return (
        f"of the {len(fits)} meshes that divide the grid it needs the least exchange in a step of "
        f"a simulation: {sent[0].collectives} collectives and {mib[0]} from each rank with a halo "
        f"of {HALO} cells, row:{other[0]},col:{other[1]} {sent[1].collectives} and {mib[1]}"
    )


def fitting_shapes(ranks: int, grid: Grid) -> list[tuple[int, int]]:
    """Returns the rows and columns of all meshes of a number of ranks that divide a grid."""
    rows = (row for row in _divisors(grid[0]) if ranks % row == 0)
    return [(row, ranks // row) for row in rows if grid[1] % (ranks // row) == 0]


@functools.cache
def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number, the largest first."""
    return [n for n in range(number, 0, -1) if number % n == 0]


def _cost(grid: Grid, row: int, col: int) -> int:
    total = StepTraffic(grid, row, col, HALO).total
    return total.sent + COLLECTIVE * total.collectives
