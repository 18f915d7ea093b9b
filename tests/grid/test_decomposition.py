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
    mesh_factor_problem,
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
    """The best of all that fit, by bytes, collectives and the block with its halo."""
    grid = (96, 96, 96)
    for ranks in (n for n in range(1, 97) if fitting_shapes(n, grid)):

        def cost(row: int, col: int) -> int:
            step = StepTraffic(grid, row, col, HALO)
            total, (x, y) = step.total, (2 * (HALO + 2) * (parts > 1) for parts in (row, col))
            padded = (96 // row + x) * (96 // col + y) * 96
            return total.sent + COLLECTIVE * total.collectives + padded

        axes = parse_mesh(default_mesh(ranks, grid))
        shapes = [(row, col) for row in range(1, 97) for col in range(1, 97) if row * col == ranks]
        least = min(cost(*shape) for shape in shapes if 96 % shape[0] == 96 % shape[1] == 0)
        assert cost(axes["row"], axes["col"]) == least
        assert math.prod(axes.values()) == ranks


def test_the_halo_of_a_run_decides() -> None:
    """Slabs of 64 planes for the usual halo; a halo of 45 planes on both sides makes pencils."""
    grid = (1024, 1024, 1024)
    assert default_mesh(16, grid) == default_mesh(16, grid, halo=HALO) == "row:16,col:1"
    assert default_mesh(16, grid, halo=45) == "row:4,col:4"
    assert "with a halo of 45 cells; row:8,col:2" in why_default_mesh(16, grid, halo=45)
    assert default_mesh(8192, (4096,) * 3, halo=45) == "row:128,col:64"
    step = StepTraffic((4096, 4096, 4096), 128, 64, 45)
    assert step.padded_cells == (32 + 94) * (64 + 94) * 4096
    assert step.padded_cells / (32 * 64 * 4096) == pytest.approx(9.7, abs=0.03)
    slabs = StepTraffic((32, 32, 32), 4, 1, 3, "spectral", pyramid="0.1%")
    assert slabs.padded_cells == (8 + 2 * 12) * 32 * 32


def test_numbers_of_ranks_that_would_do() -> None:
    with pytest.raises(ValueError, match="no mesh of 7 ranks .* 6 or 8 ranks would do"):
        default_mesh(7, (24, 24, 24))
    assert why_default_mesh(49, (49, 7, 8)).startswith("2 meshes divide the grid")
    assert why_default_mesh(5, (10, 6, 6)) == "it is the only mesh of 5 ranks that divides the grid"


@pytest.mark.parametrize("factor", [1, 1.125, 1.25, 1.5, 1.75, 2, 3, 4, 4.0])
def test_mesh_factors_that_fit(factor: float) -> None:
    axes = parse_mesh("row:2,col:4")
    assert mesh_factor_problem(factor, (64, 32, 48), axes) is None
    assert mesh_factor_problem(4 / 3, (12, 24, 48), axes) is None


@pytest.mark.parametrize(
    ("factor", "grid", "mesh", "near"),
    [
        (1.3, (64, 64, 64), "row:1", "1.28125 and 1.3125"),
        (1.28125, (64, 64, 64), "row:1,col:4", "1.25 and 1.3125"),
        (1.5, (64, 64, 64), "row:64", "1 and 2"),
        (1.25, (12, 12, 12), "row:1", "1.16666666667 and 1.33333333333"),  # 15 cells
        (1.4, (12, 18, 12), "row:1", "1.33333333333 and 1.66666666667"),
        (1.01, (12, 18, 12), "row:2", "1 and 1.33333333333"),
    ],
)
def test_nearest_mesh_factors(
    factor: float, grid: tuple[int, int, int], mesh: str, near: str
) -> None:
    """By hand; both of them fit."""
    axes = parse_mesh(mesh)
    problem = mesh_factor_problem(factor, grid, axes)
    assert problem is not None and problem.endswith(f"nearest factors that give one are {near}")
    assert not any(mesh_factor_problem(float(n), grid, axes) for n in near.split(" and "))


def test_a_mesh_divides_the_coarse_mesh_of_a_pyramid() -> None:
    """24 cells have 6 coarse ones. Its halos are wide, so thick blocks are square."""
    assert default_mesh(12, (24, 24, 24)) == "row:12,col:1"
    assert default_mesh(12, (24, 24, 24), pyramid="1%") == "row:6,col:2"
    assert default_mesh(32, (1024, 1024, 1024)) == "row:32,col:1"
    assert default_mesh(32, (1024, 1024, 1024), pyramid="1%") == "row:8,col:4"
    with pytest.raises(ValueError, match=r"and its coarse mesh \[8, 8, 8\] along x and y"):
        default_mesh(256, (32, 32, 32), pyramid="0.1%")
    (wrong,) = misfits(parse_mesh("row:16"), (32, 32, 32), 16, pyramid="0.1%")
    assert "must be multiples of 64, 8, 8 on row:16,col:1" in wrong
    assert why_default_mesh(12, (24, 24, 24), "1%").startswith("2 meshes divide the grid")


def test_a_mesh_divides_the_force_mesh_as_well() -> None:
    """Two ranks are no slabs of a mesh of 18 x 18 x 18 in four; pencils are."""
    assert default_mesh(4, (12, 12, 12)) == "row:4,col:1"
    assert default_mesh(4, (12, 12, 12), 1.5) == "row:2,col:2"
    with pytest.raises(ValueError, match=r"grid \[4, 4, 4\] and the force mesh \[6, 6, 6\]"):
        default_mesh(16, (4, 4, 4), 1.5)
    (wrong,) = misfits(parse_mesh("row:4"), (12, 12, 12), 4, mesh_factor=1.5)
    assert "mesh_factor = 1.5" in wrong and "that row:4 can divide" in wrong
