"""Points painted anywhere in the box, on any number of ranks, and their power."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.particle_mesh import scattered
from flowpm_dist.particle_mesh.kernels import Portable, kernels
from meshimpl.engine import CollectiveError

pytestmark = pytest.mark.ranks(1, 2, 4)
GRID, SIZE = (16, 12, 8), (16.0, 18.0, 20.0)


def spline(distance: np.ndarray, scheme: str) -> np.ndarray:
    """The share of a point's weight in a cell at a distance along one axis [cells]."""
    d = np.abs(distance)
    if scheme == "cic":
        return np.maximum(1 - d, 0)
    if scheme == "tsc":
        return np.where(d < 0.5, 0.75 - d**2, np.where(d < 1.5, (1.5 - d) ** 2 / 2, 0))
    return np.where(d < 1, (4 - 6 * d**2 + 3 * d**3) / 6, np.where(d < 2, (2 - d) ** 3 / 6, 0))


def painted(x: np.ndarray, weights: np.ndarray, scheme: str) -> np.ndarray:
    """The weights in all cells of the box, from each point's distance to each of them."""
    shares = []
    for axis, cells in enumerate(GRID):
        apart = x[:, axis, np.newaxis] / SIZE[axis] * cells - np.arange(cells)
        shares.append(spline(apart - cells * np.rint(apart / cells), scheme))
    return np.einsum("pi,pj,pk,p->ijk", *shares, weights)


def points(count: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Points in and out of the box, some of them on its faces and on cells; and their weights."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 2, (count, 3)) * SIZE
    x[: count // 10] = rng.integers(-2, 18, (count // 10, 3)) * np.array([1.0, 1.5, 2.5])
    return x, rng.uniform(0.1, 3, count)


@pytest.mark.parametrize("scheme", ["cic", "tsc", "pcs"])
def test_weights_are_shared_between_cells(mesh, scheme):
    box, (x, weights) = fpm.Box(GRID, SIZE, mesh, tf.float64), points()
    ours = slice(mesh.rank, None, mesh.size)
    block = scattered.paint_points(box, x[ours], weights[ours], scheme=scheme)
    expected = painted(x, weights, scheme)
    np.testing.assert_allclose(block, expected[box.place_of(mesh.rank)], atol=1e-12)
    density = fpm.paint(x[ours], box, weights[ours], scheme=scheme)
    assert density.window == scheme
    np.testing.assert_allclose(density.numpy(), expected / expected.mean(), atol=1e-13)
    shifted = fpm.paint(x[ours], box, scheme=scheme, shift=0.5).numpy()
    moved = painted(x + 0.5 * np.array(box.cell), np.ones(len(x)), scheme)
    np.testing.assert_allclose(shifted, moved / moved.mean(), atol=1e-12)


def test_pieces_add_up(mesh, monkeypatch):
    monkeypatch.setattr(scattered, "PIECE", 60)
    monkeypatch.setattr(scattered, "ROUND", 17)
    box, (x, weights) = fpm.Box(GRID, SIZE, mesh, tf.float64), points()
    painting = scattered.Painting(box, "tsc")
    for n, part in enumerate(np.array_split(np.arange(len(x)), 5)):
        mine = part[mesh.rank :: mesh.size]
        painting.add(x[mine], weights[mine] if n % 2 else None)
    some = np.concatenate([p for n, p in enumerate(np.array_split(np.arange(len(x)), 5)) if n % 2])
    mixed = np.ones(len(x))
    mixed[some] = weights[some]
    expected = painted(x, mixed, "tsc")[box.place_of(mesh.rank)]
    np.testing.assert_allclose(painting.sums(), expected, atol=1e-12)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("order", [2, 3, 4])
def test_kernels_agree(order):
    rng = np.random.default_rng(order)
    before = tf.constant(rng.normal(size=(11, 70, 6)))
    x = tf.constant(
        rng.uniform(2, 3.9, (40000, 3)) + np.outer(rng.uniform(0, 1, 40000), [5, 64, 0])
    )
    for weights in (None, tf.constant(rng.normal(size=40000))):
        theirs = Portable().paint_points(before, x, weights, order).numpy()
        np.testing.assert_allclose(
            kernels().paint_points(before, x, weights, order), theirs, atol=1e-10
        )
    assert np.abs(theirs - before).max() > 1


@pytest.mark.parametrize("scheme", ["tsc", "pcs"])
def test_power_of_points_off_any_lattice(mesh, scheme):
    """Interlaced and without its window, the power is the direct sum over the points."""
    rng, size, cells = np.random.default_rng(5), 100.0, 64
    x = rng.uniform(0, size, (300, 3))
    weights = rng.uniform(0.5, 2, len(x))
    box = fpm.Box((cells,) * 3, (size,) * 3, mesh, tf.float64)
    ours = slice(mesh.rank, None, mesh.size)
    density, shifted = (
        fpm.paint(x[ours], box, weights[ours], scheme=scheme, shift=s) for s in (0, 0.5)
    )
    found = fpm.power_spectrum(density, interlaced=shifted)
    n = np.arange(-6, 7)
    modes = np.stack(np.meshgrid(n, n, n, indexing="ij"), axis=-1).reshape(-1, 3)
    length = np.sqrt((modes**2).sum(axis=1))
    sums = np.exp(-2j * np.pi / size * modes @ x.T) @ weights / weights.sum()
    for number in range(5):
        within = (length >= number + 0.5) & (length < number + 1.5)
        expected = size**3 * np.mean(np.abs(sums[within]) ** 2)
        np.testing.assert_allclose(found.power[number], expected, rtol=1e-5)
    other = fpm.power_spectrum(density, interlaced=shifted, window="cic").power
    assert np.abs(other[4] / expected - 1) > 1e-3


@pytest.mark.ranks(1)
def test_what_cannot_be_painted(mesh):
    box = fpm.Box((8, 8, 8), (8.0,) * 3, mesh, tf.float64)
    x = np.ones((3, 3))
    with pytest.raises(ValueError, match="scheme 'ngp': must be one of 'cic', 'tsc', 'pcs'"):
        fpm.paint(x, box, scheme="ngp")
    for wrong in (x[:, :2], np.ones(3), np.ones((2, 3, 3))):
        with pytest.raises(ValueError, match=r"positions of shape .*: must be \[n, 3\]"):
            fpm.paint(wrong, box)
    with pytest.raises(ValueError, match="weights of all points sum to 0"):
        fpm.paint(x, box, np.zeros(3))


def test_wrong_points_of_one_rank_are_named_on_all(mesh):
    box, x = fpm.Box((8, 8, 8), (8.0,) * 3, mesh, tf.float64), np.ones((3, 3))
    last = mesh.rank == mesh.size - 1
    nowhere = np.array([[1.0, 1, 1], [1, np.nan, 1]])
    with pytest.raises(ValueError, match="position of point 1 is .*nan.*: must be finite"):
        fpm.paint(nowhere if last else x, box)
    with pytest.raises(ValueError, match=r"weights of shape \[2\] for 3 points"):
        fpm.paint(x, box, np.ones(2 if last else 3))
    with pytest.raises(ValueError, match="weight of point 2 is inf: must be finite"):
        fpm.paint(x, box, np.array([1, 1, np.inf]) if last else np.ones(3))


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_other_things(line):
    box, x = fpm.Box((8, 8, 8), (8.0,) * 3, line, tf.float64), np.ones((3, 3))
    with pytest.raises(ValueError, match="weights are given on some ranks alone"):
        fpm.paint(x, box, np.ones(3) if line.rank else None)
    with pytest.raises(CollectiveError, match="scheme differs between ranks"):
        fpm.paint(x, box, scheme="pcs" if line.rank else "tsc")


@pytest.mark.ranks(4)
def test_blocks_that_are_too_thin(line):
    box = fpm.Box((4, 8, 8), (4.0, 8.0, 8.0), line, tf.float64)
    with pytest.raises(ValueError, match="blocks of 1 x 8 x 8 cells are too thin for 'pcs'"):
        fpm.paint(np.ones((3, 3)), box, scheme="pcs")
    total = fpm.paint(np.ones((3, 3)), box).numpy().sum()
    np.testing.assert_allclose(total, box.cells)
