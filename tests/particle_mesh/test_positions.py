"""Comoving positions: lattice and displacement, in the box and beyond it."""

import numpy as np
import pytest
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.particle_mesh.positions import positions
from meshimpl import ProcessMesh

MESH = ProcessMesh("row:1,col:1")
GRID, SIZE = (4, 6, 8), (10.0, 12.0, 20.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_positions_in_the_box(dtype):
    """numpy's remainder; a particle just below 0 is not at the far face but at 0."""
    box = fpm.Box(GRID, SIZE, MESH, tf.as_dtype(dtype))
    displacement = np.random.default_rng(1).normal(0, 30.0, (*GRID, 3)).astype(dtype)
    displacement[0, 0, 0] = (-1e-30, 0.0, -1e-9)
    sites = np.stack(np.meshgrid(*map(np.arange, GRID), indexing="ij"), -1)
    free = sites * np.array(SIZE) / GRID + displacement.astype(np.float64)
    found = positions(tf.constant(displacement), box, wrap=False)
    assert found.dtype == box.dtype
    rounding = 100 * np.finfo(dtype).eps
    np.testing.assert_allclose(found, free, atol=rounding)
    found = positions(tf.constant(displacement), box).numpy()
    assert (found >= 0).all() and (found < np.array(SIZE, dtype)).all()
    off = (found - free) / np.array(SIZE)
    np.testing.assert_allclose(off, np.round(off), atol=rounding)
    np.testing.assert_array_equal(found[0, 0, 0, :2], 0.0)


@pytest.mark.parametrize("wrap", [True, False])
def test_the_gradient_is_the_displacements(wrap):
    box = fpm.Box(GRID, SIZE, MESH, tf.float64, batch=2)
    rng = np.random.default_rng(2)
    displacement, weights = (tf.constant(rng.normal(0, 20, (2, *GRID, 3))) for _ in range(2))
    with tf.GradientTape() as tape:
        tape.watch(displacement)
        value = tf.reduce_sum(weights * positions(displacement, box, wrap=wrap))
    np.testing.assert_array_equal(tape.gradient(value, displacement), weights)
