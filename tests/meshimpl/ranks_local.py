"""Operations of each rank on its own blocks, and filters of a field: numpy's, and adjoints."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import RANK, SHAPES, SIZE, process_mesh

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import Filter, convolve, convolve_adjoint, without_nyquist
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import local, maximum_over_ranks

SHAPE = mtf.Shape([mtf.Dimension("x", 8), mtf.Dimension("y", 4)])
RNG = np.random.default_rng(8)
X, Y, *WEIGHTS = RNG.normal(size=(4, 8, 4))


def function_on(mesh, build):
    """Of x and y, fields over the mesh's rows and columns."""
    axes = {"x": "row", "y": "col"}
    layout = ";".join(f"{dim}:{axis}" for dim, axis in axes.items() if axis in mesh.names)
    specs = {name: (SHAPE, tf.float64) for name in axes}
    return MeshFunction(lambda _, *inputs: build(*inputs), mesh, layout, specs)


def product_and_sum(x, y):
    return x * y, x + y**2


def adjoint(inputs, cotangents):
    """A result that was not used has no cotangent."""
    (x, y), (first, second) = inputs, cotangents
    if second is None:
        return [first * y, first * x]
    return [first * y + second, first * x + 2.0 * (y * second)]


def apply(x, y, **options):
    return local(product_and_sum, [x, y], [(SHAPE, tf.float64)] * 2, **options)


def slopes(function, weights):
    """Gradients of the weighted sum of the outputs, whole arrays."""
    blocks = [function.block_of(*item) for item in (("x", X), ("y", Y))]
    with tf.GradientTape() as tape:
        tape.watch(blocks)
        outputs = function(*blocks)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        mine = [function.block_of("x", weight) for weight in weights]
        loss = sum(tf.reduce_sum(w * y) for w, y in zip(mine, outputs, strict=True))
    return [function.impl.gather(g, SHAPE).numpy() for g in tape.gradient(loss, blocks)]


def test_two_outputs_and_the_adjoint(mesh):
    function = function_on(mesh, lambda x, y: apply(x, y, adjoint=adjoint))
    outputs = function(X, Y)
    for i, expected in enumerate(product_and_sum(X, Y)):
        np.testing.assert_allclose(function.gather(outputs[i], i), expected, rtol=1e-14)
    first, second = WEIGHTS
    to_x, to_y = slopes(function, WEIGHTS)
    np.testing.assert_allclose(to_x, first * Y + second, atol=1e-14)
    np.testing.assert_allclose(to_y, first * X + 2 * Y * second, atol=1e-14)


def test_one_of_two_outputs(mesh):
    to_x, to_y = slopes(
        function_on(mesh, lambda x, y: apply(x, y, adjoint=adjoint)[0]), WEIGHTS[:1]
    )
    np.testing.assert_allclose(to_x, WEIGHTS[0] * Y, atol=1e-14)
    np.testing.assert_allclose(to_y, WEIGHTS[0] * X, atol=1e-14)


def test_no_adjoint_no_gradient(mesh):
    """What goes around the operation still counts."""
    to_x, to_y = slopes(function_on(mesh, lambda x, y: apply(x, y)[0] + 3.0 * x), WEIGHTS[:1])
    np.testing.assert_allclose(to_x, 3 * WEIGHTS[0], rtol=1e-15)
    np.testing.assert_array_equal(to_y, 0.0)


def test_results_take_the_shape_and_dtype_that_were_announced(mesh):
    """A function may return its elements in any shape, or as an array; their kind stays."""

    def flat_and_whole(x):
        ones = np.ones(x.shape.as_list())
        return tf.reshape(x, [-1]), tf.cast(tf.round(x), tf.int32), ones

    outputs = [(SHAPE, tf.float64), (SHAPE, tf.int32), (SHAPE, tf.float64)]
    function = function_on(mesh, lambda x, _: local(flat_and_whole, [x], outputs))
    same, whole, ones = (function.gather(y, i) for i, y in enumerate(function(X, Y)))
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(whole, np.rint(X).astype(np.int32))
    np.testing.assert_array_equal(ones, 1)
    too_many = function_on(mesh, lambda x, _: local(flat_and_whole, [x], outputs[:1]))
    with pytest.raises(ValueError, match="zip"):
        too_many(X, Y)


def test_maximum_over_ranks(mesh):
    """Each rank has numbers of its own, whatever the layout calls them; it is no gradient's way."""
    pair = mtf.Shape([mtf.Dimension("pair", 2)])

    def own(x):
        return tf.constant([RANK, -RANK], tf.float64) + 0.0 * tf.reduce_sum(x)

    def build(x, y):
        (numbers,) = local(own, [x], [(pair, tf.float64)])
        return maximum_over_ranks(numbers), maximum_over_ranks(x) * y

    function = function_on(mesh, build)
    np.testing.assert_array_equal(function(X, Y)[0], [SIZE - 1, 0])
    block = function.block_of("x", X)
    with tf.GradientTape() as tape:
        tape.watch(block)
        loss = tf.reduce_sum(function(block, Y)[1])
    np.testing.assert_array_equal(tape.gradient(loss, block), 0.0)


# Filters


GRID, SIDES = (8, 12, 16), (40.0, 50.0, 64.0)


def smooth(kx, ky, kz):
    """Real, and even along each axis: also where k and -k are one mode."""
    return 1.0 / (0.01 + kx**2 + 2.0 * ky**2 + 3.0 * kz**2)


def slope_along(axis, box):
    return lambda *k: without_nyquist(k[axis], axis, box) * smooth(*k)


def filters_on(box, kind):
    slopes = [Filter(slope_along(axis, box), imaginary=True) for axis in range(3)]
    even = Filter(smooth)
    return {"one": even, "list of one": [even], "three": slopes, "mixed": [slopes[2], even]}[kind]


def numpys(field, filters):
    """By the full complex transform, over the last three axes."""
    k = [2 * np.pi * np.fft.fftfreq(n, side / n) for n, side in zip(GRID, SIDES, strict=True)]
    kx, ky, kz = np.meshgrid(*k, indexing="ij")
    modes = np.fft.fftn(field, axes=(-3, -2, -1))

    def filtered(f):
        kernel = np.asarray(f.kernel(*(tf.constant(x) for x in (kx, ky, kz))))
        kernel = kernel * (1j if f.imaginary else 1.0)
        return np.fft.ifftn(modes * kernel, axes=(-3, -2, -1))

    if isinstance(filters, Filter):
        return filtered(filters)
    return np.stack([filtered(f) for f in filters], axis=-1)


def whole(box, block, trailing):
    """From the blocks of all ranks, with `trailing` components or none."""
    dims = [mtf.Dimension("component", trailing)] if trailing else []
    return box.whole(block, mtf.Shape([*box.shape.dims, *dims]))


def part_of(box, array):
    """This rank's block of a whole array [..., x, y, z] or with components."""
    begin = ([box.batch_offset] if box.batch else []) + list(box.offset)
    shape = box.local_batch + box.block
    return tf.constant(array[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))])


def functions_on(box, filters):
    """`convolve` of the filters, and its adjoint."""
    dims = [] if isinstance(filters, Filter) else [mtf.Dimension("component", len(filters))]
    shape = mtf.Shape([*box.shape.dims, *dims])
    return (
        box.function(lambda _, x: convolve(x, box, filters), x=box.shape),
        box.function(lambda _, y: convolve_adjoint(y, box, filters), y=shape),
    )


def check_filters(box, kind, tape_too=False):
    filters = filters_on(box, kind)
    count = 0 if isinstance(filters, Filter) else len(filters)
    forward, backward = functions_on(box, filters)
    rng = np.random.default_rng(1)
    space = ((box.batch,) if box.batch else ()) + GRID
    x, y = rng.normal(size=space), rng.normal(size=space + ((count,) if count else ()))
    expected = numpys(x, filters)
    scale = np.abs(expected).max()
    assert np.abs(expected.imag).max() < 1e-13 * scale  # the kernels are what they should be
    blocks = [part_of(box, x), part_of(box, y)]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(blocks)
        result, back = forward(blocks[0]), backward(blocks[1])
        losses = tf.reduce_sum(result * blocks[1]), tf.reduce_sum(back * blocks[0])
    np.testing.assert_allclose(whole(box, result, count), expected.real, atol=1e-13 * scale)
    bound = 1e-12 * np.linalg.norm(y) * np.linalg.norm(expected)
    found = np.vdot(whole(box, back, 0), x)
    assert found == pytest.approx(np.vdot(y, expected.real), abs=bound)
    if tape_too:  # each is the other's derivative
        to_x, to_y = tape.gradient(losses[0], blocks[0]), tape.gradient(losses[1], blocks[1])
        np.testing.assert_allclose(to_x, back, atol=1e-12 * np.abs(back).max())
        np.testing.assert_allclose(to_y, result, atol=1e-12 * scale)


@pytest.mark.dealt(4)
@pytest.mark.ranks(2, 4)
def test_filters_are_numpys_and_their_adjoints(mesh):
    check_filters(Box(GRID, SIDES, mesh, tf.float64), "three")


@pytest.mark.parametrize("kind", ["mixed", "one"] if SIZE < 4 else ["mixed"])
def test_filters_by_a_tape(kind):
    box = Box(GRID, SIDES, process_mesh(SHAPES[SIZE][-1]), tf.float64)
    check_filters(box, kind, tape_too=True)


def test_filters_of_a_batch():
    shape = {1: "replica:1,row:1,col:1", 2: "replica:2,row:1,col:1", 4: "replica:2,row:2,col:1"}
    mesh = process_mesh(shape[SIZE])
    box = Box(GRID, SIDES, mesh, tf.float64, batch=2 * mesh.axis_size("replica"))
    check_filters(box, "list of one")


def test_a_filter_in_single_precision(line):
    box = Box(GRID, SIDES, line, tf.float32)
    forward, _ = functions_on(box, Filter(smooth))
    x = np.random.default_rng(2).normal(size=GRID)
    expected = numpys(x, Filter(smooth)).real
    found = whole(box, forward(tf.cast(part_of(box, x), tf.float32)), 0)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
