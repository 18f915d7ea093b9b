"""The layers of a network, split in every way, against TensorFlow's own on the whole volume."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, process_mesh

from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations import layers
from meshimpl.operations.layers import convolution, halo_widths

pytestmark = pytest.mark.ranks(1, 4)

# A side with ranks between others, both sides, and a batch with a side.
MESHES = {
    1: ["row:1,col:1", "replica:1,row:1,col:1"],
    4: ["row:4", "row:2,col:2", "replica:2,row:2"],
}
LAYOUT = {"replica": "batch:replica", "row": "x:row;x_halo:row", "col": "y:col;y_halo:col"}
BATCH, GRID, CHANNELS = 2, (8, 16, 6), 3


@pytest.fixture(params=MESHES.get(SIZE, [f"row:{SIZE}"]))
def layer_mesh(request):
    return process_mesh(request.param)


def layout_of(mesh):
    return ";".join(LAYOUT[name] for name in mesh.names)


def shape_of(*pairs):
    return mtf.Shape([mtf.Dimension(n, s) for n, s in pairs])


VOLUME = shape_of(("batch", BATCH), *zip("xyz", GRID, strict=True), ("channel", CHANNELS))


def whole_convolution(x, w, stride, edges):
    """Padded by numpy's rules, then TensorFlow's."""
    if edges != "valid":
        pads = [halo_widths(n, k, stride) for n, k in zip(GRID, w.shape[:3], strict=True)]
        for axis, (before, after) in enumerate(pads, start=1):
            n = x.shape[axis]
            cells = np.arange(-before, n + after)
            padded = tf.gather(x, cells % n, axis=axis)
            if edges == "zero":
                inside = ((cells >= 0) & (cells < n)).astype(np.float64)
                padded *= inside.reshape([-1] + [1] * (4 - axis))
            x = padded
    return tf.nn.conv3d(x, w, [1, stride, stride, stride, 1], "VALID")


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def replicas(function, shape):
    """How many ranks hold each block of a tensor."""
    return np.prod([function.impl.shape[a].size for a in function.impl.replicated_axes(shape)])


def compare(function, reference, arrays, atol=1e-12):
    """Values and every gradient of sum(result * cotangent), block by block.

    `function` and `reference` return as many results; each result has inputs of its own.
    """
    blocks = [function.block_of(n, a) for n, a in zip(function.inputs, arrays, strict=True)]
    wholes = [tf.constant(a) for a in arrays]
    with tf.GradientTape() as tape:
        tape.watch(wholes)
        expected = reference(*wholes)
    weights = [random(9, *y.shape).astype(y.dtype.as_numpy_dtype) for y in expected]
    whole_gradients = tape.gradient(expected, wholes, [tf.constant(w) for w in weights])
    with tf.GradientTape() as tape:
        tape.watch(blocks)
        results = function(*blocks)
    cotangents = [
        tf.constant(my_block(function, shape, w) / replicas(function, shape), w.dtype)
        for w, shape in zip(weights, function.output_shapes, strict=True)
    ]
    gradients = tape.gradient(results, blocks, cotangents)
    for y, e, shape in zip(results, expected, function.output_shapes, strict=True):
        np.testing.assert_allclose(y, my_block(function, shape, e), atol=atol)
    for (name, (shape, _)), g, e in zip(
        function.inputs.items(), gradients, whole_gradients, strict=True
    ):
        g = g * replicas(function, shape)
        np.testing.assert_allclose(
            g, my_block(function, shape, e), atol=100 * atol, err_msg=f"gradient of {name}"
        )


def my_block(function, shape, whole):
    """This rank's block of a whole array."""
    begin = function.impl.slice_begin(shape, function.mesh.rank)
    size = function.impl.slice_shape(shape)
    return np.asarray(whole)[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]


def filters_of(kernel, number=""):
    names = (f"{axis}{number}" for axis in "ijk")
    return shape_of(*((name, kernel) for name in names), ("channel", CHANNELS), ("out", 4))


def check_convolutions(mesh, cases, layout):
    """Convolutions of (kernel, stride, edges), each with inputs of its own, in one function."""
    inputs, arrays = {}, []
    for n, (kernel, _, _) in enumerate(cases):
        filters = filters_of(kernel, n)
        inputs |= {f"x{n}": (VOLUME, tf.float64), f"w{n}": (filters, tf.float64)}
        arrays += [random(1, *VOLUME.to_integer_list), random(2, *filters.to_integer_list)]

    def pairs(tensors):
        return zip(tensors[::2], tensors[1::2], cases, strict=True)

    def build(_, *tensors):
        return [convolution(x, w, stride=s, edges=e) for x, w, (_, s, e) in pairs(tensors)]

    def reference(*tensors):
        return [whole_convolution(x, w, s, e) for x, w, (_, s, e) in pairs(tensors)]

    compare(MeshFunction(build, mesh, layout, inputs), reference, arrays)


KERNELS_AND_STRIDES = [(3, 1), (4, 1), (2, 1), (3, 2), (2, 2), (5, 1), (1, 2)]
EDGES = ["periodic", "zero"]


def test_convolution(layer_mesh):
    # Both sides split and one alone have the same halos; a split batch has none.
    every = layer_mesh.names == ("row", "col")
    chosen = KERNELS_AND_STRIDES if every else [(3, 1), (4, 1), (3, 2)]
    cases = [(*case, edges) for case in chosen for edges in EDGES]
    check_convolutions(layer_mesh, cases, layout_of(layer_mesh))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("channels", [3, 8])
def test_gradient_of_correlations_in_a_block(channels):
    """TensorFlow's own gradient, however the channels decide how it is made."""
    x, w = (
        tf.constant(random(1, 2, 5, 6, 7, channels)),
        tf.constant(random(2, 3, 2, 1, channels, 4)),
    )
    found = []
    for function in (layers.correlated_block, lambda a, b: tf.nn.conv3d(a, b, [1] * 5, "VALID")):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            value = tf.reduce_sum(function(x, w) ** 2)
        found.append(tape.gradient(value, [x, w]))
    for ours, right in zip(*found, strict=True):
        np.testing.assert_allclose(ours, right, rtol=0, atol=1e-12 * np.abs(right).max())


def test_convolution_without_what_lies_beyond_the_edges(layer_mesh):
    """Of whole volumes, whose batch may be split; split volumes are refused."""
    cases = [(3, 1, "valid"), (4, 1, "valid"), (3, 2, "valid")]
    if layer_mesh.size > layer_mesh.axis_size("replica"):
        with pytest.raises(ValueError, match="valid edges need all"):
            check_convolutions(layer_mesh, cases[:1], layout_of(layer_mesh))
        return
    check_convolutions(layer_mesh, cases, layout_of(layer_mesh))


def test_convolution_with_split_channels(layer_mesh):
    """Output channels over the ranks instead of the volume."""
    axis = max(layer_mesh.names, key=layer_mesh.axis_size)
    check_convolutions(layer_mesh, [(3, 1, "periodic")], f"out:{axis}")


def pooled(x, kind, dtype):
    """TensorFlow's pooling of the whole volume, which has no float64."""
    function = {"average": tf.nn.avg_pool3d, "max": tf.nn.max_pool3d}[kind]
    return tf.cast(function(tf.cast(x, tf.float32), 2, 2, "VALID"), dtype)


POOLS = [("average", tf.float64), ("average", tf.float32), ("max", tf.float64), ("max", tf.float32)]


def test_pool_bias_and_activation(layer_mesh):
    bias = shape_of(("channel", CHANNELS))
    inputs, arrays = {}, []
    for n, (_, dtype) in enumerate(POOLS):
        inputs |= {f"x{n}": (VOLUME, dtype), f"b{n}": (bias, dtype)}
        numbers = random(3, *VOLUME.to_integer_list), random(4, CHANNELS)
        arrays += [a.astype(dtype.as_numpy_dtype) for a in numbers]

    def pairs(tensors):
        return zip(tensors[::2], tensors[1::2], POOLS, strict=True)

    def build(_, *tensors):
        return [
            layers.leaky_relu(layers.add_bias(layers.pool(x, kind, 2), b), 0.1)
            for x, b, (kind, _) in pairs(tensors)
        ]

    def reference(*tensors):
        return [
            tf.nn.leaky_relu(pooled(x, kind, dtype) + b, 0.1)
            for x, b, (kind, dtype) in pairs(tensors)
        ]

    function = MeshFunction(build, layer_mesh, layout_of(layer_mesh), inputs)
    compare(function, reference, arrays, atol=1e-6)


def test_whole_volumes_and_dense(layer_mesh):
    features = int(np.prod([*GRID, CHANNELS]))
    weights = shape_of(("features", features), ("units", 5))

    def build(_, x, w):
        gathered = layers.whole(x, ["x", "y"])
        flat = mtf.reshape(gathered, mtf.Shape([x.shape[0], mtf.Dimension("features", features)]))
        return [layers.dense(flat, w)]

    function = MeshFunction(
        build,
        layer_mesh,
        layout_of(layer_mesh),
        {"x": (VOLUME, tf.float64), "w": (weights, tf.float64)},
    )
    compare(
        function,
        lambda x, w: [tf.reshape(x, [BATCH, -1]) @ w],
        [random(5, *VOLUME.to_integer_list), random(6, features, 5)],
        atol=1e-11,
    )


def test_dropout_belongs_to_the_sample(layer_mesh):
    samples = [7, 11, 12, 10]
    cases = [(samples, 3, 0), (samples[::-1], 3, 0), (samples, 4, 0), (samples, 3, 1)]
    shape = shape_of(("batch", len(samples)), ("features", 64))
    inputs, arrays = {"x": (shape, tf.float64)}, [np.ones([len(samples), 64])]
    for n, (ids, seed, _) in enumerate(cases):
        inputs |= {f"s{n}": (mtf.Shape([]), tf.int64), f"i{n}": (shape[:1], tf.int64)}
        arrays += [np.int64(seed), np.array(ids, np.int64)]

    def build(_, x, *tensors):
        return [
            layers.dropout(x, 0.25, seed, ids, number)
            for seed, ids, (_, _, number) in zip(tensors[::2], tensors[1::2], cases, strict=True)
        ]

    function = MeshFunction(build, layer_mesh, layout_of(layer_mesh), inputs)
    blocks = function(*arrays)
    found, backwards, other_seed, other_layer = map(function.gather, blocks, range(len(cases)))
    assert set(np.unique(found)) == {0.0, 1 / 0.75}
    assert 0.6 < np.mean(found > 0) < 0.9
    assert len({row.tobytes() for row in found}) == 4
    np.testing.assert_array_equal(backwards, found[::-1])
    assert not np.array_equal(other_seed, found)
    assert not np.array_equal(other_layer, found)


def test_refusals(layer_mesh):
    filters = filters_of(3)
    inputs = {"x": (VOLUME, tf.float64), "w": (filters, tf.float64)}
    arrays = [random(1, *VOLUME.to_integer_list), random(2, *filters.to_integer_list)]

    def call(**options):
        build = lambda _, x, w: convolution(x, w, **options)  # noqa: E731
        return MeshFunction(build, layer_mesh, layout_of(layer_mesh), inputs)(*arrays)

    with pytest.raises(ValueError, match="'mirror' is not one of"):
        call(edges="mirror")
    if layer_mesh.axis_size("row") > 1:
        with pytest.raises(ValueError, match="valid edges need all"):
            call(edges="valid")
        with pytest.raises(ValueError, match="do not divide by the stride 16"):
            call(stride=16)
    else:
        call(stride=2)
