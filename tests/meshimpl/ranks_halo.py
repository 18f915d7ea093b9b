"""Halo exchange against the periodic array, and the halo reduce as its adjoint."""

import numpy as np
import pytest
import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.halo import halo_exchange, halo_reduce

pytestmark = [pytest.mark.ranks(1, 4), pytest.mark.every_split]

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


SHAPE = mtf.Shape([mtf.Dimension(n, s) for n, s in zip("xyz", GRID, strict=True)])
CASES = [(widths, "periodic") for widths in WIDTHS]
CASES += [(WIDTHS[i], "zero") for i in (0, 2, 5, 6)]


def cases_on(mesh):
    """On a line of four ranks those that pass over several of them, to zero edges only there."""
    wide = [case for case in CASES if case[0] in (WIDTHS[2], WIDTHS[6])]
    if mesh.shape == (4,):
        return wide
    return [case for case in CASES if mesh.size == 1 or case not in wide or case[1] == "periodic"]


def exchange_function(mesh, cases, dtype=tf.float64):
    """`halo_exchange` of a field for each (widths, edges)."""
    layout = ";".join(LAYOUT[name] for name in mesh.names)

    def build(_, *fields):
        return [halo_exchange(a, *case) for a, case in zip(fields, cases, strict=True)]

    function = MeshFunction(
        build, mesh, layout, {f"a{i}": (SHAPE, dtype) for i in range(len(cases))}
    )
    function(*[np.zeros(GRID)] * len(cases))
    return function


def reduce_function(mesh, cases, shapes):
    """`halo_reduce` of a padded field for each (widths, edges)."""
    layout = ";".join(LAYOUT[name] for name in mesh.names)

    def build(_, *fields):
        return [halo_reduce(a, SHAPE, *case) for a, case in zip(fields, cases, strict=True)]

    inputs = {f"a{i}": (shape, tf.float64) for i, shape in enumerate(shapes)}
    return MeshFunction(build, mesh, layout, inputs)


def padded_block(whole, widths, edges, begin, block):
    """numpy's padding of the whole array, and of that one rank's block with its halo."""
    mode = {"periodic": "wrap", "zero": "constant"}[edges]
    for axis, name in enumerate("xyz"):
        width = widths.get(name, 0)
        before, after = (width, width) if isinstance(width, int) else width
        paddings = [(0, 0)] * 3
        paddings[axis] = before, after
        whole = np.pad(whole, paddings, mode=mode)
        cells = before + block[axis] + after
        whole = whole.take(np.arange(begin[axis], begin[axis] + cells), axis)
    return whole


def test_exchange_is_the_padded_array(mesh):
    check_exchange(mesh, cases_on(mesh), tf.float64)


def test_exchange_of_integers(mesh):
    check_exchange(mesh, CASES[-1:], tf.int32)


def check_exchange(mesh, cases, dtype):
    function = exchange_function(mesh, cases, dtype)
    whole = np.random.default_rng(1).integers(0, 1000, GRID).astype(dtype.as_numpy_dtype)
    begin = function.impl.slice_begin(SHAPE, mesh.rank)
    block = function.impl.slice_shape(SHAPE)
    for found, case in zip(function(*[whole] * len(cases)), cases, strict=True):
        expected = padded_block(whole, *case, begin, block)
        np.testing.assert_array_equal(found, expected, f"{case}")


def test_reduce_is_the_adjoint(mesh):
    """<u, E v> = <E^T u, v>, and each is the other's gradient."""
    cases = cases_on(mesh)
    exchange = exchange_function(mesh, cases)
    reduce = reduce_function(mesh, cases, exchange.output_shapes)
    rng = np.random.default_rng(2)
    v = [exchange.block_of(name, rng.normal(size=GRID)) for name in exchange.inputs]
    u = [
        reduce.block_of(name, rng.normal(size=shape.to_integer_list))
        for name, (shape, _) in reduce.inputs.items()
    ]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([u, v])
        padded, folded = exchange(*v), reduce(*u)
        out = [tf.reduce_sum(x * y) for x, y in zip(padded, u, strict=True)]
        back = [tf.reduce_sum(x * y) for x, y in zip(folded, v, strict=True)]
        out_sum, back_sum = tf.add_n(out), tf.add_n(back)
    left, right = mesh.world.allreduce(tf.stack([out, back])).numpy()
    np.testing.assert_allclose(left, right, rtol=1e-12)
    for found, expected in zip(tape.gradient(out_sum, v), folded, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-13)
    for found, expected in zip(tape.gradient(back_sum, u), padded, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-13)


def test_what_is_not_a_number_stays_on_its_side_of_a_zero_edge(mesh):
    """On many ranks as on one, where nothing comes from the face across the box."""
    cases = [(WIDTHS[i], "zero") for i in ((2,) if mesh.shape == (4,) else (0, 2))]
    exchange = exchange_function(mesh, cases)
    begin, block = exchange.impl.slice_begin(SHAPE, mesh.rank), exchange.impl.slice_shape(SHAPE)
    faces = np.ones(GRID)
    faces[0] = faces[:, -1] = np.nan
    outside = []
    for found, case in zip(exchange(*[faces] * len(cases)), cases, strict=True):
        np.testing.assert_array_equal(found, padded_block(faces, *case, begin, block), f"{case}")
        outside.append(padded_block(np.ones(GRID), *case, begin, block) == 0)
    reduce = reduce_function(mesh, cases, exchange.output_shapes)
    expected = reduce(*[np.where(cells, 0.0, 1.0) for cells in outside])
    folded = reduce(*[np.where(cells, np.nan, 1.0) for cells in outside])
    for found, whole in zip(folded, expected, strict=True):
        np.testing.assert_array_equal(found, whole)


def test_no_mass_is_lost(mesh):
    cases = [({"x": 5, "y": 7}, "periodic")]
    reduce = reduce_function(mesh, cases, exchange_function(mesh, cases).output_shapes)
    block = np.ones(reduce.impl.slice_shape(reduce.inputs["a0"][0]))
    total = float(mesh.world.allreduce(tf.reduce_sum(reduce(block)[0])))
    assert total == mesh.size * block.size


def test_complaints(mesh):
    with pytest.raises(ValueError, match="halo of 'w'"):
        exchange_function(mesh, [({"w": 1}, "periodic")])
    with pytest.raises(ValueError, match="must not be negative"):
        exchange_function(mesh, [({"x": -1}, "periodic")])
    with pytest.raises(ValueError, match="'mirror' is not one of 'periodic', 'zero'"):
        exchange_function(mesh, [({"x": 1}, "mirror")])
    if mesh.axis_size("row") > 1:
        shape = [("x", 8), ("y", 12)]
        function = MeshFunction(
            lambda _, a: halo_exchange(a, {"x": 1}), mesh, "x:row", {"a": (shape, tf.float32)}
        )
        with pytest.raises(ValueError, match="must split x_halo over row"):
            function(np.zeros((8, 12)))
