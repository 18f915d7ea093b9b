"""Bias of second order in the initial density."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import to_spectrum
from flowpm_dist.initial.lpt import SequentialFFT, second_order_source
from flowpm_dist.observables.bias.base import Bias
from flowpm_dist.observables.options import LAGRANGIAN
from flowpm_dist.observables.universe_model import as_factor, local_values
from flowpm_dist.simulation.state import State
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction


class LagrangianBias(Bias):
    """Weights of particles from the linear overdensity delta at their origins.

    With delta at the final scale factor a particle has the weight

        1 + b1 delta + b2 (delta^2 - <delta^2>) + bs2 (s^2 - <s^2>),

        s_ij = (d_i d_j / laplacian - delta_ij / 3) delta.

    The fields are those of the grid, unsmoothed, so that only fits on the same grid can be compared
    by b2 and bs2.

    Source: Matsubara 2008; Modi, Castorina and Seljak 2017.
    """

    parameters = LAGRANGIAN
    needs_particles = True

    def __init__(self) -> None:
        self._expansions: dict[int | None, MeshFunction] = {}

    def weights(self, state: State, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the weights of the particles [..., x, y, z]."""
        box = state.box
        delta = state.linear_delta.block * as_factor(state.linear_growth, box)
        zero = tf.zeros(box.number_shape.to_integer_list, tf.float64)
        rows = [local_values(values.get(name, zero), box) for name in LAGRANGIAN]
        factors = tf.stack([tf.reshape(row, box.local_batch) for row in rows], axis=-1)
        if box.batch not in self._expansions:
            self._expansions[box.batch] = bias_expansion(box)
        return self._expansions[box.batch](delta, factors)

    def linear_response(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns 1 + b1."""
        return 1 + factor


def bias_expansion(box: Box) -> MeshFunction:
    """Returns `f(delta, factors)`, which gives the weights of the particles [..., x, y, z].

    Args of f:
        delta: linear overdensity [..., x, y, z].
        factors: b1, b2 and bs2 [..., 3].
    """
    names = mtf.Dimension("bias", len(LAGRANGIAN))

    def build(_: Any, delta: Any, factors: Any) -> Any:
        b1, b2, bs2 = mtf.unstack(factors, names)
        square = mtf.square(delta)
        # sum_ij phi_ij^2 = delta^2 - 2 sum_{i<j} (phi_ii phi_jj - phi_ij^2), less delta^2 / 3
        _, minors = second_order_source(to_spectrum(delta), delta, SequentialFFT(box))
        tide = square * (2 / 3) - 2 * minors
        return 1 + b1 * delta + b2 * _centred(square, box) + bs2 * _centred(tide, box)

    return box.function(build, delta=box.shape, factors=mtf.Shape([*box.number_shape.dims, names]))


def _centred(x: Any, box: Box) -> Any:
    return x - mtf.reduce_mean(x, output_shape=box.number_shape)
