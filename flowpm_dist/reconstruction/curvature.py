"""Coordinates in which minus the log posterior curves about alike in all directions.

For a linear universe with the same Gaussian noise everywhere, the curvature by the white noise is
diagonal in Fourier space: 1 + information x |response(k)|^2. Its square root scales the modes.

Where the response depends on parameters, so do the coordinates, and the volume they stretch by
belongs to the posterior in them. For a linear universe its maximum over the field is then the
posterior of the parameters alone (Laplace's method, exact there), and the curvature by them is the
Fisher information of the power spectrum.

Of a universe that is not linear all this is a guess; what is drawn from the posterior does not
depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.reconstruction.likelihoods import EXACT, Annealing
from flowpm_dist.reconstruction.unknowns import Space, Unknowns
from flowpm_dist.statistics.bins import multiplicities
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction

DIFFERENCE = 1e-3
"""Of unit normal parameters, for the slope of the response by them."""


class Curvature:
    """1 + information x response^2 of each mode.

    Args:
        space: of the unknowns.
        response: of linear theory, `f(parameters)` of the unit normal parameters [..., n]: of this
            rank's modes [kz, ky, kx], or of its chains, too; see `ForwardModel.linear_response`.
        information: `f(annealing)`, mean over all cells of 1 / variance, 0 where nothing is
            observed.
    """

    def __init__(
        self,
        space: Space,
        response: Callable[[tf.Tensor], tf.Tensor],
        information: Callable[[Annealing], float],
    ) -> None:
        self._space, self._response, self._information = space, response, information

    def scaling(self, annealing: Annealing = EXACT) -> Scaling:
        """Of the posterior with an annealed likelihood."""
        kx, ky, kz = self._space.box.wavenumbers()
        kept = tf.exp(tf.constant(-((kx**2 + ky**2 + kz**2) * annealing.radius**2)))
        information = kept * (self._information(annealing) / annealing.inflation**2)

        def root(parameters: tf.Tensor) -> tf.Tensor:
            response = tf.cast(self._response(parameters), tf.float64)
            return tf.sqrt(1 + information * tf.square(response))

        return Scaling(self._space, self._filter, root)

    @functools.cached_property
    def _filter(self) -> MeshFunction:
        """`f(field, kernel)`: F^-1 kernel F field, of real kernels even in k."""
        space = self._space
        box = space.box
        modes = box.mode_shape if space.names else mtf.Shape(box.mode_shape.dims[-3:])
        return box.function(
            lambda _, x, kernel: to_field(to_spectrum(x) * kernel, box),
            field=box.shape,
            kernel=modes,
        )


class Scaling:
    """Multiplication of the modes by the root of the curvature, and of the parameters by theirs.

    Args:
        space: of the unknowns.
        function: `f(field, kernel)`, F^-1 kernel F.
        root: `f(parameters)`, of the curvature by the field, float64, of this rank's modes
            [kz, ky, kx] or [chain, kz, ky, kx].
    """

    def __init__(
        self, space: Space, function: MeshFunction, root: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self._space, self._function, self._root_of = space, function, root

    def to_even(self, x: Unknowns) -> Unknowns:
        """Coordinates of even curvature, of a point."""
        field = self.times(x.field, self._root(x.parameters))
        if not self._space.names:
            return Unknowns(field, x.parameters)
        return Unknowns(field, tf.linalg.matvec(self._factor, x.parameters, transpose_a=True))

    def from_even(self, u: Unknowns) -> Unknowns:
        """The point of coordinates."""
        return self.place(u).point

    def place(self, u: Unknowns) -> Place:
        """The point of coordinates, and what leads from its gradients to theirs."""
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
        """F^-1 kernel F field."""
        return self._function(field, tf.cast(kernel, field.dtype))

    def _normal(self, u: Unknowns) -> tf.Tensor:
        """The unit normal parameters."""
        if not self._space.names:
            return u.parameters
        return tf.linalg.matvec(self._inverse_factor, u.parameters, transpose_a=True)

    def by_parameters(self, slope: tf.Tensor) -> tf.Tensor:
        """By the coordinates, of a gradient by the unit normal parameters."""
        return tf.linalg.matvec(self._inverse_factor, slope)

    def _root(self, parameters: tf.Tensor) -> tf.Tensor:
        return self._root_of(parameters) if self._space.names else self._constant

    @functools.cached_property
    def _constant(self) -> tf.Tensor:
        return self._root_of(self._space.zeros().parameters)

    def _volume(self, root: tf.Tensor) -> tf.Tensor:
        """This rank's part, of each of its chains."""
        return tf.reduce_sum(tf.math.log(root) * self._counted, axis=[-3, -2, -1])

    @functools.cached_property
    def _counted(self) -> tf.Tensor:
        """How often each mode counts."""
        x, y, z = multiplicities(self._space.box)
        return tf.constant(x * y * z)

    @functools.cached_property
    def _inverse_factor(self) -> tf.Tensor:
        return tf.linalg.inv(self._factor)

    @functools.cached_property
    def _factor(self) -> tf.Tensor:
        """Cholesky factor of the curvature by the parameters, at the middle of their priors."""
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
    """Coordinates and their point.

    Attributes:
        scaling: that leads from one to the other.
        point: of the unknowns.
        volume: log of what the coordinates stretch volumes of the field by, float64, this rank's
            part of each of its chains; 0 where no parameters change it.
        inverse: of the root of the curvature.
        tape: of field and volume by the parameters, used once.
    """

    scaling: Scaling
    point: Unknowns
    volume: tf.Tensor
    inverse: tf.Tensor
    tape: tf.GradientTape | None = None

    def gradient(self, by_point: Unknowns) -> Unknowns:
        """By the coordinates, of what has a gradient by the point, and of the volume; once."""
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
