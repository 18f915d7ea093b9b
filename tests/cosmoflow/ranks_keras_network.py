"""Keras models as networks: the same steps on replicas as on one rank, and as by Keras itself."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import RANK, SIZE, process_mesh

from flowpm_dist.cosmoflow.network import layers
from flowpm_dist.cosmoflow.network.keras_network import KerasNetwork, ModelError, made_model
from flowpm_dist.cosmoflow.network.network import of_all_replicas
from flowpm_dist.cosmoflow.volumes.universes import as_maps, as_volumes

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.grappler,
    pytest.mark.timeout(300, method="thread"),
]

BATCH, WIDTH = 4, 8
SMALL = "keras_models:small"


def replicas(size=SIZE):
    return process_mesh(f"replica:{size}")


def network(name=SMALL, mesh=None, **options):
    options = {"width": WIDTH, "batch": BATCH, "parameters": 2, "precision": "float64", **options}
    return KerasNetwork(name, mesh or replicas(), **options)


def batch():
    """A whole batch: volumes, targets and numbers of the samples."""
    rng = np.random.default_rng(5)
    volumes = rng.lognormal(size=[BATCH, WIDTH, WIDTH, WIDTH])
    return volumes, rng.normal(size=[BATCH, 2]), np.arange(BATCH)


def own(whole):
    """This replica's part of a batch."""
    count = BATCH // SIZE
    return whole[RANK * count : (RANK + 1) * count]


def test_a_step_is_that_of_the_model_on_the_whole_batch():
    found = network(within=1.5)
    volumes, targets, samples = batch()
    loss, outputs, gradients = found.step(own(volumes), own(targets), own(samples), seed=1)
    model = made_model(SMALL, (WIDTH,) * 3 + (1,), 4, "float64", 0)
    for weight, value in zip(model.trainable_weights, found.weights, strict=True):
        weight.assign(value)
    with tf.GradientTape() as tape:
        raw = model(np.log1p(volumes)[..., np.newaxis] - np.log(2))
        bounded = tf.concat([1.5 * tf.tanh(raw[:, :2] / 1.5), raw[:, 2:]], axis=1)
        expected = tf.reduce_mean(layers.doubting_nll(tf.constant(targets), bounded))
    of_weights = tape.gradient(expected, [w.value for w in model.trainable_weights])
    np.testing.assert_allclose(loss, expected, rtol=1e-13)
    np.testing.assert_allclose(outputs, own(bounded.numpy()), rtol=1e-12)
    np.testing.assert_allclose(of_all_replicas(outputs, found.mesh), bounded, rtol=1e-12)
    for gradient, wanted in zip(gradients, of_weights, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("sources", [1, 2])
def test_maps_are_given_without_their_layer(sources):
    """In multiples of 0.02, with the sources as channels; whatever the layout in batches."""
    name = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"
    found = network(name, channels=sources, flat=True, input="convergence")
    kappa = 0.02 * np.random.default_rng(6).normal(size=[BATCH, sources, WIDTH, WIDTH])
    volumes = as_volumes(kappa)
    assert volumes.shape == (BATCH, WIDTH, WIDTH, 1, sources)[: 4 + (sources > 1)]
    np.testing.assert_array_equal(as_maps(volumes), kappa)
    expected = found.model(np.moveaxis(kappa, 1, -1) / 0.02)
    np.testing.assert_allclose(found.predict(volumes), expected, rtol=1e-12, atol=1e-14)
    assert float(tf.math.reduce_std(expected)) > 0


def test_what_layers_keep_and_draw():
    found = network("keras_models:with_all")
    whole = batch()
    first, _, _ = found.step(*map(own, whole), seed=1)
    again, _, _ = found.step(*map(own, whole), seed=1)
    other, _, _ = found.step(*map(own, whole), seed=2)
    assert float(first) == float(again) != float(other)  # dropout follows the seed
    assert len(found.state) == len(found.weights) + 5
    mean = found.state[-2]
    assert float(tf.reduce_max(tf.abs(mean))) > 0  # moving averages moved, alike on all ranks
    np.testing.assert_array_equal(mean, found.mesh.world.broadcast(mean))


def test_a_penalty_counts_once():
    found = network("keras_models:with_all", seed=3)
    whole = batch()
    loss, _, gradients = found.step(*map(own, whole), seed=1)
    for weight in found.model.trainable_weights:
        weight.regularizer = None
    del found.__dict__["_gradients"]
    without, _, plain = found.step(*map(own, whole), seed=1)
    kernel = found.weights[0]
    np.testing.assert_allclose(loss - without, 0.01 * tf.reduce_sum(kernel**2), rtol=1e-6)
    np.testing.assert_allclose(gradients[0] - plain[0], 0.02 * kernel, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keras_models:no_model", "returns function: it must return a keras.Model"),
        ("keras_models:too_many", r"gives \(None, 5\) for volumes \(8, 8, 8, 1\); wanted is .*4"),
        (
            "keras_models:failing",
            r"called with \(8, 8, 8, 1\) and 4: RuntimeError: no layers today",
        ),
        ("keras_models:smal", "the module 'keras_models' has no 'smal'"),
    ],
)
def test_what_is_no_model_is_told(name, message):
    with pytest.raises(ModelError, match=message):
        network(name)


def test_volumes_are_not_split():
    mesh = process_mesh(f"row:{SIZE}")
    if SIZE == 1:
        assert network(mesh=mesh).outputs == 4
        return
    with pytest.raises(ValueError, match="is a Keras model.*, or the mesh replica:2"):
        network(mesh=mesh)


def test_bfloat16_keeps_weights_and_outputs_in_float32():
    found = network(precision="bfloat16")
    volumes = own(batch()[0])
    assert found.predict(volumes).dtype == tf.float32
    assert {w.dtype for w in found.weights} == {tf.float32}
    exact = network(precision="float32")
    for weight, value in zip(exact.weights, found.weights, strict=True):
        weight.assign(value)
    difference = np.abs(found.predict(volumes) - exact.predict(volumes)).max()
    assert 1e-5 < difference < 0.05
