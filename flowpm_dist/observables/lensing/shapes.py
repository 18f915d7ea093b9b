"""The shear of a convergence and its inverse (Kaiser and Squires 1993), and noise of the shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.grid.flat_sky import FlatSky, SkyFilter, filter_maps, inverse_square, mixed_product
from flowpm_dist.options import A_SEED, in_unit
from meshimpl import philox

ARCMIN = math.pi / 180 / 60
"""A minute of arc [rad]."""

_STREAM = 2  # of the generator; white noise of a universe has 0 and 1


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
    kappa = tf.convert_to_tensor(in_unit("kappa", kappa))
    components = filter_maps(kappa, FlatSky.of(kappa, fov), _SHEAR)
    return components[..., 0], components[..., 1]


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
    gamma1 = tf.convert_to_tensor(in_unit("gamma1", gamma1))
    gamma2 = tf.convert_to_tensor(in_unit("gamma2", gamma2))
    sky = FlatSky.of(gamma1, fov)
    first, second = filter_maps(gamma1, sky, _SHEAR), filter_maps(gamma2, sky, _SHEAR)
    return first[..., 0] + second[..., 1], second[..., 0] - first[..., 1]


def _plus(sky: FlatSky) -> tf.Tensor:
    x, y = sky.wavenumbers()
    return (tf.square(x) - tf.square(y)) * inverse_square(sky)


_SHEAR = (SkyFilter(_plus), SkyFilter(lambda sky: 2.0 * mixed_product(sky) * inverse_square(sky)))
"""The filters of gamma1 and gamma2, from kappa."""


def shape_noise_sigma(sigma_e: Any, n_eff: Any, pixel_area: float) -> tf.Tensor:
    """Returns the rms noise of a pixel, of each component of shear or of convergence [1].

    sigma_e / sqrt(n_eff A_pixel) (van Waerbeke 2000, astro-ph/9909160); float64, differentiable.

    Args:
        sigma_e: rms ellipticity of a galaxy per component [1].
        n_eff: galaxies per square minute of arc; shapes broadcast.
        pixel_area: solid angle of a pixel [sr].
    """
    pixel_area = in_unit("pixel_area", pixel_area, "sr")
    per_pixel = as_float64(n_eff, "n_eff", "1/arcmin^2") * (pixel_area / ARCMIN**2)
    return as_float64(sigma_e, "sigma_e") / tf.sqrt(per_pixel)


def shape_noise(
    pixels: Sequence[int],
    fov: Any,
    sigma_e: Any,
    n_eff: Any,
    seed: int,
    components: int = 2,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Returns Gaussian noise of the shapes of galaxies, to be added to maps of each source.

    The same for a seed on any rank and any number of them, and up to rounding in either dtype.
    White, so that its angular power is sigma_e^2 / n_eff with n_eff in 1/sr. Differentiable by
    sigma_e and n_eff.

    Args:
        pixels: pixels of a map along x and y.
        fov: field of view [rad], one number or those along x and y.
        sigma_e: rms ellipticity of a galaxy per component [1], of each source [source] or of all.
        n_eff: galaxies per square minute of arc, of each source [source] or of all.
        seed: seed of the noise.
        components: 2 for shear; 1 for convergence, of which the noise is as large.
        dtype: float32 or float64.

    Returns:
        [source, component, x, y]; without the first dimension if sigma_e and n_eff are numbers.

    Raises:
        ValueError: pixels, field of view, sigma_e, n_eff or components that are not above 0;
            a seed that is no whole number from 0 to 2^63 - 1.
    """
    pixels, seed = in_unit("pixels", pixels), in_unit("seed", seed)
    components = in_unit("components", components)
    sigma_e, n_eff = in_unit("sigma_e", sigma_e), in_unit("n_eff", n_eff, "1/arcmin^2")
    if len(pixels) != 2 or min(pixels) < 1 or components < 1:
        raise ValueError(f"pixels and components: two sides above 0, and at least 1; got {pixels}")
    for name, value in (("sigma_e", sigma_e), ("n_eff", n_eff)):
        known = tf.get_static_value(as_float64(value))
        if known is not None and not (np.isfinite(known) & (known > 0)).all():
            raise ValueError(f"{name} must be above 0, got {known}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed = {seed}: must be {A_SEED}")
    sky = FlatSky.of(tf.zeros(pixels, tf.float32), fov)
    sigma = shape_noise_sigma(sigma_e, n_eff, sky.pixel[0] * sky.pixel[1])
    shape = [*sigma.shape, components, *sky.pixels]
    unit = philox.normal_block(shape, [0] * len(shape), shape, _STREAM, seed)
    return tf.cast(sigma[..., tf.newaxis, tf.newaxis, tf.newaxis] * unit, dtype)
