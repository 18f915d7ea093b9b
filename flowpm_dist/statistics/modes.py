"""Wavenumber, multiplicity and window of each mode, as three short vectors.

Nothing of the size of a spectrum is kept: what a mode has follows from one entry of each vector.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box

Axes = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Vectors along x, y and z: [1, 1, kx], [1, ky, 1], [kz, 1, 1]; or those of one plane of kz."""


def relative_wavenumbers(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns k / k_f of this rank's modes along x, y and z.

    Returns:
        Three float64 arrays: [1, 1, kx], [1, ky, 1], [kz, 1, 1].
    """
    numbers = box.pencils.mode_numbers()
    x, y, z = (n * (max(box.size) / size) for n, size in zip(numbers, box.size, strict=True))
    return x, y, z


def multiplicities(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the factors along x, y, z of each mode's multiplicity.

    Their product is 2 where a mode also stands for its conjugate, 1 where it does not, and 0 where
    it is padding. The shapes are those of `relative_wavenumbers`.
    """
    x, y, z = box.pencils.mode_numbers()
    twice = box.pencils.multiplicity()[:, np.newaxis, np.newaxis]
    real_z = np.where(z <= box.grid[2] // 2, twice, 0.0)
    return np.ones(x.shape), np.where(y < box.grid[1] // 2, 1.0, 0.0), real_z


def inverse_windows(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the factors along x, y, z of the inverse cloud-in-cell window, sinc^-2(k cell / 2).

    They are 0 for padded modes, where the window may be 0.
    """
    result = []
    real = multiplicities(box)
    for numbers, cells, used in zip(box.pencils.mode_numbers(), box.grid, real, strict=True):
        window = np.sinc(numbers / cells) ** 2
        result.append(np.divide(1.0, window, out=np.zeros_like(window), where=used > 0))
    x, y, z = result
    return x, y, z


def relative_wavenumber(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """Returns |k| / k_f from its components."""
    return tf.sqrt(x**2 + y**2 + z**2)
