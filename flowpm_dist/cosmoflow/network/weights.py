"""The weights of a network before it is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.declarations import Stage

LAST = 0.1
"""Scale of the last layer's first weights. The network then begins near the mean predictor, and its
first updates do not silence the layers before, from which trainings of this network seldom recover.
"""


def initial_weights(
    stages: Sequence[Stage],
    dtype: tf.DType,
    seed: int,
    rule: Literal["he", "glorot"] = "he",
) -> list[tf.Variable]:
    """Returns kernel and bias of each layer that has them, in turn. Biases are zero.

    Args:
        stages: the layers.
        dtype: of the weights.
        seed: of the kernels.
        rule: "he": kernels are normal with variance 2 / inputs (He and others 2015), the last one
            with less, see `LAST`; "glorot": uniform with variance 2 / (inputs + outputs), the
            outputs of a convolution being cells of its kernel x channels (Glorot and Bengio 2010),
            as Keras does.
    """
    return [
        variable
        for number, stage in enumerate(stages)
        if stage.weights is not None
        for variable in _of_layer(
            stage, dtype, [seed, number], rule, LAST if stage is stages[-1] else 1
        )
    ]


def _of_layer(
    stage: Stage, dtype: tf.DType, seed: Sequence[int], rule: str, scale: float
) -> tuple[tf.Variable, tf.Variable]:
    assert stage.weights is not None
    rng, (*cells, channels, channels_out) = np.random.default_rng(seed), stage.weights
    if rule == "glorot":
        limit = np.sqrt(6 / (math.prod(cells) * (channels + channels_out)))
        draw = rng.uniform(-limit, limit, stage.weights)
    else:
        deviation = scale * np.sqrt(2 / (math.prod(cells) * channels))
        draw = deviation * rng.standard_normal(stage.weights)
    kernel = tf.Variable(draw, dtype=dtype, name=f"{stage.name}_kernel")
    return kernel, tf.Variable(tf.zeros([stage.channels_after], dtype), name=f"{stage.name}_bias")
