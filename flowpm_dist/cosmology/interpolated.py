"""Growth and transfer function interpolated linearly in tables, as pmwd does (arXiv:2211.09958).

They serve to reproduce a run of pmwd digit by digit. For physics, use `Growth` and `EisensteinHu`
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import TERMS, Growth, GrowthFunctions, Term

PMWD_TRANSFER_NODES = np.logspace(-4.0, 3.0, 897)
"""Wavenumbers at which pmwd tabulates the transfer function by default [h/Mpc]."""


class InterpolatedGrowth(GrowthFunctions):
    """The growth with D_n/a^n and its derivatives exact at nodes and linear in `a` between them.

    pmwd tabulates the growth at its step edges only, so that half steps use interpolated values:
    D1 has errors up to 1e-3 for 10 steps and 4e-3 for 5. The third order, which pmwd does not have,
    is interpolated likewise.

    Args:
        growth: the exact growth.
        nodes: scale factors [1], increasing, above 0; 0 is added before them. Beyond the last
            node the last values hold.

    Raises:
        ValueError: if the nodes are not increasing and above 0.
    """

    def __init__(self, growth: Growth, nodes: Any) -> None:
        super().__init__(growth.background)
        self._nodes = _with_zero(nodes)
        self._values = {
            (term, derivative): growth.ratio(tf.constant(self._nodes), term, derivative)
            for term in TERMS
            for derivative in (0, 1, 2)
        }

    def ratio(self, a: tf.Tensor, term: Term, derivative: int) -> tf.Tensor:
        """See `GrowthFunctions.ratio`; linear in a between the nodes."""
        return _interpolate(a, self._nodes, self._values[term, derivative])


class InterpolatedTransfer:
    """A transfer function linear in k between nodes, with T(0) = 1.

    With `PMWD_TRANSFER_NODES` the power is up to 7e-4 above the exact one.

    Args:
        transfer: T(k) for k > 0 [h/Mpc].
        nodes: wavenumbers [h/Mpc], increasing, above 0; 0 is added before them. Beyond the last
            node the last value holds.

    Raises:
        ValueError: if the nodes are not increasing and above 0.
    """

    def __init__(self, transfer: Callable[[tf.Tensor], tf.Tensor], nodes: Any) -> None:
        self._nodes = _with_zero(nodes)
        beyond_zero = transfer(tf.constant(self._nodes[1:]))
        self._values = tf.concat([tf.ones([1], tf.float64), beyond_zero], axis=0)

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        """Returns T(k) [1] for k >= 0 [h/Mpc], float64, of any shape."""
        return _interpolate(k, self._nodes, self._values)


def _with_zero(nodes: Any) -> np.ndarray:
    extended = np.concatenate([[0.0], np.asarray(nodes, dtype=np.float64)])
    if extended.size < 2 or not np.all(np.diff(extended) > 0):
        raise ValueError(f"nodes must be increasing and above 0, got {nodes}")
    return extended


def _interpolate(x: tf.Tensor, nodes: np.ndarray, values: tf.Tensor) -> tf.Tensor:
    """Returns the linear interpolation at x of values [n] at nodes [n]; constant outside them."""
    flat = tf.reshape(x, [-1])
    right = tf.clip_by_value(tf.searchsorted(nodes, flat, side="right"), 1, nodes.size - 1)
    x_left, x_right = tf.gather(nodes, right - 1), tf.gather(nodes, right)
    weight = tf.clip_by_value((flat - x_left) / (x_right - x_left), 0.0, 1.0)
    y_left, y_right = tf.gather(values, right - 1), tf.gather(values, right)
    return tf.reshape(y_left + weight * (y_right - y_left), tf.shape(x))
