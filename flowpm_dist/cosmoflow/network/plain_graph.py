"""The layers of a declared network on whole volumes, in TensorFlow alone.

`LayerGraph` is the same on a mesh. What is here can be saved and run without this package.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.layer_graph import INPUTS, LayerGraph
from flowpm_dist.cosmoflow.network.losses import kept_within
from flowpm_dist.cosmoflow.planning.declarations import Convolution, Dense, Pool, Shrink, Stage
from meshimpl.operations.convolution import halo_widths
from meshimpl.operations.layers import pooled_block


def plain_outputs(
    graph: LayerGraph,
    volumes: tf.Tensor,
    weights: Sequence[tf.Tensor],
    scaling: tuple[tf.Tensor, tf.Tensor],
) -> tf.Tensor:
    """Returns the outputs of a network for whole volumes, as after training [n, outputs].

    Args:
        graph: the network.
        volumes: [n, x, y, z], or with channels as a last dimension where there are several.
        weights: kernel and bias of each layer in turn.
        scaling: shift and scale of the features.
    """
    given, flat = iter(weights), False
    x = INPUTS[graph.input](volumes)
    x = tf.cast(x if graph.channels > 1 else x[..., tf.newaxis], graph.precision)
    for stage in graph.stages:
        here = stage.layer
        if isinstance(here, Convolution):
            kernel = tf.cast(next(given), x.dtype)
            strides, edges = [1, *[here.stride] * 3, 1], graph.declaration.edges
            x = _wrapped(x, stage) if edges == "periodic" else x
            x = tf.nn.conv3d(x, kernel, strides, "SAME" if edges == "zero" else "VALID")
        elif isinstance(here, Pool):
            x = pooled_block(x, here.kind, here.size)
        elif isinstance(here, Shrink):
            x = pooled_block(x, "average", stage.width // here.width)
        elif isinstance(here, Dense):
            kernel = tf.convert_to_tensor(next(given))
            if not flat:
                flat, (shift, scale) = True, scaling
                features = tf.reshape(x, [-1, kernel.shape[0]])
                x = (tf.cast(features, kernel.dtype) - shift) * scale
            x = tf.matmul(x, kernel)
        if stage.weights is not None:
            x += tf.cast(next(given), x.dtype)
            if stage is not graph.stages[-1]:
                x = tf.nn.leaky_relu(x, graph.declaration.slope)
    bounded = graph.declaration.bounded
    return kept_within(x, graph.parameters, bounded=bounded, within=graph.within)


def _wrapped(x: tf.Tensor, stage: Stage) -> tf.Tensor:
    """Periodic volumes [n, x, y, z, channel] with the cells that kernels reach beyond the edges."""
    assert isinstance(stage.layer, Convolution)
    before, after = halo_widths(stage.width, stage.layer.kernel, stage.layer.stride)
    for axis in (1, 2, 3):
        x = tf.gather(x, np.arange(-before, stage.width + after) % stage.width, axis=axis)
    return x
