"""Filters and forces mode by mode: the Nyquist planes of large grids, the window, uneven boxes."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import process_mesh

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import Filter, convolve, without_nyquist
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.options import ForceOptions
from meshimpl import launch
from meshimpl.operations import fft

pytestmark = pytest.mark.ranks(1)

GRID, SIDES = (8, 12, 16), (40.0, 45.0, 64.0)
CELLS = np.divide(SIDES, GRID)
MODES = [(1, 0, 0), (2, -3, 1), (3, 5, -6), (-1, 2, 7)]


def box(grid, size, dtype=tf.float64):
    return Box(grid, size, process_mesh("row:1,col:1"), dtype)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("cells", [16, 2048, 4096])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_only_the_nyquist_plane_is_set_to_zero(axis, cells, dtype):
    """All other modes pass, however many there are."""
    grid, size = [4, 4, 4], [70.0, 70.0, 70.0]
    grid[axis], size[axis] = cells, 333.3
    long = box(tuple(grid), tuple(size), dtype)
    numbers = np.arange(-cells // 2, cells // 2 + 1)
    k = tf.constant(2 * np.pi / size[axis] * numbers, dtype)
    kept = without_nyquist(k, axis, long).numpy()
    np.testing.assert_array_equal(kept, np.where(abs(numbers) == cells // 2, 0, k))


@pytest.mark.parametrize("cells", [16, 2048])
def test_the_window_is_divided_out_up_to_the_particles_nyquist_mode(cells):
    """Of paint and read together, sinc^4 along each axis; on the mesh, not on the lattice."""
    pm = ParticleMesh(box((cells, 4, 4), (100.0, 70.0, 70.0), tf.float32), mesh_factor=2, halo=2)
    numbers = np.arange(1, cells + 1)
    k = tf.constant(2 * np.pi / 100.0 * numbers, tf.float32)
    zero = tf.zeros_like(k)
    plain, divided = (
        Gravity(pm, ForceOptions(deconvolve=d)).filters.kernel(k, zero, zero) for d in (False, True)
    )
    window = np.sinc(numbers / (2 * cells)) ** 4
    expected = np.where(numbers <= cells // 2, 1 / window, 1.0)
    np.testing.assert_allclose(divided / plain, expected, rtol=1e-4)


@pytest.mark.ranks(1, 2)
def test_filters_as_on_gpus(monkeypatch):
    """There a filter conjugates, and the inverse along x and y is a forward transform."""
    filters = [
        Filter(lambda kx, ky, kz: 1 / (1 + kx**2 + ky**2 + kz**2)),
        Filter(lambda kx, ky, kz: kx + 2 * ky - kz, imaginary=True),
    ]
    mesh = process_mesh(f"row:1,col:{launch.detect().size}")

    def there_and_back():
        whole = Box(GRID, SIDES, mesh, tf.float64)
        function = whole.function(lambda _, x: convolve(x, whole, filters), x=whole.shape)
        field = function.block_of("x", np.random.default_rng(7).normal(size=GRID))
        with tf.GradientTape() as tape:
            tape.watch(field)
            filtered = function(field)
            loss = tf.reduce_sum(filtered**2)
        return filtered, tape.gradient(loss, field)

    with monkeypatch.context() as patched:
        patched.setattr(fft.Pencils, "in_order", lambda self: self)
        expected = there_and_back()
    monkeypatch.setattr(fft, "_has_gpu", lambda: True)
    monkeypatch.setattr(fft, "_compiled", fft._compiled.__wrapped__)
    for found, whole in zip(there_and_back(), expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-14 * np.abs(whole).max())
        assert not np.array_equal(found, whole), "the other way was not taken"


@functools.cache
def solver(force_gradient, deconvolve, mesh_factor=1):
    pm = ParticleMesh(box(GRID, SIDES), mesh_factor, 2)
    return Gravity(pm, ForceOptions(force_gradient=force_gradient, deconvolve=deconvolve))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "force_gradient, deconvolve, factor",
    [
        ("finite-difference", False, 1),
        ("finite-difference", True, 1),
        ("spectral", True, 1),
        ("finite-difference", True, 1.5),
        ("spectral", False, 1.5),
    ],
)
def test_force_of_a_plane_wave_in_an_uneven_box(force_gradient, deconvolve, factor, mode):
    """-grad phi, laplacian phi = delta, at the sites, with unequal cells along the axes.

    Halfway between two cells of the mesh their mean is read: the wave there, times a cosine.
    """
    gravity = solver(force_gradient, deconvolve, factor)
    k = 2 * np.pi * np.divide(mode, SIDES)
    mesh, mesh_cells = gravity.pm.mesh.grid, CELLS / factor

    def phase_at(indices, cells):
        return np.tensordot(k * cells, indices, 1)

    wave = 1 + np.cos(phase_at(np.indices(mesh), mesh_cells))
    phase, rest = phase_at(np.indices(GRID), CELLS), tf.zeros([*GRID, 3], tf.float64)
    found = gravity.force(gravity.field(tf.constant(wave / factor**3)), rest).numpy()
    halfway = np.moveaxis(np.indices(GRID) * factor % 1, 0, -1)
    read = np.where(halfway, np.cos(k * mesh_cells / 2), 1.0).prod(axis=-1)
    along = k
    if force_gradient == "finite-difference":  # Feng and others 2016
        along = (8 * np.sin(k * mesh_cells) - np.sin(2 * k * mesh_cells)) / (6 * mesh_cells)
    window = np.prod(np.sinc(np.divide(mode, mesh)) ** 4) if deconvolve else 1.0
    expected = -(np.sin(phase) * read)[..., np.newaxis] * along / (k @ k) / window
    np.testing.assert_allclose(found, expected, atol=1e-12 * np.abs(expected).max())
