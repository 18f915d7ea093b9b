"""White noise: bit-equal on every layout to what one process computes for the whole grid."""

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import philox
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.noise import white_noise

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.every_split]

LAYOUT = {"row": "x:row", "col": "y:col"}


def noise(mesh, grid, seed, dtype=tf.float64):
    layout = ";".join(LAYOUT[name] for name in mesh.names)
    shape = mtf.Shape([mtf.Dimension(n, s) for n, s in zip("xyz", grid, strict=True)])
    seeds = mtf.Shape([mtf.Dimension("batch", len(seed))] if np.ndim(seed) else [])
    function = MeshFunction(
        lambda _, s: white_noise(s, shape, dtype), mesh, layout, {"s": (seeds, tf.int64)}
    )
    return function.gather(function(np.array(seed, np.int64)))


def whole(grid, seed):
    return philox.normal(philox.global_index(grid, [0, 0, 0], grid), 0, seed).numpy()


@pytest.mark.parametrize("grid", [(8, 8, 8), (4, 12, 10), (12, 4, 7)])
def test_bit_equal_to_one_process(mesh, grid):
    values = noise(mesh, grid, 42)
    np.testing.assert_array_equal(values, whole(grid, 42))
    single = noise(mesh, grid, 42, tf.float32)
    np.testing.assert_array_equal(single, values.astype(np.float32))


def test_seeds_and_cells_are_independent_unit_normals(mesh):
    grid = (16, 16, 16)
    first, second, negative = noise(mesh, grid, [7, 8, -7])
    for field in (first, second, negative):
        # 4096 values: the mean within 5 / sqrt(N), the variance within 5 sqrt(2 / N)
        assert abs(field.mean()) < 5 / 64 and abs(field.var() - 1) < 5 * np.sqrt(2) / 64
    np.testing.assert_array_equal(first, noise(mesh, grid, 7))
    for other in (second, negative, np.roll(first, 1, 0), np.roll(first, 1, 2)):
        assert abs((first * other).mean()) < 5 / 64
