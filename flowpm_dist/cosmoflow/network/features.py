"""The scale of the features that enter the dense layers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

LEAST_SPREAD = 0.03
"""Of calibrated features, over their largest mean: what varies less is not enlarged to variance 1,
or every update of the layers before would shake the dense layers.
"""


class FeatureScaling:
    """Shift and scale of the features that the first dense layer is given.

    What is left of a volume after averaging over it differs little from one universe to the next
    beside its mean, and learning is slow along it. Shifted and scaled by constant numbers, the
    network can express what it could before (data-dependent initialisation, arXiv:1602.07868).

    Args:
        features: how many there are.
        dtype: of the weights.

    Attributes:
        shift, scale: variables [features]; at first 0 and 1.
    """

    def __init__(self, features: int, dtype: tf.DType) -> None:
        self.shift = tf.Variable(tf.zeros([features], dtype), trainable=False, name="shift")
        self.scale = tf.Variable(tf.ones([features], dtype), trainable=False, name="scale")

    def calibrate(self, features: np.ndarray) -> None:
        """Gives features mean 0 and variance 1, from those of some volumes [volume, features].

        Args:
            features: neither shifted nor scaled.
        """
        mean, spread = features.mean(axis=0, dtype=np.float64), features.std(axis=0)
        if spread.max() <= 1e-6 * np.abs(mean).max():
            return  # one volume, again and again: there is nothing to learn from
        self.shift.assign(mean)
        self.scale.assign(1 / np.maximum(spread, LEAST_SPREAD * np.abs(mean).max()))

    def recentre(self, features: np.ndarray) -> None:
        """Gives features mean 0, from those of some volumes, see `calibrate`."""
        self.shift.assign(features.mean(axis=0, dtype=np.float64))
