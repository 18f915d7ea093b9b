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
from meshimpl.collectives import fence
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


@dataclass(frozen=True)
class ModeBins:
    """Spherical bins of this rank's modes, one fundamental mode wide: floor(k / k_f + 0.5).

    Attributes:
        number: bin of each mode [kz, ky, kx], int32; modes beyond the last bin are in bin `count`.
        weight: how often each mode counts, 2 where it stands for its conjugate too, 0 for the mean.
        k: wavenumber of each mode [h/Mpc].
        count: number of bins.
    """

    number: np.ndarray
    weight: np.ndarray
    k: np.ndarray
    count: int


def mode_bins(box: Box) -> ModeBins:
    """Bins 1, 2, ... of the longest side's fundamental mode, up to the smallest Nyquist."""
    kx, ky, kz = box.wavenumbers()
    k = np.sqrt(kx**2 + ky**2 + kz**2)
    fundamental = 2 * np.pi / max(box.size)
    nyquist = np.pi / max(box.cell)
    count = int(np.floor(nyquist / fundamental + 1e-6))
    number = np.floor(k / fundamental + 0.5).astype(np.int64)
    weight = np.broadcast_to(box.pencils.multiplicity()[:, None, None], k.shape).copy()
    numbers_y, numbers_z = box.pencils.mode_numbers()[1:]
    padding = (numbers_y >= box.grid[1] // 2) | (numbers_z > box.grid[2] // 2)
    weight[np.broadcast_to(padding, k.shape)] = 0
    weight[k == 0] = 0
    inside = (number >= 1) & (number <= count)
    return ModeBins(np.where(inside, number - 1, count).astype(np.int32), weight, k, count)


class BinnedSumOperation(mtf.Operation):
    """Sum of weight |mode|^2 over the modes of each bin, complete on every rank."""

    def __init__(
        self, spectrum: Any, bins: ModeBins, weight: np.ndarray, name: str | None = None
    ) -> None:
        super().__init__([spectrum], name=name or "binned_sum")
        shape = mtf.Shape([mtf.Dimension("bin", bins.count)])
        self._outputs = [mtf.Tensor(self, shape, spectrum.dtype)]
        self._bins, self._weight = bins, weight

    def _numbers_and_weights(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        return fence(tf.constant(self._bins.number)), fence(tf.constant(self._weight, dtype))

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """d sum / d mode = 2 weight mode: each bin's cotangent goes to its modes."""

        def spread(value: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
            numbers, weights = self._numbers_and_weights(value.dtype)
            per_mode = tf.gather(tf.pad(dy, [[0, 1]]), numbers) * weights
            return 2 * value * per_mode[..., tf.newaxis]

        (spectrum,) = self.inputs
        return [
            mtf.slicewise(
                spread,
                [spectrum, grad_ys[0]],
                splittable_dims=spectrum.shape.dims,
                grad_function=0,
                name="binned_sum_gradient",
            )
        ]

    def lower(self, lowering: Any) -> None:
        """Each rank sums its modes, in float64; then one small allreduce."""
        impl = lowering.mesh_impl(self)
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        numbers, weights = self._numbers_and_weights(tf.float64)
        square = tf.reduce_sum(tf.cast(value, tf.float64) ** 2, axis=-1) * weights
        sums = tf.math.unsorted_segment_sum(square, numbers, self._bins.count + 1)[:-1]
        axes = [axis for axis in impl.tensor_layout(self.inputs[0]) if axis is not None]
        partial = LaidOutTensor([tf.cast(sums, value.dtype)])
        total = mtf_ops.LazyAllreduceSum(impl, partial, sorted(axes))
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


def _cic_window(box: Box) -> np.ndarray:
    """Squared cloud-in-cell window of this rank's modes [kz, ky, kx]."""
    x, y, z = (
        np.sinc(k * cell / (2 * np.pi)) ** 4
        for k, cell in zip(box.wavenumbers(), box.cell, strict=True)
    )
    return x * y * z


@functools.lru_cache(maxsize=8)
def _power_function(
    box: Box, window: Literal["cic"] | None
) -> tuple[MeshFunction, np.ndarray, np.ndarray]:
    """The binned sums of |mode|^2, the number of modes and the mean k of each bin."""
    bins = mode_bins(box)
    weight = bins.weight
    if window:
        counted = weight > 0  # a padded mode may lie where the window is 0
        weight = np.divide(weight, _cic_window(box), out=np.zeros_like(weight), where=counted)
    function = box.function(
        lambda _, field: BinnedSumOperation(to_spectrum(field), bins, weight).outputs[0],
        field=box.shape,
    )
    flat = bins.number.ravel()
    local = [
        np.bincount(flat, w.ravel(), bins.count + 1)[:-1]
        for w in (bins.weight, bins.weight * bins.k)
    ]
    modes, k_sum = box.mesh.world.allreduce(tf.constant(np.stack(local))).numpy()
    return function, modes, k_sum / np.maximum(modes, 1)


def binned_power(block: tf.Tensor, box: Box, window: Literal["cic"] | None = None) -> tf.Tensor:
    """Power of each bin [(Mpc/h)^3], differentiable; the same on every rank."""
    function, modes, _ = _power_function(box, window)
    scale = box.volume / box.cells**2 / np.maximum(modes, 1)
    return function(block) * tf.constant(scale, block.dtype)


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
    _, modes, k = _power_function(box, window)
    return PowerSpectrum(k, power - shot_noise, modes)
