"""The model of examples/mesh_model.py trains as NumPy says it must, split in any way."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import MeshFunction, ProcessMesh

pytestmark = [pytest.mark.timeout(120), pytest.mark.ranks(1, 2, 4), pytest.mark.dealt(4)]
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mesh_model.py"))
LAYOUTS = ("batch:row", "hidden:row", "batch:row;hidden:col", "features:row;hidden:col")
RATE, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.999, 1e-6  # upstream's Adam, without bias correction


def losses_by_numpy(
    weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, steps: int
) -> list[float]:
    """The losses of the steps; `weights` begin as the first values, and are changed."""
    first = {n: np.zeros_like(w) for n, w in weights.items()}
    second = {n: np.zeros_like(w) for n, w in weights.items()}
    losses = []
    for _ in range(steps):
        hidden = np.tanh(x @ weights["first/kernel"] + weights["first/bias"])
        error = hidden @ weights["second/kernel"] + weights["second/bias"] - y
        losses.append(float(np.mean(error**2)))
        error *= 2 / error.size
        back = error @ weights["second/kernel"].T * (1 - hidden**2)
        gradients = {
            "first/kernel": x.T @ back,
            "first/bias": back.sum(0),
            "second/kernel": hidden.T @ error,
            "second/bias": error.sum(0),
        }
        for name, gradient in gradients.items():
            first[name] = BETA_1 * first[name] + (1 - BETA_1) * gradient
            second[name] = BETA_2 * second[name] + (1 - BETA_2) * gradient**2
            weights[name] -= RATE * first[name] / (np.sqrt(second[name]) + EPSILON)
    return losses


def test_losses_of_the_example_in_every_layout(mesh: ProcessMesh) -> None:
    random, (batch, features) = np.random.default_rng(1), (16, 8)
    x, y = random.normal(size=[batch, features]), random.normal(size=[batch, 1])
    inputs = {
        "x": ([("batch", batch), ("features", features)], tf.float64),
        "y": ([("batch", batch), ("out", 1)], tf.float64),
    }
    layouts = [layout for layout in LAYOUTS if "col" in mesh.names or "col" not in layout]
    for layout in layouts:
        tf.random.set_seed(1)
        train = MeshFunction(EXAMPLE["step"], mesh, layout, inputs)
        masters = {name: value.numpy() for name, value in train.variables.masters().items()}
        weights = {n: np.float64(w) for n, w in masters.items() if "adam" not in n}
        losses = [float(train(x, y)) for _ in range(4)]
        expected = losses_by_numpy(weights, x, y, 4)
        # Upstream's Adam computes in float32.
        np.testing.assert_allclose(losses, expected, rtol=1e-6, err_msg=layout)
    tf.random.set_seed(None)
