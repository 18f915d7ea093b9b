"""The bias of tracers: its interface, and the schemes."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_for_all_sizes
from flowpm_dist.grid.fourier import to_spectrum
from flowpm_dist.initial.lpt import second_order_source
from flowpm_dist.initial.transforms import SequentialFFT
from flowpm_dist.observables.tracers import EULERIAN, LAGRANGIAN
from flowpm_dist.observables.universe_model import as_factor, local_values
from flowpm_dist.options import python_object
from flowpm_dist.simulation.state import State
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction


class Bias(abc.ABC):
    """The density of tracers, given the matter.

    Attributes:
        parameters: the names of the bias parameters; the first is the linear bias.
        needs_particles: whether the scheme weighs particles, which linear theory does not have.

    The values that methods take are float64 numbers, or one for each chain [chain].
    """

    parameters: ClassVar[tuple[str, ...]]
    needs_particles: ClassVar[bool] = False

    def weights(self, state: State, values: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
        """Returns the weights of the particles [..., x, y, z], or None where all are equal."""
        return None

    def contrast(self, contrast: tf.Tensor, values: Mapping[str, tf.Tensor], box: Box) -> tf.Tensor:
        """Returns the density contrast of tracers, from the contrast of the weighted particles.

        In redshift space the latter has the distortions by velocities in it. Tracers share those
        with matter, so linear bias belongs in `weights` there.
        """
        return contrast

    @abc.abstractmethod
    def linear_response(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns the tracers' density contrast over the matter's, in linear theory.

        Args:
            factor: the value of the first parameter.
        """


class EulerianBias(Bias):
    """The density 1 + b (rho - 1) [mean density].

    It would multiply redshift-space distortions by b, too: see `ObservationOptions`, which refuses
    it there.
    """

    parameters = EULERIAN

    def contrast(self, contrast: tf.Tensor, values: Mapping[str, tf.Tensor], box: Box) -> tf.Tensor:
        """Returns b (rho - 1)."""
        return local_values(values["b"], box) * contrast

    def linear_response(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns b."""
        return factor


class LagrangianBias(Bias):
    """Weights of particles from the linear overdensity delta at their origins.

    With delta at the final scale factor a particle has the weight

        1 + b1 delta + b2 (delta^2 - <delta^2>) + bs2 (s^2 - <s^2>),

        s_ij = (d_i d_j / laplacian - delta_ij / 3) delta.

    The fields on the grid are not smoothed, so that only fits on the same grid can be compared
    by b2 and bs2.

    Source: Matsubara 2008; Modi, Castorina and Seljak 2017.
    """

    parameters = LAGRANGIAN
    needs_particles = True

    def weights(self, state: State, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the weights of the particles [..., x, y, z]."""
        box = state.box
        delta = state.linear_delta.block * as_factor(state.linear_growth, box)
        zero = tf.zeros(box.number_shape.to_integer_list, tf.float64)
        rows = [local_values(values.get(name, zero), box) for name in LAGRANGIAN]
        factors = tf.stack([tf.reshape(row, box.local_batch) for row in rows], axis=-1)
        return bias_expansion(box)(delta, factors)

    def linear_response(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns 1 + b1."""
        return 1 + factor


@cached_for_all_sizes(16)
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
        _, minors = second_order_source(
            to_spectrum(delta, in_order=True), delta, SequentialFFT(box)
        )
        tide = square * (2 / 3) - 2 * minors
        return 1 + b1 * delta + b2 * _centred(square, box) + bs2 * _centred(tide, box)

    return box.function(build, delta=box.shape, factors=mtf.Shape([*box.number_shape.dims, names]))


def _centred(x: Any, box: Box) -> Any:
    return x - mtf.reduce_mean(x, output_shape=box.number_shape)


SCHEMES: tuple[type[Bias], ...] = (EulerianBias, LagrangianBias)


def bias_with(names: Collection[str], named: Any = None) -> Bias | None:
    """Returns the bias scheme that has these parameters, or None if no parameters are given.

    Args:
        names: the names of the parameters.
        named: a custom class, its "package.module:object", or a `Bias` itself.

    Raises:
        ValueError: the custom scheme has other parameters, or no scheme has these.
    """
    if named is not None:
        custom = python_object(named)
        made = cast(Bias, custom if isinstance(custom, Bias) else custom())
        if missing := set(made.parameters) ^ set(names):
            parameters = ", ".join(made.parameters) or "none"
            raise ValueError(
                f"bias_scheme {named!r} has the parameters {parameters}; bias must have a value "
                f"for each (differing: {', '.join(sorted(missing))})"
            )
        return made
    for scheme in SCHEMES:
        if names and set(names) <= set(scheme.parameters):
            return scheme()
    if names:
        known = "; ".join(", ".join(scheme.parameters) for scheme in SCHEMES)
        raise ValueError(f"no bias scheme has the parameters {', '.join(names)} ({known})")
    return None
