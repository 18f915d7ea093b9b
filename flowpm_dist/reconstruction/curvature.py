"""Coordinates in which minus the log posterior curves about alike in all directions.

For a linear universe with the same Gaussian noise everywhere, the curvature is diagonal in Fourier
space: 1 + information x |response(k)|^2. Its square root scales the modes, and optimisers and
samplers work on what comes out. Of a universe that is not linear it is a guess; the posterior does
not depend on it.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from flowpm_dist.fields import Box
from flowpm_dist.reconstruction.likelihoods import EXACT, Annealing
from flowpm_dist.reconstruction.unknowns import Unknowns
from flowpm_dist.spectral import to_field, to_spectrum
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction


class Curvature:
    """1 + information x response^2 of each mode.

    Args:
        box: of the field.
        response: of linear theory, of this rank's modes [kz, ky, kx]; see
            `ForwardModel.linear_response`.
        information: mean over all cells of 1 / variance, 0 where nothing is observed.
    """

    def __init__(self, box: Box, response: tf.Tensor, information: float) -> None:
        self._box, self._response, self._information = box, response, information

    def scaling(self, annealing: Annealing = EXACT) -> Scaling:
        """Of the posterior with an annealed likelihood."""
        kx, ky, kz = self._box.wavenumbers()
        kept = tf.exp(tf.constant(-0.5 * (kx**2 + ky**2 + kz**2) * annealing.radius**2))
        response = tf.cast(self._response, tf.float64) * kept / annealing.inflation
        root = tf.sqrt(1 + self._information * response**2)
        return Scaling(self._filter, tf.cast(root, self._box.dtype))

    @functools.cached_property
    def _filter(self) -> MeshFunction:
        """`f(field, kernel)`: F^-1 kernel F field, of real kernels even in k."""
        modes = mtf.Shape(self._box.mode_shape.dims[-3:])
        return self._box.function(
            lambda _, x, kernel: to_field(to_spectrum(x) * kernel, self._box),
            field=self._box.shape,
            kernel=modes,
        )


class Scaling:
    """Multiplication of the modes by the root of the curvature; the parameters are left alone.

    Args:
        function: `f(field, kernel)`, F^-1 kernel F.
        root: of the curvature, of this rank's modes [kz, ky, kx].
    """

    def __init__(self, function: MeshFunction, root: tf.Tensor) -> None:
        self._function, self._root = function, root

    def to_even(self, x: Unknowns) -> Unknowns:
        """Coordinates of even curvature, of a point."""
        return Unknowns(self._function(x.field, self._root), x.parameters)

    def from_even(self, u: Unknowns) -> Unknowns:
        """The point of coordinates; and, as the scaling is symmetric, of a gradient by the point
        that by the coordinates."""
        return Unknowns(self._function(u.field, 1 / self._root), u.parameters)
