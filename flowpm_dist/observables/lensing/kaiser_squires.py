"""The shear of a convergence, and the convergence of a shear (Kaiser and Squires 1993)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from flowpm_dist.grid.flat_sky import (
    FlatSky,
    SkyFilter,
    filter_maps,
    inverse_square,
    mixed_product,
)


def shear(kappa: Any, fov: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the shear gamma1, gamma2 of a convergence in the Born approximation.

    In Fourier space gamma1 = (k1^2 - k2^2) / k^2 kappa, gamma2 = 2 k1 k2 / k^2 kappa (Kaiser and
    Squires 1993). Axis 1 is the map's x, axis 2 its y. The map is taken as
    periodic; its mean gives no shear. Differentiable.

    Args:
        kappa: convergence [..., x, y] [1], float32 or float64.
        fov: field of view [rad], one number or those along x and y.

    Returns:
        Two tensors like kappa [1].
    """
    kappa = tf.convert_to_tensor(kappa)
    found = filter_maps(kappa, FlatSky.of(kappa, fov), [SkyFilter(_plus), SkyFilter(_cross)])
    return found[..., 0], found[..., 1]


def convergence(gamma1: Any, gamma2: Any, fov: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the convergence of a shear and of its B-modes, each with mean 0.

    The inverse of `shear`: the second is 0 for a shear that is only due to lensing, in the Born
    approximation. Differentiable.

    Args:
        gamma1, gamma2: shear [..., x, y] [1], float32 or float64.
        fov: field of view [rad], one number or those along x and y.

    Returns:
        Two tensors like the shear [1]: E and B.
    """
    gamma1, gamma2 = tf.convert_to_tensor(gamma1), tf.convert_to_tensor(gamma2)
    sky, filters = FlatSky.of(gamma1, fov), [SkyFilter(_plus), SkyFilter(_cross)]
    first, second = filter_maps(gamma1, sky, filters), filter_maps(gamma2, sky, filters)
    return first[..., 0] + second[..., 1], second[..., 0] - first[..., 1]


def _plus(sky: FlatSky) -> tf.Tensor:
    x, y = sky.wavenumbers()
    return (tf.square(x) - tf.square(y)) * inverse_square(sky)


def _cross(sky: FlatSky) -> tf.Tensor:
    return 2.0 * mixed_product(sky) * inverse_square(sky)
