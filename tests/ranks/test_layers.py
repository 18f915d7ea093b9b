"""The layers of a network, split in every way, against TensorFlow's own on the whole volume."""

import numpy as np
import pytest
import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations import layers
from meshimpl.operations.convolution import convolution, halo_widths

pytestmark = pytest.mark.ranks(1, 2, 4)

LAYOUT = {"replica": "batch:replica", "row": "x:row;x_halo:row", "col": "y:col;y_halo:col"}
BATCH, GRID, CHANNELS = 2, (8, 16, 6), 3


def layout_of(mesh, extra=""):
    return ";".join([*(LAYOUT[name] for name in mesh.names), *([extra] if extra else [])])


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


def compare(mesh, function, reference, arrays, cotangent_seed=9, atol=1e-12):
    """Values and every gradient of sum(result * cotangent), block by block."""
    blocks = [function.block_of(n, a) for n, a in zip(function.inputs, arrays, strict=True)]
    wholes = [tf.constant(a) for a in arrays]
    with tf.GradientTape() as tape:
        tape.watch(blocks)
        result = function(*blocks)
        shape = function.output_shapes[0]
        weights = random(cotangent_seed, *shape.to_integer_list)
        weights = weights.astype(result.dtype.as_numpy_dtype)
        mine = function.impl.slice(tf.constant(weights), shape).one_slice
        replicas = np.prod(
            [function.impl.shape[a].size for a in function.impl.replicated_axes(shape)]
        )
        loss = tf.reduce_sum(result * mine) / replicas
    gradients = tape.gradient(loss, blocks)
    with tf.GradientTape() as tape:
        tape.watch(wholes)
        expected = reference(*wholes)
        whole_loss = tf.reduce_sum(expected * weights)
    np.testing.assert_allclose(function.gather(result), expected, atol=atol)
    for (shape, _), g, e in zip(
        function.inputs.values(), gradients, tape.gradient(whole_loss, wholes), strict=True
    ):
        share = np.prod([function.impl.shape[a].size for a in function.impl.replicated_axes(shape)])
        g = function.impl.gather(g * share, shape)
        np.testing.assert_allclose(g, e, atol=100 * atol)


@pytest.mark.parametrize("edges", ["periodic", "zero"])
@pytest.mark.parametrize(
    ("kernel", "stride"), [(3, 1), (4, 1), (2, 1), (3, 2), (2, 2), (5, 1), (1, 2)]
)
def test_convolution(any_mesh, kernel, stride, edges):
    filters = shape_of(
        ("i", kernel), ("j", kernel), ("k", kernel), ("channel", CHANNELS), ("out", 4)
    )
    function = MeshFunction(
        lambda _, x, w: convolution(x, w, stride=stride, edges=edges),
        any_mesh,
        layout_of(any_mesh),
        {"x": (VOLUME, tf.float64), "w": (filters, tf.float64)},
    )
    arrays = [random(1, *VOLUME.to_integer_list), random(2, *filters.to_integer_list)]
    compare(any_mesh, function, lambda x, w: whole_convolution(x, w, stride, edges), arrays)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 1), (3, 2)])
def test_convolution_without_what_lies_beyond_the_edges(any_mesh, kernel, stride):
    """Of whole volumes, whose batch may be split; split volumes are refused."""
    dims = ("i", kernel), ("j", kernel), ("k", kernel), ("channel", CHANNELS), ("out", 4)
    filters = shape_of(*dims)
    function = MeshFunction(
        lambda _, x, w: convolution(x, w, stride=stride, edges="valid"),
        any_mesh,
        layout_of(any_mesh),
        {"x": (VOLUME, tf.float64), "w": (filters, tf.float64)},
    )
    arrays = [random(1, *VOLUME.to_integer_list), random(2, *filters.to_integer_list)]
    if any_mesh.size > any_mesh.axis_size("replica"):
        with pytest.raises(ValueError, match="valid edges need all"):
            function(*arrays)
        return
    compare(any_mesh, function, lambda x, w: whole_convolution(x, w, stride, "valid"), arrays)


def test_convolution_with_split_channels(any_mesh):
    """Output channels over the ranks instead of the volume."""
    axis = max(any_mesh.names, key=any_mesh.axis_size)
    filters = shape_of(("i", 3), ("j", 3), ("k", 3), ("channel", CHANNELS), ("out", 4))
    function = MeshFunction(
        lambda _, x, w: convolution(x, w),
        any_mesh,
        f"out:{axis}",
        {"x": (VOLUME, tf.float64), "w": (filters, tf.float64)},
    )
    arrays = [random(1, *VOLUME.to_integer_list), random(2, *filters.to_integer_list)]
    compare(any_mesh, function, lambda x, w: whole_convolution(x, w, 1, "periodic"), arrays)


def pooled(x, kind, dtype):
    """TensorFlow's pooling of the whole volume, which has no float64."""
    function = {"average": tf.nn.avg_pool3d, "max": tf.nn.max_pool3d}[kind]
    return tf.cast(function(tf.cast(x, tf.float32), 2, 2, "VALID"), dtype)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32])
@pytest.mark.parametrize("kind", ["average", "max"])
def test_pool_bias_and_activation(any_mesh, kind, dtype):
    bias = shape_of(("channel", CHANNELS))
    function = MeshFunction(
        lambda _, x, b: layers.leaky_relu(layers.add_bias(layers.pool(x, kind, 2), b), 0.1),
        any_mesh,
        layout_of(any_mesh),
        {"x": (VOLUME, dtype), "b": (bias, dtype)},
    )
    arrays = [random(3, *VOLUME.to_integer_list), random(4, CHANNELS)]
    compare(
        any_mesh,
        function,
        lambda x, b: tf.nn.leaky_relu(pooled(x, kind, dtype) + b, 0.1),
        [a.astype(dtype.as_numpy_dtype) for a in arrays],
        atol=1e-6,
    )


def test_whole_volumes_and_dense(any_mesh):
    features = int(np.prod([*GRID, CHANNELS]))
    weights = shape_of(("features", features), ("units", 5))

    def build(_, x, w):
        gathered = layers.whole(x, ["x", "y"])
        flat = mtf.reshape(gathered, mtf.Shape([x.shape[0], mtf.Dimension("features", features)]))
        return layers.dense(flat, w)

    function = MeshFunction(
        build,
        any_mesh,
        layout_of(any_mesh),
        {"x": (VOLUME, tf.float64), "w": (weights, tf.float64)},
    )
    compare(
        any_mesh,
        function,
        lambda x, w: tf.reshape(x, [BATCH, -1]) @ w,
        [random(5, *VOLUME.to_integer_list), random(6, features, 5)],
        atol=1e-11,
    )


def dropped(mesh, samples, seed=3, number=0):
    shape = shape_of(("batch", len(samples)), ("features", 64))
    function = MeshFunction(
        lambda _, x, s, i: layers.dropout(x, 0.25, s, i, number),
        mesh,
        layout_of(mesh),
        {
            "x": (shape, tf.float64),
            "s": (mtf.Shape([]), tf.int64),
            "i": (mtf.Shape([shape[0]]), tf.int64),
        },
    )
    x = np.ones([len(samples), 64])
    return function.gather(function(x, np.int64(seed), np.array(samples, np.int64)))


def test_dropout_belongs_to_the_sample(any_mesh):
    samples = [7, 11, 12, 10]
    found = dropped(any_mesh, samples)
    assert set(np.unique(found)) == {0.0, 1 / 0.75}
    assert 0.6 < np.mean(found > 0) < 0.9
    assert len({row.tobytes() for row in found}) == 4
    np.testing.assert_array_equal(dropped(any_mesh, samples[::-1]), found[::-1])
    assert not np.array_equal(dropped(any_mesh, samples, seed=4), found)
    assert not np.array_equal(dropped(any_mesh, samples, number=1), found)


def test_refusals(any_mesh):
    filters = shape_of(("i", 3), ("j", 3), ("k", 3), ("channel", CHANNELS), ("out", 4))
    inputs = {"x": (VOLUME, tf.float64), "w": (filters, tf.float64)}
    arrays = [random(1, *VOLUME.to_integer_list), random(2, *filters.to_integer_list)]

    def call(**options):
        build = lambda _, x, w: convolution(x, w, **options)  # noqa: E731
        return MeshFunction(build, any_mesh, layout_of(any_mesh), inputs)(*arrays)

    with pytest.raises(ValueError, match="'mirror' is not one of"):
        call(edges="mirror")
    if any_mesh.axis_size("row") > 1:
        with pytest.raises(ValueError, match="valid edges need all"):
            call(edges="valid")
        with pytest.raises(ValueError, match="do not divide by the stride 16"):
            call(stride=16)
    else:
        call(stride=2)
