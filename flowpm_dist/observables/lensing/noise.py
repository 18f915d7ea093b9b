"""Noise of the shapes of galaxies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import as_float64
from flowpm_dist.grid.flat_sky import FlatSky
from flowpm_dist.options import A_SEED
from meshimpl import philox

ARCMIN = math.pi / 180 / 60
"""A minute of arc [rad]."""

_STREAM = 2  # of the generator; white noise of a universe has 0 and 1


def shape_noise_sigma(sigma_e: Any, n_eff: Any, pixel_area: float) -> tf.Tensor:
    """Returns the rms noise of a pixel, of each component of shear or of convergence [1].

    sigma_e / sqrt(n_eff A_pixel) (van Waerbeke 2000, astro-ph/9909160); float64, differentiable.

    Args:
        sigma_e: rms ellipticity of a galaxy per component [1].
        n_eff: galaxies per square minute of arc; shapes broadcast.
        pixel_area: solid angle of a pixel [sr].
    """
    per_pixel = as_float64(n_eff) * (pixel_area / ARCMIN**2)
    return as_float64(sigma_e) / tf.sqrt(per_pixel)


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
