"""The network on every mesh against the same network written in plain TensorFlow: serial is
parallel, forward, in every gradient, and after several steps down them."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import process_mesh

from flowpm_dist.cosmoflow.network import layers
from flowpm_dist.cosmoflow.network.network import Network, of_all_replicas
from flowpm_dist.cosmoflow.planning.declarations import (
    Convolution,
    Declaration,
    Dense,
    Dropout,
    Pool,
    Shrink,
)
from meshimpl.operations.layers import halo_widths

pytestmark = pytest.mark.grappler

WIDTH, BATCH, PARAMETERS = 16, 4, 3
LAYERS = (
    Convolution(4, 3),
    Pool(),
    Convolution(5, 4),
    Pool("max"),
    Convolution(6, 3, stride=2),
    Convolution(6, 2),
    Shrink(1),
    Dense(16),
    Dropout(),
    Dense(8),
    Dropout(),
)
SMALL = {
    edges: Declaration(f"small-{edges}", LAYERS, edges, 0.1, bounded=edges == "zero")
    for edges in ("periodic", "zero")
}


def volumes(seed=0, batch=BATCH):
    return np.random.default_rng(seed).gamma(1.0, 1.0, [batch, WIDTH, WIDTH, WIDTH])


def targets(seed=1, batch=BATCH):
    return np.random.default_rng(seed).uniform(-1, 1, [batch, PARAMETERS])


def pad(x, kernel, stride, edges):
    for axis in (1, 2, 3):
        n = x.shape[axis]
        before, after = halo_widths(n, kernel, stride)
        if edges == "periodic":
            x = tf.gather(x, np.arange(-before, n + after) % n, axis=axis)
        else:
            x = tf.pad(x, [[before, after] if i == axis else [0, 0] for i in range(5)])
    return x


def plain(network, x, weights, seed=None, samples=None):
    """The declaration carried out on whole volumes."""
    given, drops, features = iter(weights), 0, None
    x = (tf.math.log1p(x) - np.log(2))[..., None]
    for stage in network.stages:
        layer = stage.layer
        if isinstance(layer, Convolution):
            edges, s = network.declaration.edges, layer.stride
            x = tf.nn.conv3d(pad(x, layer.kernel, s, edges), next(given), [1, s, s, s, 1], "VALID")
        elif isinstance(layer, Pool | Shrink):
            size = layer.size if isinstance(layer, Pool) else stage.width // layer.width
            pool = tf.reduce_max if getattr(layer, "kind", "") == "max" else tf.reduce_mean
            for axis in (1, 2, 3):
                n = x.shape[axis] // size
                x = pool(
                    tf.stack(
                        [tf.gather(x, np.arange(n) * size + i, axis=axis) for i in range(size)]
                    ),
                    axis=0,
                )
        elif isinstance(layer, Dense):
            x = tf.reshape(x, [x.shape[0], -1])
            if features is None and network.centre and seed is not None:
                x -= tf.reduce_mean(x, axis=0)
            features = x
            x = x @ next(given)
        elif seed is not None and network.options.dropout:
            drops += 1
            keys = [[seed, (drops << 40) + int(i)] for i in samples]
            draws = [tf.random.stateless_uniform([x.shape[1]], key) for key in keys]
            share = network.options.dropout
            x *= tf.cast(tf.stack(draws) >= share, x.dtype) / (1 - share)
        if stage.weights is not None:
            x = x + next(given)
            if stage is not network.stages[-1]:
                x = tf.nn.leaky_relu(x, network.declaration.slope)
    if network.within is not None:
        means = network.within * tf.tanh(x[:, :PARAMETERS] / network.within)
        x = tf.concat([means, x[:, PARAMETERS:]], 1)
    if network.declaration.bounded:
        x = tf.concat([1.2 * tf.tanh(x[:, :PARAMETERS]), x[:, PARAMETERS:]], 1)
    return x


def plain_step(network, x, y, weights, seed, samples):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        outputs = plain(network, x, weights, seed, samples)
        loss = tf.reduce_mean(layers.LOSSES[network.loss](y, outputs))
    return loss, outputs, tape.gradient(loss, weights)


def descend(weights, gradients):
    """A step that enlarges no rounding; optimisers are tested in ranks_training.py."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.03 * gradient)


def network_on(mesh, edges="periodic", **options):
    options = {"precision": "float64", "dropout": 0.3, "gather_below": 2} | options
    return Network(SMALL[edges], mesh, width=WIDTH, batch=BATCH, parameters=PARAMETERS, **options)


def with_biases(network):
    """Biases start at zero, where a wrong one would not show."""
    for number, weight in enumerate(network.weights):
        if weight.shape.rank == 1:
            values = np.random.default_rng(number).normal(size=weight.shape) * 0.1
            weight.assign(tf.constant(values, weight.dtype))
    return network


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_forward_gradients_and_five_steps(network_mesh):
    check_five_steps(network_mesh, "periodic", "likelihood", True)


@pytest.mark.dealt
@pytest.mark.every_split
def test_zero_edges(mesh):
    """In slabs along either axis; a replica axis does not touch the edges."""
    check_five_steps(mesh, "zero", "l1", False)


def check_five_steps(network_mesh, edges, loss, centre):
    within = 0.2 if centre else None  # so near that it matters
    network = network_on(network_mesh, edges, loss=loss, centre=centre, within=within)
    network = with_biases(network)
    samples = np.arange(10, 10 + BATCH)
    serial = [tf.Variable(w) for w in network.weights]
    for step in range(5):
        x, y = volumes(step), targets(step)
        loss_here, outputs, gradients = network.step(x, y, samples, seed=step)
        expected = plain_step(network, x, y, serial, step, samples)
        np.testing.assert_allclose(loss_here, expected[0], rtol=1e-11)
        np.testing.assert_allclose(of_all_replicas(outputs, network.mesh), expected[1], atol=1e-10)
        for g, e in zip(gradients, expected[2], strict=True):
            np.testing.assert_allclose(g, e, atol=1e-9 * float(tf.norm(e)) + 1e-13)
        descend(network.weights, gradients)
        descend(serial, expected[2])
    for w, s in zip(network.weights, serial, strict=True):
        np.testing.assert_allclose(w, s, atol=1e-8)
    without = plain(network, volumes(), serial)
    np.testing.assert_allclose(
        of_all_replicas(network.predict(volumes()), network.mesh), without, atol=1e-6
    )


@pytest.mark.dealt
def test_features_are_centred_where_a_volume_is_asked_about(network_mesh):
    """With `recentre` a step, which takes off its batch's mean, and `predict` agree."""
    network = with_biases(network_on(network_mesh, centre=True, dropout=0.0))
    outputs = network.step(volumes(), targets(), np.arange(BATCH), seed=0)[1]
    assert not np.allclose(network.predict(volumes()), outputs, atol=1e-4)
    network.recentre([volumes()])
    np.testing.assert_allclose(network.predict(volumes()), outputs, atol=1e-10)


@pytest.mark.dealt
def test_channels_over_an_axis(network_mesh):
    """Output channels split instead of one side of the volume, with the batch split or not."""
    sides = [name for name in network_mesh.names if name != "replica"]
    axis = max(sides, key=network_mesh.axis_size)
    layers = tuple(
        Convolution(4, x.kernel, x.stride) if isinstance(x, Convolution) else x for x in LAYERS
    )
    network = Network(
        Declaration("even", layers, "periodic", 0.1),
        network_mesh,
        width=WIDTH,
        batch=BATCH,
        precision="float64",
        split_channels=axis,
        gather_below=2,
    )
    loss, outputs, gradients = network.step(volumes(), targets(), np.arange(BATCH), seed=0)
    expected = plain_step(
        network, volumes(), targets(), [tf.Variable(w) for w in network.weights], 0, range(BATCH)
    )
    np.testing.assert_allclose(loss, expected[0], rtol=1e-11)
    for g, e in zip(gradients, expected[2], strict=True):
        np.testing.assert_allclose(g, e, atol=1e-9 * float(tf.norm(e)) + 1e-13)


@functools.cache
def stepped(mesh, precision):
    """Outputs and gradients of one step of a network, each precision with the same weights."""
    network = with_biases(network_on(mesh, loss="l2", precision=precision))
    return network.step(volumes(), targets(), np.arange(BATCH), seed=0)[1:]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_lower_precision_stays_near(precision):
    """Rounding to 24 bits, or 8, and no more."""
    split = process_mesh("row:1,col:2")
    outputs, gradients = stepped(split, "float64")
    found, rough_gradients = stepped(split, precision)
    epsilon = {"float32": 1e-6, "bfloat16": 2**-8}[precision]
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, outputs, atol=20 * epsilon * np.abs(outputs).max())
    for g, e in zip(rough_gradients, gradients, strict=True):
        assert g.dtype == tf.float32
        difference = np.linalg.norm(g.numpy() - e.numpy())
        assert difference < 40 * epsilon * np.linalg.norm(e) + 1e-12


def test_ranks_start_equal_and_rank_zero_counts(network_mesh):
    network = network_on(network_mesh)
    network.weights[0].assign_add(tf.ones_like(network.weights[0]) * network_mesh.rank)
    network.broadcast_weights()
    largest = network_mesh.world.allreduce(tf.convert_to_tensor(network.weights[0]), "max")
    smallest = network_mesh.world.allreduce(tf.convert_to_tensor(network.weights[0]), "min")
    np.testing.assert_array_equal(largest, smallest)
    np.testing.assert_array_equal(network.weights[0], network_on(network_mesh).weights[0])


def test_sc18_takes_no_split_volume(network_mesh):
    split = network_mesh.size // network_mesh.axis_size("replica")
    if split > 1:
        with pytest.raises(ValueError, match="use sc18-periodic, or the mesh"):
            Network("sc18", network_mesh, width=128, batch=BATCH)
    with pytest.raises(ValueError, match="nothing is left of a volume of 32 cells"):
        Network("sc18", network_mesh, width=32, batch=BATCH)
    if network_mesh.axis_size("replica") > 1:
        with pytest.raises(ValueError, match="a batch of 3 volumes does not divide"):
            Network("sc18-periodic", network_mesh, width=32, batch=3)


def own_block(mesh, whole):
    """This rank's part of volumes [batch, x, y, z]."""
    places = {"replica": 0, "row": 1, "col": 2}
    for name in mesh.names:
        parts = np.split(whole, mesh.axis_size(name), axis=places[name])
        whole = parts[mesh.coordinate(name)]
    return tf.constant(whole)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2)
def test_a_network_is_differentiable_in_its_input(network_mesh):
    """J v . u = v . J^T u; J v by differences, J^T u by the mesh and by plain TensorFlow."""
    network = with_biases(network_on(network_mesh, within=0.2))
    x, v = volumes(), volumes(9) - 1
    u = np.random.default_rng(4).normal(size=[BATCH, network.outputs])
    holders = network_mesh.size // network_mesh.axis_size("replica")
    share = len(u) // network_mesh.axis_size("replica")
    mine = u[network_mesh.coordinate("replica") * share :][:share]
    block = own_block(network_mesh, x)
    with tf.GradientTape() as tape:
        tape.watch(block)
        weighted = tf.reduce_sum(mine * network.predict(block)) / holders
    backward = tape.gradient(weighted, block)
    found = network_mesh.world.allreduce(tf.reduce_sum(backward * own_block(network_mesh, v)))

    def forward(step):
        return of_all_replicas(network.predict(own_block(network_mesh, x + step * v)), network.mesh)

    step = 1e-6
    expected = np.sum(u * (forward(step) - forward(-step))) / (2 * step)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    whole = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(whole)
        outputs = network.on_whole_volumes(whole)
    np.testing.assert_allclose(
        of_all_replicas(network.predict(block), network.mesh), outputs, atol=1e-12
    )
    serial = own_block(network_mesh, tape.gradient(outputs, whole, u).numpy())
    np.testing.assert_allclose(backward, serial, atol=1e-10 * float(tf.norm(serial)))


@pytest.mark.ranks(1)
def test_zero_edges_of_a_network_that_is_asked_in_float32(network_mesh):
    """Padding and convolution were merged to half of the volumes where no gradient was wanted."""
    network = network_on(network_mesh, "zero", precision="float32")
    x = volumes().astype(np.float32)
    np.testing.assert_allclose(network.predict(x), network.on_whole_volumes(x), atol=1e-5)
