"""The mesh that is taken for a number of ranks."""

from __future__ import annotations

import math

import pytest

from flowpm_dist.grid.decomposition import (
    COLLECTIVE,
    HALO,
    StepTraffic,
    default_mesh,
    fitting_shapes,
    misfits,
    parse_mesh,
    why_default_mesh,
)


@pytest.mark.parametrize(
    ("ranks", "grid", "mesh"),
    [
        (1, (64, 64, 64), "row:1,col:1"),
        (2, (64, 64, 64), "row:2,col:1"),
        (4, (32, 32, 32), "row:4,col:1"),
        (3, (30, 30, 30), "row:3,col:1"),
        (3, (16, 12, 10), "row:1,col:3"),
        (5, (60, 60, 60), "row:5,col:1"),
        (15, (30, 30, 30), "row:5,col:3"),
        (64, (128, 128, 128), "row:8,col:8"),
        (7, (14, 64, 64), "row:7,col:1"),
        (1024, (8192, 8192, 8192), "row:32,col:32"),
        (8192, (8192, 8192, 8192), "row:128,col:64"),
    ],
)
def test_default_mesh(ranks: int, grid: tuple[int, int, int], mesh: str) -> None:
    """Slabs while they are thick, then pencils, for odd numbers too."""
    assert default_mesh(ranks, grid) == mesh
    assert not misfits(parse_mesh(mesh), grid, ranks)
    assert why_default_mesh(ranks, grid)


def test_it_needs_the_least_exchange() -> None:
    """The best of all that fit, by bytes and collectives."""
    grid = (96, 96, 96)
    for ranks in (n for n in range(1, 97) if fitting_shapes(n, grid)):

        def cost(row: int, col: int) -> int:
            total = StepTraffic(grid, row, col, HALO).total
            return total.sent + COLLECTIVE * total.collectives

        axes = parse_mesh(default_mesh(ranks, grid))
        shapes = [(row, col) for row in range(1, 97) for col in range(1, 97) if row * col == ranks]
        least = min(cost(*shape) for shape in shapes if 96 % shape[0] == 96 % shape[1] == 0)
        assert cost(axes["row"], axes["col"]) == least
        assert math.prod(axes.values()) == ranks


def test_numbers_of_ranks_that_would_do() -> None:
    with pytest.raises(ValueError, match="no mesh of 7 ranks .* 6 or 8 ranks would do"):
        default_mesh(7, (24, 24, 24))
    assert why_default_mesh(49, (49, 7, 8)).startswith("of the 2 meshes")
    assert why_default_mesh(5, (10, 6, 6)) == "it is the only mesh of 5 ranks that divides the grid"
