"""Spectra in the order of the field, which one rank can make without a transposition."""

import numpy as np
import pytest

from meshimpl.compat import mtf
from meshimpl.operations import fft
from tests.meshimpl.ranks_fft import GRIDS, as_complex, check_adjoint, expected_spectrum, functions

pytestmark = pytest.mark.ranks(1, 2)


@pytest.mark.parametrize("grid", GRIDS[1:3])
def test_a_spectrum_in_order(mesh, grid):
    """One rank leaves it [kx, ky, kz]; it has the same modes, and the same field."""
    forward, inverse, _, spectral = functions(mesh, grid, in_order=True)
    alone = mesh.size == 1 and not fft._has_gpu()
    assert [dim.name for dim in spectral.dims[:3]] == (
        ["kx", "ky", "kz"] if alone else ["kz", "ky", "kx"]
    )
    field = np.random.default_rng(6).normal(size=grid)
    block = forward(field)
    pairs = forward.gather(block)
    pairs = np.swapaxes(pairs, 0, 2) if alone else pairs
    expected = expected_spectrum(field)
    kz, ky, _ = expected.shape
    np.testing.assert_allclose(as_complex(pairs[:kz, :ky]), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(inverse.gather(inverse(block)), field, rtol=0, atol=1e-14)
    for which, function in enumerate((forward, inverse)):
        check_adjoint(mesh, function, which)
    plan = fft.pencils(mtf.Shape([*forward.inputs["a"][0].dims]), forward.impl).in_order()
    numbers = np.broadcast_arrays(*plan.mode_numbers(), plan.multiplicity())
    assert numbers[0].shape == plan.spectral_block
    if alone:
        x, y, z = (np.fft.fftfreq(n, 1 / n) for n in grid)
        half = np.arange(grid[2] // 2 + 1)
        twice = np.where((half == 0) | (half == grid[2] / 2), 1, 2)
        for found, wanted in zip(numbers, np.meshgrid(x, y, half, indexing="ij"), strict=False):
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(numbers[3], np.broadcast_to(twice, numbers[3].shape))
