"""TensorFlow's graph optimizers, as they work where there is a GPU, on the graphs of networks.

    python tests/support/gpu_graphs.py

No GPU is needed: one is described to the optimizers. For each graph with convolutions, prints how
often they have it transpose a tensor.
"""

import functools
import gc
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.network.network import Network
from flowpm_dist.cosmoflow.planning.declarations import Convolution, Declaration, Dense, Pool
from meshimpl import ProcessMesh
from meshimpl.operations import layers

CPU, GPU = (f"/job:localhost/replica:0/task:0/device:{kind}:0" for kind in ("CPU", "GPU"))
SIDE = 12


def transposes(graph: tf.Graph) -> int:
    """Optimizes a graph for a GPU; returns how often that transposes a tensor."""
    device = device_properties_pb2.DeviceProperties
    facts = device(type="GPU", frequency=1980, num_cores=132, environment={"architecture": "9.0"})
    devices = [
        device_properties_pb2.NamedDevice(name=CPU, properties=device(type="CPU", num_cores=8)),
        device_properties_pb2.NamedDevice(name=GPU, properties=facts),
    ]
    nodes = graph.as_graph_def()
    for node in nodes.node:
        node.device = GPU
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(nodes, name="")
        whole = tf.compat.v1.train.export_meta_graph(graph=copy)
    kept = [node.name for node in nodes.node if node.op == "Identity"]
    whole.collection_def["train_op"].node_list.value.extend(kept)
    options = config_pb2.ConfigProto()
    options.graph_options.rewrite_options.min_graph_nodes = -1
    found = tf_optimizer.OptimizeGraph(options, whole, cluster=cluster.Cluster(devices=devices))
    return sum(node.op == "Transpose" for node in found.node)


def train(precision: str) -> None:
    """One step of a network with both pools and a stride."""
    stages = (Convolution(4, 3), Pool(), Convolution(8, 2), Pool(kind="max"))
    stages += (Convolution(8, 3, stride=2), Dense(4))
    declaration = Declaration("graphs", stages, "periodic", 0.1)
    mesh = ProcessMesh("row:1,col:1")
    network = Network(declaration, mesh, width=SIDE, batch=2, precision=precision)
    volumes = np.ones([2, *[SIDE] * 3]).astype(network.input_dtype)
    targets = np.zeros([2, network.parameters], network.weights[0].dtype.as_numpy_dtype)
    network.step(volumes, targets, np.arange(2), 0)


def correct() -> None:
    """A run with the network that moves particles, and its gradient."""
    cosmology, options = fpm.Cosmology.planck18(), {"integrator": "bullfrog", "deconvolve": True}
    sim = fpm.Simulation(cosmology, SIDE, 24.0, [0.5, 1.0], correction="network", **options)
    noise = tf.random.stateless_normal([SIDE] * 3, [1, 2])
    with tf.GradientTape() as tape:
        tape.watch(noise)
        loss = tf.reduce_sum(sim.run(white_noise=noise).density().block ** 2)
    tape.gradient(loss, noise)


def main() -> None:
    """Make all graphs and optimize them."""
    # What layers do on a GPU; it runs here on the CPU.
    config = SimpleNamespace(get_visible_devices=lambda kind: [kind])
    layers.tf = SimpleNamespace(
        **{name: getattr(tf, name) for name in dir(tf)} | {"config": config}
    )
    seen: list[tf.Graph] = []
    steps = {precision: functools.partial(train, precision) for precision in ("float32", "float64")}
    for name, make in {**steps, "correction": correct}.items():
        make()
        for graph in [g for g in gc.get_objects() if isinstance(g, tf.Graph)]:
            convolves = any(operation.type == "Conv3D" for operation in graph.get_operations())
            if convolves and not any(graph is other for other in seen):
                seen.append(graph)
                print(name, transposes(graph), flush=True)


if __name__ == "__main__":
    main()
