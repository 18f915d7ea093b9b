"""Filters in k-space: multiplication of a spectrum by a real or an imaginary kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from flowpm_dist.fields import Box
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor
from meshimpl.operations.fft import irfft3d, rfft3d

Kernel = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""kx, ky, kz [h/Mpc], which broadcast, to the real kernel of each mode."""


class FilterOperation(mtf.Operation):
    """A spectrum times a kernel, or times i and a kernel, in one compiled pass.

    On pairs of reals a real kernel is its own adjoint and an imaginary one minus its own.
    """

    def __init__(
        self,
        spectrum: Any,
        box: Box,
        kernel: Kernel,
        imaginary: bool,
        sign: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__([spectrum], name=name or "filter")
        self._outputs = [mtf.Tensor(self, spectrum.shape, spectrum.dtype)]
        self._box, self._kernel, self._imaginary, self._sign = box, kernel, imaginary, sign

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """The same filter, conjugated."""
        sign = -self._sign if self._imaginary else self._sign
        operation = FilterOperation(grad_ys[0], self._box, self._kernel, self._imaginary, sign)
        return [operation.outputs[0]]

    def lower(self, lowering: Any) -> None:
        """Local: every rank filters its own modes."""

        @tf.function(jit_compile=True)
        def apply(value: tf.Tensor, kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
            factor = self._sign * self._kernel(kx, ky, kz)
            real, imaginary = value[..., 0], value[..., 1]
            if self._imaginary:
                return tf.stack([-factor * imaginary, factor * real], axis=-1)
            return tf.stack([factor * real, factor * imaginary], axis=-1)

        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        result = LaidOutTensor([apply(value, *self._box.graph_wavenumbers())])
        lowering.set_tensor_lowering(self.outputs[0], result)


def filter_real(spectrum: Any, box: Box, kernel: Kernel) -> Any:
    """Multiply each mode by a real kernel that is even in k."""
    return FilterOperation(spectrum, box, kernel, False).outputs[0]


def filter_imaginary(spectrum: Any, box: Box, kernel: Kernel) -> Any:
    """Multiply each mode by i and a real kernel that is odd in k."""
    return FilterOperation(spectrum, box, kernel, True).outputs[0]


def inverse_square(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
    """1 / k^2 [(Mpc/h)^2], 0 for the mean."""
    k2 = kx**2 + ky**2 + kz**2
    return tf.where(k2 > 0, 1 / tf.where(k2 > 0, k2, tf.ones_like(k2)), tf.zeros_like(k2))


def without_nyquist(k: tf.Tensor, axis: int, box: Box) -> tf.Tensor:
    """A wavenumber component with its Nyquist mode set to 0, as an odd kernel must have it."""
    nyquist = math.pi / box.cell[axis]
    return tf.where(tf.abs(k) > 0.999 * nyquist, tf.zeros_like(k), k)


def to_spectrum(field: Any) -> Any:
    """Spectrum of a real mtf field; not normalised."""
    return rfft3d(field)


def to_field(spectrum: Any, box: Box) -> Any:
    """Real mtf field of a spectrum."""
    return irfft3d(spectrum, box.shape)


def gradient_fields(spectrum: Any, box: Box, kernel: Kernel) -> Any:
    """IFFT[i k_j kernel(k) spectrum] for j = x, y, z.

    Returns:
        mtf tensor [x, y, z, component].
    """

    def along(axis: int) -> Kernel:
        def odd(*k: tf.Tensor) -> tf.Tensor:
            return without_nyquist(k[axis], axis, box) * kernel(*k)

        return odd

    parts = [to_field(filter_imaginary(spectrum, box, along(axis)), box) for axis in range(3)]
    return mtf.stack(parts, "component", axis=3)
