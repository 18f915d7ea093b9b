"""Fourier filters of maps of the flat sky, which treat the maps as periodic.

A map is a tensor [..., x, y] of pixels over a field of view; a pixel's centre is half a pixel from
the map's edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.options import in_unit


@dataclass(frozen=True)
class FlatSky:
    """The pixels of a map of the flat sky.

    Attributes:
        pixels: the number of pixels along x and y.
        fov: the field of view along x and y [rad].
    """

    pixels: tuple[int, int]
    fov: tuple[float, float]

    @classmethod
    def of(cls, maps: tf.Tensor, fov: Any) -> FlatSky:
        """Returns the sky of maps [..., x, y] over a field of view.

        Args:
            maps: the maps, float32 or float64.
            fov: the field of view [rad]: one number, or those along x and y.

        Raises:
            ValueError: maps of fewer than two dimensions or of no pixels, or of another dtype; a
                field of view that is not above 0.
        """
        if maps.dtype not in (tf.float32, tf.float64):
            raise ValueError(f"maps must be float32 or float64, not {maps.dtype.name}")
        if maps.shape.rank is None or maps.shape.rank < 2 or not all(maps.shape[-2:]):
            raise ValueError(f"maps are tensors [..., x, y] of known shape: got {maps.shape}")
        sides = np.asarray(in_unit("fov", fov, "rad"), np.float64)
        if sides.shape not in ((), (2,)) or not (np.isfinite(sides) & (sides > 0)).all():
            raise ValueError(f"the field of view is one angle or two, above 0 [rad]: got {fov}")
        x, y = np.broadcast_to(sides, [2])
        return cls((int(maps.shape[-2]), int(maps.shape[-1])), (float(x), float(y)))

    @property
    def pixel(self) -> tuple[float, float]:
        """The sides of a pixel [rad]."""
        return (self.fov[0] / self.pixels[0], self.fov[1] / self.pixels[1])

    @property
    def area(self) -> float:
        """The solid angle of the map [sr]."""
        return self.fov[0] * self.fov[1]

    def centres(self) -> np.ndarray:
        """Returns the centres of the pixels [x, y, 2] [rad], float64; component i is along axis i.

        The corner of the map is at 0.
        """
        along = [(np.arange(n) + 0.5) * d for n, d in zip(self.pixels, self.pixel, strict=True)]
        return np.stack(np.meshgrid(*along, indexing="ij"), axis=-1)

    def wavenumbers(self, odd: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Returns the wavenumbers of the modes of `tf.signal.rfft2d` [1/rad], float64.

        Args:
            odd: whether Nyquist modes get 0, as odd kernels need.

        Returns:
            Two arrays, [kx, 1] and [1, ky].
        """
        n_x, n_y = self.pixels
        x, y = np.fft.fftfreq(n_x, 1 / n_x), np.fft.rfftfreq(n_y, 1 / n_y)
        if odd:
            x, y = (np.where(2 * np.abs(m) == n, 0.0, m) for m, n in ((x, n_x), (y, n_y)))
        return (
            2 * np.pi / self.fov[0] * x[:, np.newaxis],
            2 * np.pi / self.fov[1] * y[np.newaxis, :],
        )


SkyKernel = Callable[[FlatSky], tf.Tensor]
"""A sky to the real kernel of each mode of `tf.signal.rfft2d`, float64 [kx, ky]."""


@dataclass(frozen=True)
class SkyFilter:
    """A kernel, real and even in k, or `imaginary`: i times one that is real and odd in k."""

    kernel: SkyKernel
    imaginary: bool = False

    def apply(self, spectrum: tf.Tensor, sky: FlatSky, sign: float = 1.0) -> tf.Tensor:
        """Returns a spectrum [..., kx, ky] times the filter and a sign."""
        kernel = tf.cast(sign * self.kernel(sky), spectrum.dtype)
        return spectrum * (1j * kernel if self.imaginary else kernel)


def inverse_square(sky: FlatSky) -> tf.Tensor:
    """Returns 1 / k^2 [rad^2], which is 0 for the mean."""
    x, y = sky.wavenumbers()
    return tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.square(x) + tf.square(y))


def mixed_product(sky: FlatSky) -> tf.Tensor:
    """Returns kx ky [1/rad^2], the kernel of a mixed second derivative of a real map.

    It is 0 if only one of the two is a Nyquist wavenumber, because its sign is not known. If both
    are, the mode is its own conjugate, and the product is positive.
    """
    (x, y), (odd_x, odd_y) = sky.wavenumbers(), sky.wavenumbers(odd=True)
    both = (x != odd_x) & (y != odd_y)
    return tf.where(both, tf.abs(tf.constant(x) * y), tf.constant(odd_x) * odd_y)


def filter_maps(maps: tf.Tensor, sky: FlatSky, filters: Sequence[SkyFilter]) -> tf.Tensor:
    """Returns the real maps F^-1 K F of real maps, for each filter K.

    Such an operator is symmetric when K is real and even, and antisymmetric when K is imaginary and
    odd: the gradient needs no intermediate map.

    Args:
        maps: [..., x, y], float32 or float64.
        sky: pixels of the maps.
        filters: the filters, one for each component of the result.

    Returns:
        [..., x, y, filter].
    """
    pixels = list(sky.pixels)

    @tf.custom_gradient
    def apply(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        spectrum = tf.signal.rfft2d(value)
        parts = [tf.signal.irfft2d(each.apply(spectrum, sky), pixels) for each in filters]

        def gradient(dy: tf.Tensor) -> tf.Tensor:
            spectra = [
                each.apply(tf.signal.rfft2d(part), sky, -1.0 if each.imaginary else 1.0)
                for each, part in zip(filters, tf.unstack(dy, axis=-1), strict=True)
            ]
            return tf.signal.irfft2d(tf.add_n(spectra), pixels)

        return tf.stack(parts, axis=-1), gradient

    return apply(maps)
