"""Filters in k-space: multiplication of a spectrum by a real or an imaginary kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_for_all_sizes, cast_float
from flowpm_dist.grid.options import SCHEMES, Scheme
from flowpm_dist.options import in_unit
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence
from meshimpl.hvd_simd_mesh_impl import LaidOutTensor
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.fft import irfft3d, rfft3d
from meshimpl.operations.local import local, sum_over_ranks

Kernel = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""kx, ky, kz [h/Mpc], which broadcast, to the real kernel of each mode."""
Factor = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, Sequence[tf.Tensor]], tf.Tensor]
"""kx, ky, kz [h/Mpc] and coefficients, which broadcast, to a real and even factor of each mode."""


@dataclass(frozen=True)
class Filter:
    """A kernel, real and even in k, or `imaginary`: i times one that is real and odd in k.

    Attributes:
        kernel: the kernel of each mode.
        imaginary: whether it is multiplied by i.
        factor: a factor of each mode that depends on coefficients.
    """

    kernel: Kernel
    imaginary: bool = False
    factor: Factor | None = None


def filtered(spectrum: Any, box: Box, filter_: Filter, sign: float = 1.0) -> Any:
    """Returns a spectrum times a filter and a sign, in one compiled pass.

    On pairs of reals a real kernel is its own adjoint and an imaginary one minus its own.
    """

    def run(pairs: tf.Tensor) -> tf.Tensor:
        return multiply(filter_, sign)(pairs, *box.graph_wavenumbers())

    def adjoint(_: list[Any], dys: list[Any]) -> list[Any]:
        return [filtered(dys[0], box, filter_, -sign if filter_.imaginary else sign)]

    outputs = [(spectrum.shape, spectrum.dtype)]
    return local(run, [spectrum], outputs, adjoint=adjoint, name="filter")[0]


def inverse_square(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
    """Returns 1 / k^2 [(Mpc/h)^2], which is 0 for the mean."""
    k2 = kx**2 + ky**2 + kz**2
    return tf.where(k2 > 0, 1 / tf.where(k2 > 0, k2, tf.ones_like(k2)), tf.zeros_like(k2))


def beyond_mode(k: tf.Tensor, mode: float, axis: int, box: Box) -> tf.Tensor:
    """Returns a mask of the modes whose component along an axis exceeds mode number `mode`.

    A mode number halfway between two modes separates them on any grid: next to the Nyquist
    mode of 4096 cells, wavenumbers differ by one part in 2048.
    """
    return tf.abs(k) > cast_float(2.0 * math.pi / box.lengths[axis] * mode, k.dtype)


def without_nyquist(k: tf.Tensor, axis: int, box: Box) -> tf.Tensor:
    """Returns a wavenumber component with its Nyquist mode set to 0, as odd kernels require."""
    last = (box.grid[axis] - 1) / 2
    return tf.where(beyond_mode(k, last, axis, box), tf.zeros_like(k), k)


class ConvolveOperation(mtf.Operation):
    """F^-1 K F of a real field, for one filter or for a list of them; or the adjoint of that.

    Such an operator is symmetric when K is real and even, and antisymmetric when K is imaginary and
    odd: its adjoint is itself, up to the sign. A list of filters gives a new last dimension, over
    which the adjoint sums.

    Where the filters have a factor, its coefficients are the second input. The third input of the
    adjoint is then the field, and its second output this rank's part of the cotangents of the
    coefficients, float64.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        shape: Any,
        box: Box,
        filters: Filter | Sequence[Filter],
        adjoint: bool = False,
        half: bool = False,
    ) -> None:
        super().__init__(list(inputs), name="convolve_adjoint" if adjoint else "convolve")
        self._outputs = [mtf.Tensor(self, shape, inputs[0].dtype)]
        if adjoint and len(inputs) > 1:
            self._outputs.append(mtf.Tensor(self, inputs[1].shape, tf.float64))
        self._box, self._filters, self._is_adjoint = box, filters, adjoint
        self._pencils = dataclasses.replace(box.pencils, half=half).in_order()

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient; the cotangents of coefficients have none."""
        return len(self.outputs) == 1

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        """Returns the cotangents of the inputs: the adjoint operation applied."""
        (x, *coefficients), adjoint = self.inputs, not self._is_adjoint
        inputs = [grad_ys[0], *coefficients, *([x] if coefficients else [])]
        half = self._pencils.half
        back = ConvolveOperation(inputs, x.shape, self._box, self._filters, adjoint, half)
        if not coefficients:
            return list(back.outputs)
        (c,) = coefficients
        return [back.outputs[0], mtf.cast(sum_over_ranks(back.outputs[1], like=x), c.dtype)]

    def lower(self, lowering: Any) -> None:
        """Lowers to one transform of the input and one of each output, with a pass per filter."""
        impl = lowering.mesh_impl(self)
        value, *rest = (lowering.tensors[x].to_laid_out_tensor().one_slice for x in self.inputs)
        c = [tf.reshape(rest[0], [-1, rest[0].shape[-1]])] if rest else []
        single = isinstance(self._filters, Filter)
        filters = [self._filters] if isinstance(self._filters, Filter) else self._filters
        if self._is_adjoint:
            parts = [value] if single else tf.unstack(value, axis=-1)
            spectra = [self._forward(part) for part in parts]
            signs = [-1.0 if f.imaginary else 1.0 for f in filters]
            each = list(zip(filters, spectra, signs, strict=True))
            results = [self._inverse(sum(self._apply(f, y, sign, *c) for f, y, sign in each))]
            if c:
                x = self._forward(rest[1])
                results.append(sum(self._slopes(f, x, y, sign, *c) for f, y, sign in each))
        else:
            spectrum = self._forward(value)
            fields = [self._inverse(self._apply(f, spectrum, 1.0, *c)) for f in filters]
            results = [fields[0] if single else tf.stack(fields, axis=-1)]
        for output, result in zip(self.outputs, results, strict=True):
            block = tf.reshape(result, impl.slice_shape(output.shape))
            lowering.set_tensor_lowering(output, LaidOutTensor([block]))

    def _forward(self, field: tf.Tensor) -> tf.Tensor:
        plan = self._pencils
        spectrum = plan.forward(tf.reshape(field, [-1, *plan.block]))
        return tf.bitcast(spectrum, self._box.dtype)

    def _inverse(self, pairs: Any) -> tf.Tensor:
        dtype = tf.complex64 if self._box.dtype == tf.float32 else tf.complex128
        conjugated = self._pencils.conjugate_scale is not None
        return self._pencils.inverse(tf.bitcast(pairs, dtype), conjugated=conjugated)

    def _wavenumbers(self) -> list[tf.Tensor]:
        return self._box.graph_wavenumbers(self._pencils)

    def _apply(self, filter_: Filter, value: tf.Tensor, sign: float, *c: tf.Tensor) -> tf.Tensor:
        """Returns a spectrum times a filter and a sign, as `_inverse` takes it."""
        scale = self._pencils.conjugate_scale
        by = sign if scale is None else sign * scale
        filtering = multiply(filter_, by, conjugate=scale is not None)
        result = filtering(value, *self._wavenumbers())
        for coefficients in c:
            result = _correct(filter_)(result, coefficients, *self._wavenumbers())
        return result

    def _slopes(
        self, filter_: Filter, x: tf.Tensor, y: tf.Tensor, sign: float, c: tf.Tensor
    ) -> tf.Tensor:
        """Returns this rank's part of the derivatives of the product of y and F^-1 K F x [b, n]."""
        m = self._pencils.multiplicity() / math.prod(self._pencils.grid)
        weights = fence(tf.constant(m, self._box.dtype))
        return _slopes(filter_, sign)(x, y, weights, c, *self._wavenumbers())


def multiply(filter_: Filter, scale: float, *, conjugate: bool = False) -> Callable[..., tf.Tensor]:
    """Returns compiled `f(pairs [..., 2], kx, ky, kz)`: each mode times the kernel and a scale.

    kx, ky and kz broadcast to the modes. With `conjugate` the result is the complex conjugate.
    """

    @tf.function(jit_compile=True, autograph=False)
    def apply(value: tf.Tensor, kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        factor = scale * filter_.kernel(kx, ky, kz)
        real, imaginary = value[..., 0], value[..., 1]
        if filter_.imaginary:
            real, imaginary = -imaginary, real
        along = -factor if conjugate else factor
        return tf.stack([factor * real, along * imaginary], axis=-1)

    return apply


def _correct(filter_: Filter) -> Callable[..., tf.Tensor]:
    """Returns compiled `f(pairs, c [b, n], kx, ky, kz)`: times the factor for coefficients c.

    It is a pass of its own, so that a factor of 1 changes no bit.
    """

    @tf.function(jit_compile=True, autograph=False)
    def apply(
        value: tf.Tensor, c: tf.Tensor, kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor
    ) -> tf.Tensor:
        assert filter_.factor is not None
        columns = tf.unstack(c[:, tf.newaxis, tf.newaxis, tf.newaxis], axis=-1)
        return value * filter_.factor(kx, ky, kz, columns)[..., tf.newaxis]

    return apply


def _slopes(filter_: Filter, sign: float) -> Callable[..., tf.Tensor]:
    """Returns compiled `f(x, y, weights, c, kx, ky, kz)`: slopes by the coefficients c [b, n].

    Each is the sum over modes of weight times the factor's derivative times Re(conj(x) K y),
    float64.
    """

    @tf.function(jit_compile=True, autograph=False)
    def slopes(
        x: tf.Tensor,
        y: tf.Tensor,
        weights: tf.Tensor,
        c: tf.Tensor,
        kx: tf.Tensor,
        ky: tf.Tensor,
        kz: tf.Tensor,
    ) -> tf.Tensor:
        assert filter_.factor is not None
        if filter_.imaginary:
            product = x[..., 1] * y[..., 0] - x[..., 0] * y[..., 1]
        else:
            product = x[..., 0] * y[..., 0] + x[..., 1] * y[..., 1]
        product *= sign * weights * filter_.kernel(kx, ky, kz)
        lines = [*product.shape[:-1], 1, c.shape[-1]]
        by_line = tf.broadcast_to(c[:, tf.newaxis, tf.newaxis, tf.newaxis], lines)
        with tf.GradientTape() as tape:
            tape.watch(by_line)
            factor = filter_.factor(kx, ky, kz, tf.unstack(by_line, axis=-1))
            total = tf.reduce_sum(product * factor)
        gradient = tape.gradient(total, by_line)
        return tf.reduce_sum(tf.cast(gradient, tf.float64), axis=[1, 2, 3])

    return slopes


def convolve(
    field: Any,
    box: Box,
    filters: Filter | Sequence[Filter],
    coefficients: Any = None,
    *,
    half: bool = False,
) -> Any:
    """Returns the real mtf field F^-1 K F of a real mtf field, [..., x, y, z].

    Args:
        field: mtf tensor [..., x, y, z].
        box: its grid and size.
        filters: one; or several, for as many components in a new last dimension.
        coefficients: coefficients of the filters' factor, mtf tensor [..., n]; None without one.
        half: whether the transforms send float16, see `Communicator.alltoall`. The transforms of
            the adjoint do the same.
    """
    dims = [] if isinstance(filters, Filter) else [mtf.Dimension("component", len(filters))]
    shape = mtf.Shape([*field.shape.dims, *dims])
    inputs = [field] if coefficients is None else [field, coefficients]
    return ConvolveOperation(inputs, shape, box, filters, half=half).outputs[0]


@cached_for_all_sizes(16)
def gaussian_smoothing(box: Box, radius: float) -> MeshFunction:
    """Returns the compiled `f(field)` that smooths a field of the box with a Gaussian.

    Args:
        box: the box of the field.
        radius: the standard deviation of the Gaussian [Mpc/h].
    """
    radius = in_unit("radius", radius, "Mpc/h")

    def kernel(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        return tf.exp(-0.5 * radius**2 * (kx**2 + ky**2 + kz**2))

    return box.function(lambda _, x: convolve(x, box, Filter(kernel)), field=box.shape)


def convolve_adjoint(
    components: Any,
    box: Box,
    filters: Filter | Sequence[Filter],
    coefficients: Any = None,
    field: Any = None,
    *,
    half: bool = False,
) -> Any:
    """Returns the cotangents of the inputs of `convolve`; its adjoint.

    Args:
        components: the cotangent of what `convolve` returned.
        box, filters, coefficients, half: as for `convolve`.
        field: the field that was convolved, where there are coefficients.

    Returns:
        The cotangent of the field. Where there are coefficients, a list of it and of this rank's
        part of theirs, float64 [..., n], which differs between ranks.
    """
    single = isinstance(filters, Filter)
    shape = components.shape if single else mtf.Shape(components.shape.dims[:-1])
    inputs = [components] if coefficients is None else [components, coefficients, field]
    cotangents = ConvolveOperation(inputs, shape, box, filters, True, half).outputs
    return cotangents[0] if coefficients is None else list(cotangents)


def to_spectrum(field: Any, *, in_order: bool = False) -> Any:
    """Returns the spectrum of a real mtf field, not normalised; see `rfft3d` for its order."""
    return rfft3d(field, in_order=in_order)


def to_field(spectrum: Any, box: Box) -> Any:
    """Returns the real mtf field of a spectrum."""
    return irfft3d(spectrum, box.shape)


def painting_window(
    kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, box: Box, scheme: Scheme = "cic"
) -> tf.Tensor:
    """Returns the Fourier transform of the shape that a point is painted with [1]."""
    order = SCHEMES[scheme]

    def along(k: tf.Tensor, cell: Any) -> tf.Tensor:
        x = 0.5 * k * cast_float(cell, k.dtype)
        small = tf.abs(x) < 1e-4
        safe = tf.where(small, tf.ones_like(x), x)
        return tf.where(small, 1 - x**2 / 6, tf.sin(safe) / safe) ** order

    x, y, z = (along(k, cell) for k, cell in zip((kx, ky, kz), box.cell_lengths, strict=True))
    return x * y * z
