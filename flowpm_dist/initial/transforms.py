"""Transforms of spectra and of derivatives of potentials, one after another to save memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import inverse_square, to_field, without_nyquist
from meshimpl.compat import mtf
from meshimpl.operations.fft import transform_between
from meshimpl.operations.local import after, local

Wavenumbers = list[tf.Tensor]
"""kx, ky and kz, each of length 1 along the other two dimensions."""

Composite = Callable[..., Any]
"""A function from a `SequentialFFT` and mtf tensors to an mtf tensor."""
CompositeAdjoint = Callable[["SequentialFFT", list[Any], list[Any], Any, Any], list[Any]]
"""Its adjoint, see `SequentialFFT.apart`."""


class SequentialFFT:
    """Transforms from spectra to fields, one after another.

    Each begins when the one before it is complete. This limits how many fields and
    transform buffers are in memory at once. The adjoints of `apart` follow each other, too.
    """

    def __init__(self, box: Box) -> None:
        self.box = box
        self._last: Any = None
        self._last_adjoint: Any = None

    def __call__(self, spectrum: Any, *axes: int) -> Any:
        """Returns the field of a spectrum, or of its `derivative`."""
        return self.sum_of([(spectrum, *axes)])

    def sum_of(self, terms: Sequence[tuple[Any, ...]]) -> Any:
        """Returns the field of a sum of spectra or derivatives, each given as (spectrum, *axes)."""
        parts = []
        for spectrum, *axes in terms:
            waiting = spectrum if self._last is None else after(spectrum, self._last)
            parts.append(derivative(waiting, self.box, axes) if axes else waiting)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        self._last = to_field(total, self.box)
        return self._last

    def apart(self, function: Composite, adjoint: CompositeAdjoint, *inputs: Any) -> Any:
        """Returns a function of mtf tensors that makes transforms, with an adjoint of its own.

        Args:
            function: called with a `SequentialFFT` and the inputs; it must use no other tensors.
            adjoint: called with a `SequentialFFT`, the operations that the function made, the
                inputs, the result and its cotangent; returns the cotangents of the inputs.
            inputs: mtf tensors.
        """
        if self._last is not None:
            inputs = tuple(after(x, self._last) for x in inputs)

        def grad_fn(
            explicit_inputs: list[Any],
            forward_operations: list[Any],
            outputs: list[Any],
            output_grads: list[Any],
            **_: Any,
        ) -> list[Any]:
            (result,), (dy,) = outputs, output_grads
            if self._last_adjoint is not None:
                dy = after(dy, self._last_adjoint)
            in_turn = SequentialFFT(self.box)
            cotangents = adjoint(in_turn, forward_operations, explicit_inputs, result, dy)
            self._last_adjoint = cotangents[0]
            return cotangents

        inside = functools.partial(function, SequentialFFT(self.box))
        self._last = mtf.custom_gradient(inside, grad_fn, list(inputs))
        return self._last


def derivative(spectrum: Any, box: Box, axes: Sequence[int], sign: float = 1.0) -> Any:
    """Returns the spectrum of a derivative of the potential phi, where laplacian phi = source.

    Args:
        spectrum: the spectrum of the source, mtf [..., kz, ky, kx, pair], or in order.
        box: its grid and size.
        axes: one axis, for i k_i / k^2 and so -d phi / dx_i; or two, for d^2 phi / dx_i dx_j.
        sign: the sign of the result.
    """
    odd = len(axes) == 1

    def apply(pairs: tf.Tensor) -> tf.Tensor:
        k = box.graph_wavenumbers(transform_between(box.shape, spectrum.shape, box.impl))
        square = axes[0] == axes[-1] and not odd
        along = k if square else [without_nyquist(k[i], i, box) for i in range(3)]
        direction, *others = [tf.one_hot(i, 3, dtype=k[0].dtype) for i in axes]
        return (_first if odd else _second)(pairs, k, along, sign * direction, *others)

    def adjoint(_: list[Any], dys: list[Any]) -> list[Any]:
        return [derivative(dys[0], box, axes, -sign if odd else sign)]

    outputs = [(spectrum.shape, spectrum.dtype)]
    return local(apply, [spectrum], outputs, adjoint=adjoint, name="derivative")[0]


@tf.function(jit_compile=True, autograph=False)
def _first(pairs: tf.Tensor, k: Wavenumbers, along: Wavenumbers, direction: tf.Tensor) -> tf.Tensor:
    factor = _component_of(along, direction) * inverse_square(*k)
    return tf.stack([-factor * pairs[..., 1], factor * pairs[..., 0]], axis=-1)


@tf.function(jit_compile=True, autograph=False)
def _second(
    pairs: tf.Tensor, k: Wavenumbers, along: Wavenumbers, direction: tf.Tensor, other: tf.Tensor
) -> tf.Tensor:
    product = _component_of(along, direction) * _component_of(along, other)
    return (product * inverse_square(*k))[..., tf.newaxis] * pairs


def _component_of(k: Wavenumbers, direction: tf.Tensor) -> tf.Tensor:
    """Returns k along a direction [3]: one function for all directions, compiled once."""
    return sum(k[i] * direction[i] for i in range(3))
