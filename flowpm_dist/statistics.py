"""Statistics of fields, measured where they lie: each rank bins its own modes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.fields import Box, Field
from flowpm_dist.spectral import to_spectrum
from meshimpl.compat import mtf, mtf_ops
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor
from meshimpl.mesh_function import MeshFunction
from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class PowerSpectrum:
    """A measured power spectrum; unpacks as `k, power`.

    Attributes:
        k: mean wavenumber of the modes of each bin [h/Mpc].
        power: [(Mpc/h)^3].
        modes: number of modes, k and -k counted both.
    """

    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.k, self.power))


def bin_count(box: Box) -> int:
    """Bins 1, 2, ... of the longest side's fundamental mode, up to the smallest Nyquist."""
    return int(np.floor(max(box.size) / (2 * max(box.cell)) + 1e-6))


def plane_bins(box: Box, plane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bins of this rank's modes of one kz: floor(k / k_f + 0.5) - 1.

    Returns:
        bin (modes beyond the last and the mean are in bin `bin_count`), how often each mode counts
        (2 where it stands for its conjugate too, 0 where it is padding), and k [h/Mpc]; [ky, kx].
    """
    kx, ky, kz = (k[0] if k.shape[0] == 1 else k[plane] for k in box.wavenumbers())
    _, number_y, number_z = box.pencils.mode_numbers()
    k = np.sqrt(kx**2 + ky**2 + kz**2)
    number = np.floor(k * max(box.size) / (2 * np.pi) + 0.5).astype(np.int32) - 1
    count = bin_count(box)
    padding = (number_y[0] >= box.grid[1] // 2) | (number_z[plane] > box.grid[2] // 2)
    weight = np.where(padding, 0.0, box.pencils.multiplicity()[plane])
    number = np.where((number >= 0) & (number < count), number, count)
    return number.astype(np.int32), np.broadcast_to(weight, k.shape), k


def mode_table(box: Box, window: Literal["cic"] | None) -> tuple[np.ndarray, np.ndarray]:
    """Bin (int32) and weight (the box's dtype) of this rank's modes [kz, ky, kx].

    The weight of a mode is how often it counts, over the squared window.
    """
    block = box.pencils.spectral_block
    numbers, weights = np.empty(block, np.int32), np.empty(block, box.dtype.as_numpy_dtype)
    along = [
        np.sinc(k * cell / (2 * np.pi)) ** 4
        for k, cell in zip(box.wavenumbers(), box.cell, strict=True)
    ]
    for plane in range(block[0]):
        numbers[plane], weight, _ = plane_bins(box, plane)
        if window:
            square = along[0][0] * along[1][0] * along[2][plane]
            # a padded mode may lie where the window is 0
            weight = np.divide(weight, square, out=np.zeros_like(weight), where=weight > 0)
        weights[plane] = weight
    return numbers, weights


class BinnedSumOperation(mtf.Operation):
    """Sum of weight |mode|^2 over the modes of each bin, complete on every rank."""

    def __init__(self, inputs: list[Any], count: int, name: str | None = None) -> None:
        super().__init__(inputs, name=name or "binned_sum")
        shape = mtf.Shape([mtf.Dimension("bin", count)])
        self._outputs = [mtf.Tensor(self, shape, inputs[0].dtype)]
        self._count = count

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """d sum / d mode = 2 weight mode: each bin's cotangent goes to its modes."""

        def spread(value: tf.Tensor, number: tf.Tensor, weight: tf.Tensor, dy: tf.Tensor) -> Any:
            per_mode = tf.gather(tf.pad(dy, [[0, 1]]), number) * weight
            return 2 * value * per_mode[..., tf.newaxis]

        spectrum = self.inputs[0]
        found = mtf.slicewise(
            spread,
            [*self.inputs, grad_ys[0]],
            splittable_dims=spectrum.shape.dims,
            grad_function=0,
            name="binned_sum_gradient",
        )
        return [found, None, None]

    def lower(self, lowering: Any) -> None:
        """Each rank sums its modes; then one small allreduce."""
        impl = lowering.mesh_impl(self)
        value, number, weight = (
            lowering.tensors[x].to_laid_out_tensor().one_slice for x in self.inputs
        )
        square = tf.reduce_sum(value**2, axis=-1) * weight
        # Plane by plane: sums in float64 without a float64 copy of the spectrum.
        planes = tf.map_fn(
            lambda pair: tf.math.unsorted_segment_sum(
                tf.cast(pair[0], tf.float64), pair[1], self._count + 1
            ),
            (square, number),
            fn_output_signature=tf.float64,
        )
        sums = tf.cast(tf.reduce_sum(planes, axis=0)[:-1], value.dtype)
        axes = [axis for axis in impl.tensor_layout(self.inputs[0]) if axis is not None]
        total = mtf_ops.LazyAllreduceSum(impl, LaidOutTensor([sums]), sorted(axes))
        lowering.set_tensor_lowering(self.outputs[0], total)


def box_of(field: Any, box_size: Any) -> tuple[Box, tf.Tensor]:
    """The box and the block of a `Field`, or of a whole array on one rank.

    Raises:
        ValueError: not a scalar field, or another box size than the field's own.
    """
    if isinstance(field, Field):
        box, block = field.box, field.block
        given = np.broadcast_to(np.asarray(box_size, float), (3,))
        if not np.allclose(given, box.size):
            raise ValueError(f"box_size {tuple(given)} is not that of the field, {box.size}")
    else:
        block = tf.convert_to_tensor(field)
        if block.shape.rank != 3:
            raise ValueError(f"a scalar field [x, y, z] is needed, got shape {block.shape}")
        x, y, z = (float(s) for s in np.broadcast_to(np.asarray(box_size, float), (3,)))
        nx, ny, nz = block.shape.as_list()
        box = Box((nx, ny, nz), (x, y, z), ProcessMesh("row:1,col:1"), block.dtype)
    if block.shape.rank != 3:
        raise ValueError(f"a scalar field is needed, got blocks of shape {block.shape}")
    return box, block


@functools.lru_cache(maxsize=4)
def _power_function(box: Box) -> tuple[MeshFunction, np.ndarray, np.ndarray]:
    """The binned sums of |mode|^2, the number of modes and the mean k of each bin."""
    count, modes_shape = bin_count(box), mtf.Shape(box.spectral_shape.dims[:-1])

    def build(_: Any, field: Any, number: Any, weight: Any) -> Any:
        return BinnedSumOperation([to_spectrum(field), number, weight], count).outputs[0]

    function = box.function(
        build, field=box.shape, number=(modes_shape, tf.int32), weight=modes_shape
    )
    local = np.zeros((2, count + 1))
    for plane in range(box.pencils.spectral_block[0]):
        number, weight, k = plane_bins(box, plane)
        for row, values in zip(local, (weight, weight * k), strict=True):
            row += np.bincount(number.ravel(), values.ravel(), count + 1)
    modes, k_sum = box.mesh.world.allreduce(tf.constant(local[:, :-1])).numpy()
    return function, modes, k_sum / np.maximum(modes, 1)


def binned_power(block: tf.Tensor, box: Box, window: Literal["cic"] | None = None) -> tf.Tensor:
    """Power of each bin [(Mpc/h)^3], differentiable; the same on every rank."""
    function, modes, _ = _power_function(box)
    number, weight = mode_table(box, window)
    scale = box.volume / box.cells**2 / np.maximum(modes, 1)
    sums = function(block, tf.constant(number), tf.constant(weight))
    return sums * tf.constant(scale, block.dtype)


def power_spectrum(
    field: Any,
    box_size: Any,
    *,
    window: Literal["cic"] | None = None,
    shot_noise: float = 0.0,
) -> PowerSpectrum:
    """Spherically averaged power spectrum of a density or overdensity.

    Bins are one fundamental mode wide, up to the Nyquist wavenumber. The mean does not count.

    Args:
        field: a `Field` (each rank measures its part), or a whole array [x, y, z] on one rank.
        box_size: [Mpc/h], one number or three.
        window: "cic" divides each mode by the squared cloud-in-cell window.
        shot_noise: subtracted [(Mpc/h)^3]; V / N_particles for Poisson sampling, which particles
            that started on a lattice do not have at early times.

    Returns:
        The same on every rank.

    Raises:
        ValueError: not a scalar field, or an unknown window.
    """
    if window not in (None, "cic"):
        raise ValueError(f"window {window!r}: 'cic' or None")
    box, block = box_of(field, box_size)
    power = binned_power(block, box, window).numpy().astype(np.float64)
    _, modes, k = _power_function(box)
    return PowerSpectrum(k, power - shot_noise, modes)
