"""Coordinates in which minus the log posterior has about the same curvature in every direction.

For a linear universe with the same Gaussian noise everywhere, the curvature with respect to the
white noise is diagonal in Fourier space: 1 + information x |response(k)|^2. Its square root scales
the modes.

Where the response depends on parameters, so do the coordinates. The log determinant of the
transformation is then a part of the posterior in these coordinates. For a linear universe, the
maximum of that posterior over the field is the posterior of the parameters alone (Laplace's
method, exact there), and its curvature with respect to the parameters is the Fisher information of
the power spectrum.

For a nonlinear universe the scaling is only approximate. The posterior that is sampled does not
depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.reconstruction.unknowns import Space, Unknowns
from flowpm_dist.statistics.bins import multiplicities
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction

DIFFERENCE = 1e-3
"""Finite difference of the unit normal parameters, for the slope of the response."""


def mode_filter(space: Space) -> MeshFunction:
    """Returns the compiled `f(field, kernel)`: F^-1 kernel F field, for real kernels even in k."""
    box = space.box
    modes = box.mode_shape if space.names else mtf.Shape(box.mode_shape.dims[-3:])
    return box.function(
        lambda _, x, kernel: to_field(to_spectrum(x) * kernel, box), field=box.shape, kernel=modes
    )


class Scaling:
    """A scaling of the modes and of the parameters by the square root of their curvature.

    Args:
        space: the space of the unknowns.
        function: `f(field, kernel)`, F^-1 kernel F field.
        root: `f(parameters)`, the square root of the curvature with respect to the field, float64,
            for this rank's modes [kz, ky, kx] or [chain, kz, ky, kx].
    """

    def __init__(
        self, space: Space, function: MeshFunction, root: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self._space, self._function, self._root_of = space, function, root

    def to_even(self, x: Unknowns) -> Unknowns:
        """Returns the coordinates of even curvature of a point."""
        field = self.times(x.field, self._root(x.parameters))
        if not self._space.names:
            return Unknowns(field, x.parameters)
        return Unknowns(field, tf.linalg.matvec(self._factor, x.parameters, transpose_a=True))

    def from_even(self, u: Unknowns) -> Unknowns:
        """Returns the point with the given coordinates."""
        return self.place(u).point

    def place(self, u: Unknowns) -> Place:
        """Returns the point with the given coordinates, as a `Place` that transforms gradients."""
        space, parameters = self._space, self._normal(u)
        if not space.names:
            inverse = 1 / self._constant
            point = Unknowns(self.times(u.field, inverse), parameters)
            none = tf.zeros(space.box.local_batch, tf.float64)
            return Place(self, point, none, inverse)
        tape = tf.GradientTape(watch_accessed_variables=False)
        with tape:
            tape.watch(parameters)
            root = self._root(parameters)
            inverse = 1 / root
            field, volume = self.times(u.field, inverse), self._volume(root)
        return Place(self, Unknowns(field, parameters), volume, inverse, tape)

    def times(self, field: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Returns F^-1 kernel F field."""
        return self._function(field, tf.cast(kernel, field.dtype))

    def _normal(self, u: Unknowns) -> tf.Tensor:
        """Returns the unit normal parameters at the given coordinates."""
        if not self._space.names:
            return u.parameters
        return tf.linalg.matvec(self._inverse_factor, u.parameters, transpose_a=True)

    def by_parameters(self, slope: tf.Tensor) -> tf.Tensor:
        """Transforms a gradient with respect to the unit normal parameters to the coordinates."""
        return tf.linalg.matvec(self._inverse_factor, slope)

    def _root(self, parameters: tf.Tensor) -> tf.Tensor:
        return self._root_of(parameters) if self._space.names else self._constant

    @functools.cached_property
    def _constant(self) -> tf.Tensor:
        return self._root_of(self._space.zeros().parameters)

    def _volume(self, root: tf.Tensor) -> tf.Tensor:
        """Returns this rank's part of the log determinant, for each of its chains."""
        return tf.reduce_sum(tf.math.log(root) * self._counted, axis=[-3, -2, -1])

    @functools.cached_property
    def _counted(self) -> tf.Tensor:
        """The number of times that each mode counts, [kz, ky, kx]."""
        x, y, z = multiplicities(self._space.box)
        return tf.constant(x * y * z)

    @functools.cached_property
    def _inverse_factor(self) -> tf.Tensor:
        return tf.linalg.inv(self._factor)

    @functools.cached_property
    def _factor(self) -> tf.Tensor:
        """The Cholesky factor of the parameters' curvature, at the middle of their priors."""
        count = len(self._space.names)
        slopes = []
        for number in range(count):
            away = np.zeros([*self._space.chains, count])
            away[..., number] = DIFFERENCE
            up, down = (tf.math.log(self._root_of(tf.constant(s * away))) for s in (1.0, -1.0))
            slope = (up - down) / (2 * DIFFERENCE)
            slopes.append(slope[0] if self._space.chains else slope)
        rows = tf.stack(slopes)
        local = 2 * tf.einsum("iabc,jabc,abc->ij", rows, rows, self._counted)
        box = self._space.box
        fisher = box.mesh.world.allreduce(local) / box.mesh.axis_size("replica")
        return tf.linalg.cholesky(tf.eye(count, dtype=tf.float64) + fisher)


@dataclass(frozen=True)
class Place:
    """A point of the unknowns, with what transforms its gradients to the coordinates.

    Attributes:
        scaling: the scaling between the point and its coordinates.
        point: the unknowns.
        volume: the log determinant of the transformation of the field, float64: this rank's part,
            for each of its chains. It is 0 where no parameters change it.
        inverse: the inverse of the square root of the curvature.
        tape: the gradient tape of field and volume by the parameters; it can be used once.
    """

    scaling: Scaling
    point: Unknowns
    volume: tf.Tensor
    inverse: tf.Tensor
    tape: tf.GradientTape | None = None

    def gradient(self, by_point: Unknowns) -> Unknowns:
        """Returns the gradient with respect to the coordinates, volume included.

        It can be called once.

        Args:
            by_point: the gradient with respect to the point.
        """
        field = self.scaling.times(by_point.field, self.inverse)
        if self.tape is None:
            return Unknowns(field, by_point.parameters)
        moved = self.tape.gradient(
            [self.point.field, self.volume],
            self.point.parameters,
            output_gradients=[by_point.field, tf.ones_like(self.volume)],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return Unknowns(field, self.scaling.by_parameters(by_point.parameters + moved))
