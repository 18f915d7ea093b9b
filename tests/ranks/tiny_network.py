"""A network of every kind of layer that is quick to train; importing this makes it known."""

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
