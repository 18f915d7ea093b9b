"""Bins of wavenumber: one fundamental mode wide, up to the smallest Nyquist wavenumber.

Bin number i holds the modes with i + 1/2 <= k / k_f < i + 3/2, where k_f = 2 pi / (longest side).
The bin and the weight of a mode follow from three short vectors: nothing of the size of a spectrum
is kept.
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from meshimpl.process_mesh import ProcessMesh

_TIE = 1e-9
"""Added before rounding down, so that rounding errors do not affect modes on an edge of a bin."""


def bin_count(box: Box) -> int:
    """Returns the number of bins up to the smallest Nyquist wavenumber."""
    return int(np.floor(max(box.size) / (2 * max(box.cell)) + 1e-6))


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


def bin_number(relative: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the bin (int32) of |k| / k_f.

    The mode k = 0 and the modes beyond the last bin are given bin `count`.
    """
    number = tf.cast(tf.floor(relative + (0.5 + _TIE)), tf.int32) - 1
    return tf.where((number >= 0) & (number < count), number, count)


@functools.lru_cache(maxsize=16)
def bin_contents(box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean wavenumber [h/Mpc] and the number of modes of each bin.

    k and -k are both counted. Must be called on all ranks together.

    Returns:
        Two float64 arrays [bins], the same on every rank.
    """
    count = bin_count(box)
    x, y, z = relative_wavenumbers(box)
    _, weight_y, weight_z = multiplicities(box)
    local = np.zeros((2, count + 1))
    for along_z, weight in zip(z[:, 0, 0], weight_z[:, 0, 0], strict=True):
        k = relative_wavenumber(x[0], y[0], along_z).numpy()
        number = bin_number(k, count).numpy().ravel()
        weights = np.broadcast_to(weight * weight_y[0], k.shape)
        for row, values in zip(local, (weights, weights * k), strict=True):
            row += np.bincount(number, values.ravel(), count + 1)
    modes, total = sum_over_universe(box.mesh, local[:, :-1])
    return 2 * np.pi / max(box.size) * total / modes, modes


def sum_over_universe(mesh: ProcessMesh, values: np.ndarray) -> np.ndarray:
    """Returns the sum over the ranks that share a universe. It runs eagerly."""
    axes = [name for name in mesh.names if name != "replica"]
    return mesh.communicator(*axes).allreduce(tf.constant(values)).numpy()
