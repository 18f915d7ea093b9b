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
    """Sum of a spectrum's |mode|^2 over bins, complete on every rank.

    The gradient spreads each bin's cotangent over its modes.
    """

    def __init__(self, spectrum: Any, box: Box, bins: Any, name: str | None = None) -> None:
        super().__init__([spectrum], name=name or "binned_sum")
        self._outputs = [mtf.Tensor(self, mtf.Shape([bins]), spectrum.dtype)]
        self._box, self._bins = box, bins

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """d sum_b / d mode = 2 weight mode in the mode's bin."""
        (spectrum,) = self.inputs
        numbers, weights, count = self._laid_out()

        def spread(value: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
            per_mode = tf.gather(tf.pad(dy, [[0, 1]]), numbers()) * weights(value.dtype)
            return 2 * value * per_mode[..., tf.newaxis]

        del count
        return [
            mtf.slicewise(
                spread,
                [spectrum, grad_ys[0]],
                splittable_dims=spectrum.shape.dims,
                grad_function=0,
                name="binned_sum_gradient",
            )
        ]

    def _laid_out(self) -> tuple[Any, Any, int]:
        bins = mode_bins(self._box)
        return (
            lambda: fence(tf.constant(bins.number)),
            lambda dtype: fence(tf.constant(bins.weight, dtype)),
            bins.count,
        )

    def lower(self, lowering: Any) -> None:
        """Each rank sums its modes; then one small allreduce."""
        impl = lowering.mesh_impl(self)
        numbers, weights, count = self._laid_out()
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        square = tf.reduce_sum(tf.cast(value, tf.float64) ** 2, axis=-1) * weights(tf.float64)
        sums = tf.math.unsorted_segment_sum(square, numbers(), count + 1)[:-1]
        axes = [a for a in impl.tensor_layout(self.inputs[0]) if a is not None]
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


@functools.lru_cache(maxsize=8)
def _power_function(box: Box) -> tuple[MeshFunction, np.ndarray, np.ndarray]:
    """The binned sums of |mode|^2, the number of modes and the mean k of each bin."""
    bins = mode_bins(box)
    dim = mtf.Dimension("bin", bins.count)
    function = box.function(
        lambda _, field: BinnedSumOperation(to_spectrum(field), box, dim).outputs[0],
        field=box.shape,
    )
    flat = bins.number.ravel()
    local = [
        np.bincount(flat, w.ravel(), bins.count + 1)[:-1]
        for w in (bins.weight, bins.weight * bins.k)
    ]
    modes, k_sum = box.mesh.world.allreduce(tf.constant(np.stack(local))).numpy()
    return function, modes, k_sum / np.maximum(modes, 1)


def binned_power(block: tf.Tensor, box: Box) -> tf.Tensor:
    """Mean |mode|^2 of each bin as a power [(Mpc/h)^3], differentiable; the same on every rank."""
    function, modes, _ = _power_function(box)
    scale = box.volume / box.cells**2 / np.maximum(modes, 1)
    return function(block) * tf.constant(scale, block.dtype)


def cic_window(box: Box) -> np.ndarray:
    """Mean over each bin's modes of the squared cloud-in-cell window [1]."""
    bins = mode_bins(box)
    square = np.ones_like(bins.k)
    for k, cell in zip(box.wavenumbers(), box.cell, strict=True):
        square = square * np.sinc(k * cell / (2 * np.pi)) ** 4
    local = np.bincount(bins.number.ravel(), (bins.weight * square).ravel(), bins.count + 1)[:-1]
    total = box.mesh.world.allreduce(tf.constant(local)).numpy()
    return total / np.maximum(_power_function(box)[1], 1)


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
        window: "cic" divides by the bin's mean squared cloud-in-cell window.
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
    power = binned_power(block, box).numpy().astype(np.float64)
    if window == "cic":
        power = power / cic_window(box)
    _, modes, k = _power_function(box)
    return PowerSpectrum(k, power - shot_noise, modes)
