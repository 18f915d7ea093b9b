"""Filters in k-space: multiplication of a spectrum by a real or an imaginary kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.fft import irfft3d, rfft3d
from meshimpl.operations.local import local

Kernel = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""kx, ky, kz [h/Mpc], which broadcast, to the real kernel of each mode."""


@dataclass(frozen=True)
class Filter:
    """A kernel, real and even in k, or `imaginary`: i times one that is real and odd in k."""

    kernel: Kernel
    imaginary: bool = False


def filtered(spectrum: Any, box: Box, filter_: Filter, sign: float = 1.0) -> Any:
    """Returns a spectrum times a filter and a sign, in one compiled pass.

    On pairs of reals a real kernel is its own adjoint and an imaginary one minus its own.
    """

    def run(pairs: tf.Tensor) -> tf.Tensor:
        return _multiply(filter_, sign)(pairs, *box.graph_wavenumbers())

    def adjoint(_: list[Any], dys: list[Any]) -> list[Any]:
        return [filtered(dys[0], box, filter_, -sign if filter_.imaginary else sign)]

    outputs = [(spectrum.shape, spectrum.dtype)]
    return local(run, [spectrum], outputs, adjoint=adjoint, name="filter")[0]


def inverse_square(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
    """Returns 1 / k^2 [(Mpc/h)^2], which is 0 for the mean."""
    k2 = kx**2 + ky**2 + kz**2
    return tf.where(k2 > 0, 1 / tf.where(k2 > 0, k2, tf.ones_like(k2)), tf.zeros_like(k2))


def beyond_mode(k: tf.Tensor, mode: float, axis: int, box: Box) -> tf.Tensor:
    """Returns where a wavenumber component exceeds mode number `mode` along its axis.

    A mode number halfway between two modes separates them on any grid: next to the Nyquist
    mode of 4096 cells, wavenumbers differ by one part in 2048.
    """
    return tf.abs(k) > 2.0 * math.pi / box.size[axis] * mode


def without_nyquist(k: tf.Tensor, axis: int, box: Box) -> tf.Tensor:
    """Returns a wavenumber component with its Nyquist mode set to 0, as odd kernels require."""
    last = (box.grid[axis] - 1) / 2
    return tf.where(beyond_mode(k, last, axis, box), tf.zeros_like(k), k)


class ConvolveOperation(mtf.Operation):
    """F^-1 K F of a real field, for one filter or for a list of them; or the adjoint of that.

    Such an operator is symmetric when K is real and even, and antisymmetric when K is imaginary and
    odd: its adjoint is itself, up to the sign. A list of filters gives a new last dimension, over
    which the adjoint sums.
    """

    def __init__(
        self,
        x: Any,
        shape: Any,
        box: Box,
        filters: Filter | Sequence[Filter],
        adjoint: bool = False,
        half: bool = False,
    ) -> None:
        super().__init__([x], name="convolve_adjoint" if adjoint else "convolve")
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]
        self._box, self._filters, self._is_adjoint = box, filters, adjoint
        self._pencils = dataclasses.replace(box.pencils, half=half)

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """Returns the cotangent of the input: the adjoint operation applied."""
        shape, adjoint = self.inputs[0].shape, not self._is_adjoint
        half = self._pencils.half
        back = ConvolveOperation(grad_ys[0], shape, self._box, self._filters, adjoint, half)
        return [back.outputs[0]]

    def lower(self, lowering: Any) -> None:
        """Lowers to one transform of the input and one of each output, with a pass per filter."""
        impl = lowering.mesh_impl(self)
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor().one_slice
        single = isinstance(self._filters, Filter)
        filters = [self._filters] if isinstance(self._filters, Filter) else self._filters
        if self._is_adjoint:
            parts = [value] if single else tf.unstack(value, axis=-1)
            result = self._inverse(
                sum(
                    self._apply(f, self._forward(part), -1.0 if f.imaginary else 1.0)
                    for f, part in zip(filters, parts, strict=True)
                )
            )
        else:
            spectrum = self._forward(value)
            parts = [self._inverse(self._apply(f, spectrum, 1.0)) for f in filters]
            result = parts[0] if single else tf.stack(parts, axis=-1)
        block = tf.reshape(result, impl.slice_shape(self.outputs[0].shape))
        lowering.set_tensor_lowering(self.outputs[0], LaidOutTensor([block]))

    def _forward(self, field: tf.Tensor) -> tf.Tensor:
        plan = self._pencils
        spectrum = plan.forward(tf.reshape(field, [-1, *plan.real_block]))
        return tf.bitcast(spectrum, self._box.dtype)

    def _inverse(self, pairs: Any) -> tf.Tensor:
        dtype = tf.complex64 if self._box.dtype == tf.float32 else tf.complex128
        return self._pencils.inverse(tf.bitcast(pairs, dtype))

    def _apply(self, filter_: Filter, value: tf.Tensor, sign: float) -> tf.Tensor:
        return _multiply(filter_, sign)(value, *self._box.graph_wavenumbers())


def _multiply(filter_: Filter, sign: float) -> Callable[..., tf.Tensor]:
    """Returns compiled `f(pairs [..., kz, ky, kx, 2], kx, ky, kz)`: each mode times the filter."""

    @tf.function(jit_compile=True, autograph=False)
    def apply(value: tf.Tensor, kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        factor = sign * filter_.kernel(kx, ky, kz)
        real, imaginary = value[..., 0], value[..., 1]
        if filter_.imaginary:
            return tf.stack([-factor * imaginary, factor * real], axis=-1)
        return tf.stack([factor * real, factor * imaginary], axis=-1)

    return apply


def convolve(
    field: Any, box: Box, filters: Filter | Sequence[Filter], *, half: bool = False
) -> Any:
    """Returns the real mtf field F^-1 K F of a real mtf field, [..., x, y, z].

    Args:
        field: mtf tensor [..., x, y, z].
        box: its grid and size.
        filters: one; or several, for as many components in a new last dimension.
        half: whether the transforms send float16, see `Communicator.alltoall`. The transforms of
            the adjoint do the same.
    """
    dims = [] if isinstance(filters, Filter) else [mtf.Dimension("component", len(filters))]
    shape = mtf.Shape([*field.shape.dims, *dims])
    return ConvolveOperation(field, shape, box, filters, half=half).outputs[0]


@cached_on_mesh(16)
def gaussian_smoothing(box: Box, radius: float) -> MeshFunction:
    """Returns the compiled `f(field)` that smooths a field of the box with a Gaussian.

    Args:
        box: the box of the field.
        radius: the standard deviation of the Gaussian [Mpc/h].
    """

    def kernel(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        return tf.exp(-0.5 * radius**2 * (kx**2 + ky**2 + kz**2))

    return box.function(lambda _, x: convolve(x, box, Filter(kernel)), field=box.shape)


def convolve_adjoint(
    components: Any, box: Box, filters: Filter | Sequence[Filter], *, half: bool = False
) -> Any:
    """Returns the cotangent of the input of `convolve`; its adjoint."""
    single = isinstance(filters, Filter)
    shape = components.shape if single else mtf.Shape(components.shape.dims[:-1])
    return ConvolveOperation(components, shape, box, filters, True, half).outputs[0]


def to_spectrum(field: Any) -> Any:
    """Returns the spectrum of a real mtf field, not normalised."""
    return rfft3d(field)


def to_field(spectrum: Any, box: Box) -> Any:
    """Returns the real mtf field of a spectrum."""
    return irfft3d(spectrum, box.shape)


def cic_window(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, box: Box) -> tf.Tensor:
    """Returns the Fourier transform of the cloud-in-cell assignment [1]."""

    def along(k: tf.Tensor, cell: float) -> tf.Tensor:
        x = 0.5 * k * cell
        small = tf.abs(x) < 1e-4
        safe = tf.where(small, tf.ones_like(x), x)
        return tf.where(small, 1 - x**2 / 6, tf.sin(safe) / safe) ** 2

    x, y, z = (along(k, cell) for k, cell in zip((kx, ky, kz), box.cell, strict=True))
    return x * y * z
