"""The correlation function on every mesh: against sums over cells, known powers and pairs."""

from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf
from numpy_modes import BATCH_MESHES, GRID, SIZE, Modes, box_on, field_on, painted, random
from ranks import process_mesh
from scipy.spatial import cKDTree

from flowpm_dist.grid.field import Field
from flowpm_dist.statistics import STATISTICS, correlation_function, correlation_multipoles
from flowpm_dist.statistics.register import statistic_named

EDGES = np.array([0.0, 8.0, 13.0, 25.0])
CELL = np.array(SIZE) / GRID


def distances(grid=GRID, size=SIZE):
    """Distance and components of each separation of cells [x, y, z]."""
    along = [
        s / n * (np.arange(n) - n * (np.arange(n) > n // 2))
        for n, s in zip(grid, size, strict=True)
    ]
    vectors = np.stack(np.meshgrid(*along, indexing="ij"))
    return np.sqrt((vectors**2).sum(axis=0)), vectors


def summed(field, edges, order=0, axis=2):
    """xi_l in each bin by the product of the field with itself, moved by each separation."""
    r, vectors = distances()
    delta = field - field.mean()
    sums = np.zeros((2, len(edges) - 1))
    for n in np.ndindex(*GRID):
        bin_ = np.searchsorted(edges, r[n] * (1 + 1e-9), side="right") - 1
        if n != (0, 0, 0) and 0 <= bin_ < len(edges) - 1:
            xi = (delta * np.roll(delta, n, (0, 1, 2))).mean()
            mu = vectors[axis][n] / r[n]
            legendre = np.polynomial.legendre.Legendre.basis(order)(mu)
            sums[:, bin_] += 1, (2 * order + 1) * legendre * xi
    return sums


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.every_split
def test_all_pairs_of_cells(mesh):
    box, modes, a = box_on(mesh), Modes(), random(1) + 1
    field, shifted = field_on(box, a), field_on(box, random(2) + 1)
    edges = CELL.max() * (np.arange(5) + 0.5)  # up to half the shortest side
    plain = correlation_function(field)
    separations, sums = summed(a, edges)
    np.testing.assert_array_equal(plain.separations, separations)
    np.testing.assert_allclose(plain.xi, sums / separations, rtol=0, atol=1e-14)
    r = distances()[0]
    means = [r[(r >= low - 1e-6) & (r < high - 1e-6)].mean() for low, high in pairwise(edges)]
    np.testing.assert_allclose(plain.r, means, rtol=1e-12)
    poles = correlation_multipoles(field, axis="x", orders=(0, 2, 4), bins=EDGES, window="tsc")
    cleaned = np.fft.irfftn(modes.spectrum(a, window="tsc"), GRID, axes=(0, 1, 2))
    for order, xi in zip(poles.orders, poles.xi, strict=True):
        separations, sums = summed(cleaned, EDGES, order, axis=0)
        scale = cleaned.var()
        np.testing.assert_allclose(xi, sums / separations, rtol=0, atol=1e-12 * scale)
    both = correlation_function(field, bins=EDGES, interlaced=shifted)
    power = np.abs(modes.spectrum(a, random(2) + 1)) ** 2 / np.prod(GRID)
    power[0, 0, 0] = 0
    xi = np.fft.irfftn(power, GRID, axes=(0, 1, 2))
    inside = [(r > 0) & (r >= low - 1e-6) & (r < high - 1e-6) for low, high in pairwise(EDGES)]
    np.testing.assert_allclose(both.xi, [xi[i].mean() for i in inside], rtol=0, atol=1e-13)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shape", BATCH_MESHES)
def test_a_batch_of_a_known_power(shape):
    """P = exp(-k^2 s^2 / 2) in each mode: xi is a Gaussian, without the mean of the box."""
    batch, grid, size, width = 2, (24, 24, 24), (72.0,) * 3, 9.0
    box = box_on(process_mesh(shape), batch, grid, size)
    modes = Modes(grid, size)
    noise = np.fft.rfftn(random(3, batch, *grid), axes=(1, 2, 3))
    amplitude = np.sqrt(np.exp(-0.5 * (modes.k * width) ** 2) / box.volume) * box.cells
    whole = np.fft.irfftn(noise / np.abs(noise) * amplitude, grid, axes=(1, 2, 3))
    found = correlation_function(field_on(box, whole), bins=8)
    r, vectors = distances(grid, size)
    shifts = 72.0 * np.array(list(np.ndindex(3, 3, 3)))[..., np.newaxis, np.newaxis, np.newaxis]
    images = [((vectors + shift - 72) ** 2).sum(axis=0) for shift in shifts]
    xi = sum(np.exp(-0.5 * r2 / width**2) for r2 in images) / (2 * np.pi * width**2) ** 1.5
    edges = pairwise(np.linspace(1.5, 36, 9) - 1e-6)
    expected = [xi[(r >= low) & (r < high)].mean() - 1 / box.volume for low, high in edges]
    np.testing.assert_allclose(found.xi, [expected] * 2, rtol=0, atol=1e-10 * xi.max())


@pytest.mark.ranks(1)
def test_pairs_of_clustered_points(mesh):
    """Clouds of points: the mesh agrees with counted pairs within twice their Poisson error."""
    cells, rng = 64, np.random.default_rng(4)
    centres = rng.uniform(0, cells, (400, 3))
    points = (np.repeat(centres, 20, axis=0) + rng.normal(0, 4.0, (8000, 3))) % cells
    box = box_on(mesh, None, (cells,) * 3, (float(cells),) * 3)
    densities = [
        Field(tf.constant(painted((points + shift) % cells, cells)), box) for shift in (0, 0.5)
    ]
    edges = np.arange(6.0, 24.0, 3.0)
    found = correlation_function(densities[0], window="cic", interlaced=densities[1], bins=edges)
    tree = cKDTree(points, boxsize=cells)
    pairs = np.diff(tree.count_neighbors(tree, edges)) / 2
    volumes = 4 / 3 * np.pi * np.diff(edges**3)
    expected = len(points) ** 2 / 2 * volumes / cells**3
    counted, error = pairs / expected - 1, np.sqrt(pairs) / expected
    assert counted[0] > 20 * error[0]
    np.testing.assert_array_less(np.abs(found.xi - counted), 2 * error)


def test_floats_are_as_good_as_their_precision(mesh):
    single, double = (
        correlation_function(field_on(box_on(mesh, dtype=dtype), random(1)))
        for dtype in (tf.float32, tf.float64)
    )
    np.testing.assert_allclose(single.xi, double.xi, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bins", [None, 2])
def test_bins_of_a_thin_box(mesh, bins):
    """Half the shortest side is shorter than the longest side of a cell."""
    grid, size = (8, 8, 8), (8.0, 8.0, 128.0)
    values = random(5, *grid)
    found = correlation_function(field_on(box_on(mesh, None, grid, size), values), bins=bins)
    r, _ = distances(grid, size)
    edges = np.arange(5) + 0.5 if bins is None else np.linspace(0.5, 4, 3)
    xi = np.fft.irfftn(np.abs(np.fft.rfftn(values - values.mean())) ** 2, grid, axes=(0, 1, 2))
    inside = [(r >= low) & (r < high) & (r > 0) for low, high in pairwise(edges)]
    np.testing.assert_array_equal(found.separations, [i.sum() for i in inside])
    expected = [xi[i].mean() / np.prod(grid) for i in inside]
    np.testing.assert_allclose(found.xi, expected, rtol=0, atol=1e-13)


def test_bins_that_are_refused(mesh):
    field = field_on(box_on(mesh), random(1))
    for bins, message in {
        (3.0, 2.0): "increasing edges",
        (0.0, 1.0): "no separation of cells is in any",
        0: "must be at least 1",
    }.items():
        with pytest.raises(ValueError, match=message):
            correlation_function(field, bins=bins)


def test_the_statistic_has_the_window_of_painting(mesh):
    assert "correlation" in STATISTICS
    field = field_on(box_on(mesh), random(1))
    statistic = statistic_named("correlation")
    found = statistic.vectors(statistic.measured(field))
    np.testing.assert_array_equal(found, correlation_function(field, window="cic").xi)
