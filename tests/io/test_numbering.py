"""Numberings of lattices: the right one is found, and none where particles are sorted otherwise."""

import numpy as np
import pytest

from flowpm_dist.io.numbering import best_numbering, numberings, spreads

N, BOX = 16, 64.0
GRID, SIZE = (N, N, N), (BOX, BOX, BOX)
NUMBERINGS = list(numberings(GRID))


def found(numbers, positions):
    """From two parts of the particles, as two ranks would have them."""
    halves = [slice(0, N**3 // 2), slice(N**3 // 2, None)]
    sums = sum(spreads(numbers[half], positions[half], SIZE, GRID) for half in halves)
    return best_numbering(sums, SIZE, GRID)


def test_the_numberings_are_as_they_are_described():
    """By rows, by columns, and in tiles of 2, 4 and 8 sites by both."""
    grid = (4, 6, 8)
    x, y, z = np.meshgrid(*map(np.arange, grid), indexing="ij")
    rows, columns = (x * 6 + y) * 8 + z, (z * 6 + y) * 4 + x
    tiles = ((x // 2) * 3 + y // 2) * 4 + z // 2
    inner = [(x % 2 * 2 + y % 2) * 2 + z % 2, (z % 2 * 2 + y % 2) * 2 + x % 2]
    expected = [rows, columns, *(8 * tiles + each for each in inner)]
    sites = np.stack([x, y, z], axis=-1)
    for numbering, number in zip(numberings(grid), expected, strict=True):
        np.testing.assert_array_equal(numbering.sites(number), sites)
    assert [n.tile[0] for n in NUMBERINGS] == [1, 16, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize("numbering", NUMBERINGS, ids=str)
def test_the_right_numbering_is_found(numbering):
    """Of particles that have moved by a third of a cell, from a lattice shifted by half a cell."""
    rng = np.random.default_rng(0)
    numbers = rng.permutation(N**3)
    moved = rng.normal(scale=1.3, size=(N**3, 3))
    positions = (numbering.sites(numbers) + 0.5) * 4 + moved
    positions[7] = np.nan
    best, deviation = found(numbers, positions % BOX)
    assert best == numbering
    assert deviation == pytest.approx(1.3, rel=0.1)


def test_large_displacements_are_taken_for_a_lattice_by_rows_or_columns():
    """Of an eighth of the box, along an axis."""
    rng = np.random.default_rng(1)
    for numbering in NUMBERINGS[:2]:
        numbers = rng.permutation(N**3)
        positions = numbering.sites(numbers) * 4 + rng.normal(scale=8, size=(N**3, 3))
        assert found(numbers, positions % BOX)[0] == numbering


@pytest.mark.parametrize("cells", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("curve", ["rows", "slabs", "morton"])
def test_particles_that_are_sorted_into_cells_number_no_lattice(cells, curve):
    """As SWIFT and tree codes write them: their order tells where they are, more or less."""
    positions = np.random.default_rng(2).uniform(0, BOX, (N**3, 3))
    x, y, z = (positions * cells / BOX).astype(int).T
    keys = {
        "rows": (x * cells + y) * cells + z,
        "slabs": x,
        "morton": sum(
            ((axis >> bit) & 1) << (3 * bit + shift)
            for bit in range(6)
            for shift, axis in enumerate((z, y, x))
        ),
    }
    order = np.argsort(keys[curve], kind="stable")
    best, deviation = found(np.arange(N**3), positions[order])
    assert best is None and deviation > 0
