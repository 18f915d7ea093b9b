"""The weights of a network before it is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.declarations import Stage

LAST = 0.1
"""Scale of the last layer's first weights. The network then begins near the mean predictor, and its
first updates do not silence the layers before, from which trainings of this network seldom recover.
"""


def initial_weights(stages: Sequence[Stage], dtype: tf.DType, seed: int) -> list[tf.Variable]:
    """Returns kernel and bias of each layer that has them, in turn.

    Kernels have variance 2 / inputs (He and others 2015), the last one less, see `LAST`; biases
    are zero.

    Args:
        stages: the layers.
        dtype: of the weights.
        seed: of the kernels.
    """
    return [
        variable
        for number, stage in enumerate(stages)
        if stage.weights is not None
        for variable in _of_layer(stage, dtype, [seed, number], LAST if stage is stages[-1] else 1)
    ]


def _of_layer(
    stage: Stage, dtype: tf.DType, seed: Sequence[int], scale: float
) -> tuple[tf.Variable, tf.Variable]:
    assert stage.weights is not None
    inputs = int(np.prod(stage.weights[:-1]))
    deviation = scale * np.sqrt(2 / inputs)
    draw = deviation * np.random.default_rng(seed).standard_normal(stage.weights)
    kernel = tf.Variable(draw, dtype=dtype, name=f"{stage.name}_kernel")
    return kernel, tf.Variable(tf.zeros([stage.channels_after], dtype), name=f"{stage.name}_bias")
