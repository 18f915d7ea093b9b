"""A network of every kind of layer that is quick to train; importing this makes it known."""

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow import (
    DECLARATIONS,
    Convolution,
    Declaration,
    Dense,
    Dropout,
    Pool,
    Shrink,
)

TINY = Declaration(
    "tiny",
    (
        Convolution(4, 3),
        Pool(),
        Convolution(6, 4),
        Pool("max"),
        Convolution(8, 3, stride=2),
        Shrink(1),
        Dense(32),
        Dropout(),
        Dense(16),
    ),
    "periodic",
    0.1,
)
DECLARATIONS[TINY.name] = TINY


def largest(density):
    """A statistic: the largest and the smallest density of each universe, over all its ranks."""
    blocks = density.block.numpy().reshape(len(density.block), -1)
    ends = tf.constant([blocks.max(axis=1), -blocks.min(axis=1)])
    return density.box.mesh.world.allgather(ends[np.newaxis]).numpy().max(axis=0).T
