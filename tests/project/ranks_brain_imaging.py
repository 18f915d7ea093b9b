"""examples/brain_imaging on ranks: the scan and its adjoint, the network, and a training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ranks import by_rank_zero, process_mesh, shared_folder, solo

from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "brain_imaging"))

from adam import Adam
from network import Reconstructor, Scan
from settings import TRAINING, Settings
from training import made_volumes, scans

SMALL = Settings(
    anatomy="made-up",
    side=12,
    voxel=(16.0,),
    volumes=2,
    coils=3,
    acceleration=(2.0, 3.0),
    noise=0.05,
    batch=2,
    steps=2,
    iterations=1,
    consistency=2,
    features=8,
    convolutions=2,
)


def network_on(mesh, noise=SMALL.noise):
    options = {"batch": SMALL.batch, "coils": SMALL.coils, "noise": noise, "dtype": tf.float64}
    return Reconstructor(mesh, SMALL.design, SMALL.sides, **options)


def truths():
    return np.stack([SMALL.made(TRAINING, number) for number in range(SMALL.volumes)])


def batch_on(network, step=0):
    numbers = [(n, 2 * step + n) for n in range(SMALL.batch)]
    return scans(network, SMALL, truths(), TRAINING, numbers)


def weights_away_from_zero():
    rng = np.random.default_rng(7)
    first = SMALL.design.first_weights(1)
    return {name: value + 0.05 * rng.normal(size=value.shape) for name, value in first.items()}


def two_steps(mesh):
    """Losses and weights of two steps of the optimiser."""
    network, adam, losses = network_on(mesh), Adam(weights_away_from_zero()), []
    for step in range(2):
        loss, *gradients = network.step(**batch_on(network, step), **adam.weights)
        losses.append(float(loss))
        adam.update([gradient.numpy() for gradient in gradients], 0.01)
    return {"losses": losses, **adam.weights}


@pytest.mark.ranks(1, 2, 4)
def test_two_steps_are_those_of_one_rank(mesh):
    check_two_steps(mesh)


@pytest.mark.ranks(2)
def test_two_steps_on_replicas_are_those_of_one_rank():
    check_two_steps(process_mesh("replica:2,row:1,col:1"))


def check_two_steps(mesh):
    found = two_steps(mesh)
    right = by_rank_zero("brain_two_steps", lambda: two_steps(solo()))
    moved = weights_away_from_zero()
    for name, value in found.items():
        np.testing.assert_allclose(value, right[name], rtol=1e-9, atol=1e-11, err_msg=name)
        assert name == "losses" or np.abs(value - moved[name]).max() > 1e-3


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("which", ["image", "spectrum"])
def test_scan_and_its_adjoint(network_mesh, which):
    """<u, A v> = <A^H u, v>; the gradient through each is the other."""
    network = network_on(network_mesh)
    given = batch_on(network)
    shapes = {name: getattr(network, name) for name in ("image", "spectrum", "maps", "mask")}

    def products(_, v, u, maps, mask):
        scan = Scan(maps, mask)
        forward, adjoint = scan.forward(v), scan.adjoint(u)
        left, right = mtf.reduce_sum(u * forward), mtf.reduce_sum(v * adjoint)
        gradient = mtf.gradients([left], [v]) if which == "image" else mtf.gradients([right], [u])
        return [left, right, *gradient, adjoint if which == "image" else forward]

    inputs = {name: (shape, tf.float64) for name, shape in shapes.items()}
    function = MeshFunction(products, network_mesh, network.layout, inputs)
    rng = np.random.default_rng(5)
    v, u = (rng.normal(size=shapes[name].to_integer_list) for name in ("image", "spectrum"))
    left, right, gradient, expected = function(v, u, given["maps"], given["mask"])
    assert float(left) == pytest.approx(float(right), rel=1e-12)
    assert abs(float(left)) > 1
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.ranks(1)
def test_gradients_are_differences(mesh):
    network = network_on(mesh)
    given, weights, step = batch_on(network), weights_away_from_zero(), 1e-6
    for k in range(SMALL.iterations):  # features of both signs, far from the activation's kink
        weights[f"bias_{k}_0"] = 2.0 * (-1.0) ** np.arange(SMALL.features)
    _, *gradients = network.step(**given, **weights)
    rng = np.random.default_rng(3)
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        direction = rng.normal(size=weight.shape)
        up, down = (
            float(network.step(**given, **weights | {name: weight + sign * step * direction})[0])
            for sign in (1, -1)
        )
        slope = float(np.sum(gradient * direction))
        assert slope == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-8), name


@pytest.mark.ranks(2)
def test_complete_scans_without_noise_are_the_truth(mesh):
    """And a network whose convolutions are still zero leaves them as they are."""
    network = network_on(mesh, noise=0.0)
    given = batch_on(network)
    given["mask"] = np.ones_like(given["mask"])
    maps = given["maps"].astype(np.float64)
    given["maps"] = maps / np.sqrt(np.sum(maps**2, axis=(1, -1), keepdims=True))
    _, zero_filled = network.measure(**given)
    np.testing.assert_allclose(zero_filled, given["image"], rtol=0, atol=1e-13)
    scan = {name: given[name] for name in ("maps", "mask")}
    image = network.reconstruct(zero_filled, **scan, **SMALL.design.first_weights(0))
    np.testing.assert_allclose(image, given["image"], rtol=0, atol=1e-13)


@pytest.mark.ranks(2)
def test_volumes_of_all_ranks(mesh, tmp_path_factory):
    """Each rank makes some; all are those of the seed."""
    found = made_volumes(mesh, SMALL, shared_folder(tmp_path_factory), TRAINING, 3)
    np.testing.assert_array_equal(found, [SMALL.made(TRAINING, number) for number in range(3)])
