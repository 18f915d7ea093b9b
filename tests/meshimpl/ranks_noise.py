"""White noise: bit-equal on every layout to what one process computes for the whole grid."""

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import philox
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.noise import white_noise

pytestmark = [pytest.mark.ranks(1, 4), pytest.mark.dealt]

LAYOUT = {"row": "x:row", "col": "y:col"}


def noise(mesh, seed, *cases):
    """White noise of each (grid, dtype), whole."""
    layout = ";".join(LAYOUT[name] for name in mesh.names)
    seeds = mtf.Shape([mtf.Dimension("batch", len(seed))] if np.ndim(seed) else [])
    shapes = [
        (mtf.Shape([mtf.Dimension(n, s) for n, s in zip("xyz", grid, strict=True)]), dtype)
        for grid, dtype in cases
    ]
    function = MeshFunction(
        lambda _, s: [white_noise(s, *case) for case in shapes],
        mesh,
        layout,
        {"s": (seeds, tf.int64)},
    )
    blocks = function(np.array(seed, np.int64))
    return [function.gather(block, i) for i, block in enumerate(blocks)]


def whole(grid, seed):
    return philox.normal(philox.global_index(grid, [0, 0, 0], grid), 0, seed).numpy()


def test_bit_equal_to_one_process(mesh):
    grids = [(8, 8, 8), (4, 12, 10), (12, 4, 7)]
    *found, single = noise(
        mesh, 42, *((grid, tf.float64) for grid in grids), (grids[1], tf.float32)
    )
    for grid, values in zip(grids, found, strict=True):
        np.testing.assert_array_equal(values, whole(grid, 42))
    np.testing.assert_array_equal(single, found[1].astype(np.float32))


def test_seeds_and_cells_are_independent_unit_normals(line):
    case = (16, 16, 16), tf.float64
    ((first, second, negative),) = noise(line, [7, 8, -7], case)
    for field in (first, second, negative):
        # 4096 values: the mean within 5 / sqrt(N), the variance within 5 sqrt(2 / N)
        assert abs(field.mean()) < 5 / 64 and abs(field.var() - 1) < 5 * np.sqrt(2) / 64
    np.testing.assert_array_equal(first, noise(line, 7, case)[0])
    for other in (second, negative, np.roll(first, 1, 0), np.roll(first, 1, 2)):
        assert abs((first * other).mean()) < 5 / 64
