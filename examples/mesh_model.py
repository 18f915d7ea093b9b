"""A model of ten lines in Mesh TensorFlow, trained on any mesh of ranks, saved and resumed.

    python examples/mesh_model.py
    python -m meshimpl.launch 2 examples/mesh_model.py --mesh row:2 --layout hidden:row
    python -m meshimpl.launch 4 examples/mesh_model.py --mesh row:2,col:2 \\
        --layout "batch:row;hidden:col"

The network learns a smooth function of 8 numbers. With --save its variables are written at the end;
with --restore a later call begins with them, on the same or on another mesh.
"""

import argparse

import numpy as np
import tensorflow as tf

from meshimpl import MeshFunction, ProcessMesh
from meshimpl.compat import mtf

FEATURES, BATCH, HIDDEN = 8, 512, 64


def step(graph_mesh, x, y):
    """Returns the loss of a batch, and makes one step of Adam."""
    features, (hidden, out) = x.shape.dims[1:], [mtf.Dimension("hidden", HIDDEN), *y.shape.dims[1:]]
    between = mtf.layers.dense(x, hidden, features, activation=mtf.tanh, name="first")
    predicted = mtf.layers.dense(between, out, [hidden], name="second")
    loss = mtf.reduce_mean(mtf.square(predicted - y))
    weights = graph_mesh.graph.trainable_variables
    gradients = mtf.gradients([loss], [weight.outputs[0] for weight in weights])
    mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(gradients, weights)
    return loss


def parser() -> argparse.ArgumentParser:
    """Returns the options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--mesh", default="row:1", help="such as row:2,col:2")
    options.add_argument("--layout", default="batch:row", help='such as "batch:row;hidden:col"')
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--save", help="file to which the variables are written")
    options.add_argument("--restore", help="file from which they are read")
    return options


def main() -> None:
    """Train, and print the loss."""
    options = parser().parse_args()

    random = np.random.default_rng(1)
    x = random.normal(size=[BATCH, FEATURES])
    y = np.sin(x @ random.normal(size=[FEATURES, 1]) / 2)

    tf.random.set_seed(1)
    inputs = {
        "x": ([("batch", BATCH), ("features", FEATURES)], tf.float32),
        "y": ([("batch", BATCH), ("out", 1)], tf.float32),
    }
    train = MeshFunction(step, ProcessMesh(options.mesh), options.layout, inputs)
    if options.restore:
        train.variables.restore(options.restore)
    for number in range(options.steps):
        loss = float(train(x, y))
        if train.mesh.rank == 0 and number % 10 == 0:
            print(f"step {number:3}  loss {loss:.7f}", flush=True)
    if options.save:
        train.variables.save(options.save)


if __name__ == "__main__":
    main()
