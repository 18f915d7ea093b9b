"""The bispectrum on every mesh: sums over all triangles of modes in numpy, and slopes."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from numpy_modes import (
    BATCH_MESHES,
    MESHES,
    blocks_on,
    box_on,
    check_slope,
    field_on,
    random,
    weighted,
)
from ranks import SIZE as RANKS
from ranks import process_mesh

from flowpm_dist.grid.field import Field
from flowpm_dist.statistics import Bins, binned_bispectrum, bispectrum

pytestmark = [pytest.mark.ranks(1, 4), pytest.mark.dealt]

GRID, SIDES = (8, 8, 10), (20.0, 16.0, 20.0)
EDGES = np.array([0.2, 0.35, 0.52, 0.75])


def by_hand(whole):
    """Means over closed triangles of modes, one by one, and how many there are."""
    n = [np.arange(-2, 3)] * 2 + [np.arange(-3, 4)]
    modes = np.stack(np.meshgrid(*n, indexing="ij"), -1).reshape(-1, 3)
    k = np.sqrt(np.sum((2 * np.pi * modes / SIDES) ** 2, axis=1))
    shell = np.digitize(k * (1 + 1e-9), EDGES) - 1
    spectrum = np.fft.fftn(whole)
    window = np.prod(np.sinc(modes / GRID) ** 2, axis=1)
    values = spectrum[tuple(modes.T)] / window
    found, counts = {}, {}
    for shells in itertools.combinations_with_replacement(range(3), 3):
        a, b = (np.flatnonzero(shell == s) for s in shells[:2])
        last = -(modes[a][:, None] + modes[b][None])
        inside = (np.abs(last) <= [2, 2, 3]).all(-1)
        number = np.ravel_multi_index(tuple((last[inside] + [2, 2, 3]).T), (5, 5, 7))
        first, second = (np.broadcast_to(x, inside.shape)[inside] for x in (a[:, None], b[None]))
        closed = shell[number] == shells[2]
        product = values[first] * values[second] * values[number]
        if closed.any():
            scale = np.prod(SIDES) ** 2 / np.prod(GRID) ** 3
            found[shells] = scale * product[closed].sum().real / closed.sum()
            counts[shells] = closed.sum()
    return found, counts


@pytest.mark.parametrize("shape", MESHES)
def test_triangles_are_those_of_modes_one_by_one(shape):
    whole = 2.0 + random(1, *GRID)
    box = box_on(process_mesh(shape), grid=GRID, size=SIDES)
    found = bispectrum(field_on(box, whole), bins=EDGES, window="cic")
    expected, counts = by_hand(whole)
    assert [tuple(t) for t in found.shells] == list(expected)
    np.testing.assert_array_equal(found.triangles, list(counts.values()))
    np.testing.assert_allclose(found.bispectrum, list(expected.values()), rtol=1e-9)
    assert (found.k >= EDGES[found.shells]).all() and (found.k < EDGES[found.shells + 1]).all()
    if RANKS > 1:
        return
    single = box_on(process_mesh(shape), grid=GRID, size=SIDES, dtype=tf.float32)
    rounded = bispectrum(field_on(single, whole), bins=EDGES, window="cic")
    np.testing.assert_array_equal(rounded.triangles, found.triangles)
    size = np.abs(found.bispectrum).max()
    np.testing.assert_allclose(rounded.bispectrum, found.bispectrum, atol=1e-5 * size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", BATCH_MESHES)
def test_slope_and_batches(shape):
    box = box_on(process_mesh(shape), batch=2)
    block, direction = blocks_on(box, 1, 2)

    def loss(field):
        return weighted(binned_bispectrum(field, box, bins=Bins(3, k_max=0.4)), box)

    check_slope(loss, [block], [direction], box, 1e-5)
    each = bispectrum(Field(block, box), bins=Bins(3, k_max=0.4)).bispectrum
    whole = random(1, 2, *box.grid)
    for universe, expected in zip(each, whole, strict=True):
        alone = box_on(process_mesh(shape).without("replica"))
        one = bispectrum(field_on(alone, expected), bins=Bins(3, k_max=0.4))
        np.testing.assert_allclose(universe, one.bispectrum, rtol=1e-10)


@pytest.mark.ranks(1)
def test_bins_that_are_refused():
    field = field_on(box_on(process_mesh("row:1,col:1")), random(1))
    with pytest.raises(ValueError, match="two thirds of the Nyquist wavenumber, 0.4189 h/Mpc"):
        bispectrum(field, bins=[0.1, 0.3, 0.5])
    with pytest.raises(ValueError, match="no triangle of modes"):
        bispectrum(field, bins=[0.09, 0.1])
    assert bispectrum(field).shells.max() == 5
