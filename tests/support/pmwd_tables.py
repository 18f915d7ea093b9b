"""Growth and transfer function interpolated linearly in tables, as pmwd does (arXiv:2211.09958)."""

import functools

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology import Growth, LinearPower, Theory
from flowpm_dist.cosmology.growth_equations import TERMS

PMWD_TRANSFER_NODES = np.logspace(-4.0, 3.0, 897)
"""Wavenumbers at which pmwd tabulates the transfer function by default [h/Mpc]."""


class InterpolatedGrowth(Growth):
    """The growth with D_n/a^n and its derivatives exact at nodes and linear in `a` between them.

    pmwd tabulates the growth at its step edges only: at half steps D1 has errors up to 1e-3 for 10
    steps and 4e-3 for 5. The third order, which pmwd does not have, is interpolated likewise.
    """

    def __init__(self, growth, nodes):
        self.background, self._nodes = growth.background, np.array([0.0, *nodes])
        self._values = {
            (term, derivative): growth.ratio(tf.constant(self._nodes), term, derivative)
            for term in TERMS
            for derivative in (0, 1, 2)
        }

    def ratio(self, a, term, derivative):
        return _interpolate(a, self._nodes, self._values[term, derivative])


class PmwdPower(LinearPower):
    """The linear power with pmwd's table of the transfer function: up to 7e-4 above the exact."""

    def _shape_of(self, cosmology):
        shape, nodes = super()._shape_of(cosmology), np.array([0.0, *PMWD_TRANSFER_NODES])
        beyond_zero = shape.transfer(tf.constant(nodes[1:]))
        values = tf.concat([tf.ones([1], tf.float64), beyond_zero], axis=0)
        shape.transfer = lambda k: _interpolate(k, nodes, values)
        return shape


def pmwd_theory(nodes):
    """Returns what makes the theory with pmwd's tables, of growth at these scale factors."""

    class PmwdTheory(Theory):
        @functools.cached_property
        def growth(self):
            return InterpolatedGrowth(Growth(self.background), nodes)

        @functools.cached_property
        def power(self):
            return PmwdPower(self.cosmology, self.growth)

    return PmwdTheory


def _interpolate(x, nodes, values):
    """Linear interpolation at x of values [n] at nodes [n]; constant outside them."""
    flat = tf.reshape(x, [-1])
    right = tf.clip_by_value(tf.searchsorted(nodes, flat, side="right"), 1, nodes.size - 1)
    x_left, x_right = tf.gather(nodes, right - 1), tf.gather(nodes, right)
    weight = tf.clip_by_value((flat - x_left) / (x_right - x_left), 0.0, 1.0)
    y_left, y_right = tf.gather(values, right - 1), tf.gather(values, right)
    return tf.reshape(y_left + weight * (y_right - y_left), tf.shape(x))
