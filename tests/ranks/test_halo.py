"""Halo exchange against the periodic array, and the halo reduce as its adjoint."""

import numpy as np
import pytest
import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.halo import halo_exchange, halo_reduce

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.every_split]

LAYOUT = {"row": "x:row;x_halo:row", "col": "y:col;y_halo:col"}
GRID = (8, 12, 5)
# One plane, wider than a block (several hops), wider than the box, one axis only, uneven.
WIDTHS = [
    {"x": 1, "y": 1},
    {"x": 3, "y": 4},
    {"x": 9, "y": 13},
    {"y": 2},
    {"x": 2, "y": 0},
    {"x": (1, 2), "y": (0, 1), "z": (1, 1)},
    {"x": (5, 0), "y": (1, 9)},
]
EDGES = ["periodic", "zero"]


def functions(mesh, widths, dtype=tf.float64, edges="periodic"):
    layout = ";".join(LAYOUT[name] for name in mesh.names)
    shape = mtf.Shape([mtf.Dimension(n, s) for n, s in zip("xyz", GRID, strict=True)])
    exchange = MeshFunction(
        lambda _, a: halo_exchange(a, widths, edges), mesh, layout, {"a": (shape, dtype)}
    )
    exchange(np.zeros(GRID))
    reduce = MeshFunction(
        lambda _, a: halo_reduce(a, shape, widths, edges),
        mesh,
        layout,
        {"a": (exchange.output_shapes[0], dtype)},
    )
    return exchange, reduce, shape


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [tf.float64, tf.int32])
def test_exchange_is_the_padded_array(mesh, widths, dtype, edges):
    exchange, _, shape = functions(mesh, widths, dtype, edges)
    whole = np.random.default_rng(1).integers(0, 1000, GRID).astype(dtype.as_numpy_dtype)
    padded = exchange(whole).numpy()
    begin = exchange.impl.slice_begin(shape, mesh.rank)
    block = exchange.impl.slice_shape(shape)
    expected = whole
    for axis, name in enumerate("xyz"):
        width = widths.get(name, 0)
        before, after = (width, width) if isinstance(width, int) else width
        paddings = [(0, 0)] * 3
        paddings[axis] = before, after
        expected = np.pad(expected, paddings, mode={"periodic": "wrap", "zero": "constant"}[edges])
        cells = before + block[axis] + after
        expected = expected.take(np.arange(begin[axis], begin[axis] + cells), axis)
    np.testing.assert_array_equal(padded, expected)


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_reduce_is_the_adjoint(mesh, widths, edges):
    """<u, E v> = <E^T u, v>, and each is the other's gradient."""
    exchange, reduce, _ = functions(mesh, widths, edges=edges)
    rng = np.random.default_rng(2)
    v = exchange.block_of("a", rng.normal(size=GRID))
    u = reduce.block_of("a", rng.normal(size=exchange.output_shapes[0].to_integer_list))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([u, v])
        padded, folded = exchange(v), reduce(u)
        out, back = tf.reduce_sum(padded * u), tf.reduce_sum(folded * v)
    left, right = (float(mesh.world.allreduce(x)) for x in (out, back))
    assert left == pytest.approx(right, rel=1e-12)
    np.testing.assert_allclose(tape.gradient(out, v), folded, atol=1e-13)
    np.testing.assert_allclose(tape.gradient(back, u), padded, atol=1e-13)


def test_no_mass_is_lost(mesh):
    _, reduce, _ = functions(mesh, {"x": 5, "y": 7})
    block = np.ones(reduce.impl.slice_shape(reduce.inputs["a"][0]))
    total = float(mesh.world.allreduce(tf.reduce_sum(reduce(block))))
    assert total == mesh.size * block.size


def test_complaints(mesh):
    with pytest.raises(ValueError, match="halo of 'w'"):
        functions(mesh, {"w": 1})
    with pytest.raises(ValueError, match="must not be negative"):
        functions(mesh, {"x": -1})
    with pytest.raises(ValueError, match="'mirror' is not one of 'periodic', 'zero'"):
        functions(mesh, {"x": 1}, edges="mirror")
    if mesh.axis_size("row") > 1:
        shape = [("x", 8), ("y", 12)]
        function = MeshFunction(
            lambda _, a: halo_exchange(a, {"x": 1}), mesh, "x:row", {"a": (shape, tf.float32)}
        )
        with pytest.raises(ValueError, match="must split x_halo over row"):
            function(np.zeros((8, 12)))
