"""Local primordial non-Gaussianity: white noise whose potential has a quadratic part.

The potential of the matter era, +3/5 of the curvature perturbation zeta, is

    Phi = phi + f_NL (phi^2 - <phi^2>)

with a Gaussian phi (Komatsu and Spergel 2001, astro-ph/0005036, in the convention of the microwave
background). f_NL > 0 makes the density skewed towards peaks. The linear overdensity before growth
is M(k) Phi with M^2 = P / P_phi, see `LinearPower.potential`. As phi = s w in Fourier space, with
white noise w and the amplitude s = sqrt(P_phi / cell volume), it is sqrt(P / cell volume) times

    w + f_NL F[phi^2] / s.

This is the noise that is returned. So the linear field and LPT of every order are made from it as
from Gaussian noise. The square is taken on the grid, and aliases are part of it: in cubes of 64^3
they are 3 % rms of the quadratic part at 0.3 to 0.5 of the Nyquist frequency, 15 % at 0.7 to 0.8
and 35 % next to it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_for_all_sizes
from flowpm_dist.grid.fourier import to_field, to_spectrum
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import pointwise


@cached_for_all_sizes(16)
def local_noise_function(box: Box) -> MeshFunction:
    """Returns `f(white_noise, amplitude, f_NL)`: the noise of a field that has local f_NL.

    Args:
        box: the box of one universe, or of a batch.

    Args of f:
        white_noise: Gaussian noise [..., x, y, z].
        amplitude: the amplitude of the potential's modes, see `potential_amplitude`.
        f_NL: the box's `number_shape`, in its dtype [1].
    """

    def build(_: Any, noise: Any, amplitude: Any, f_NL: Any) -> Any:
        phi = to_field(to_spectrum(noise) * amplitude, box)
        square = to_spectrum(pointwise(tf.square, phi))
        return noise + f_NL * to_field(pointwise(_divided, square, amplitude), box)

    return box.function(
        build, white_noise=box.shape, amplitude=box.mode_shape, f_NL=box.number_shape
    )


def _divided(pairs: tf.Tensor, amplitude: tf.Tensor) -> tf.Tensor:
    """Returns the pairs [..., kz, ky, kx, pair] over the amplitude; 0 where that is 0: the mean."""
    positive = amplitude > 0
    inverse = 1.0 / tf.where(positive, amplitude, tf.ones_like(amplitude))
    return pairs * tf.where(positive, inverse, tf.zeros_like(inverse))[..., tf.newaxis]
