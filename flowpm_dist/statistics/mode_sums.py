"""Binned sums of products of spectra with Legendre weights, and their adjoints."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.statistics.bins import (
    Axes,
    Binning,
    inverse_windows,
    multiplicities,
    relative_wavenumber,
    relative_wavenumbers,
)
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor
from meshimpl.operations.local import local, on_blocks


@dataclass(frozen=True)
class Weights:
    """The bins of modes, and their weights in the sums.

    Attributes:
        bins: the bin of each mode.
        deconvolved: for each spectrum, whether it is divided by the cloud-in-cell window.
        orders: the orders l of the Legendre polynomials (2 l + 1) L_l(mu), even.
        axis: the axis of the line of sight, 0, 1 or 2.
    """

    bins: Binning
    deconvolved: tuple[bool, ...]
    orders: tuple[int, ...] = (0,)
    axis: int = 2

    @property
    def products(self) -> int:
        """The number of products: |a|^2 of one spectrum; |a|^2, |b|^2 and Re a b* of two."""
        return 1 if len(self.deconvolved) == 1 else 3

    def legendre(self, along: Axes, k: tf.Tensor) -> list[tf.Tensor]:
        """Returns (2 l + 1) L_l(mu) for each order."""
        mu2 = tf.math.divide_no_nan(along[self.axis] ** 2, k**2)
        result = []
        for order in self.orders:
            coefficients = np.polynomial.legendre.leg2poly([0] * order + [2 * order + 1])
            value = tf.zeros_like(k)
            for c in coefficients[::-2]:
                value = value * mu2 + float(c)
            result.append(value)
        return result

    def scales(self, inverse: Axes) -> list[tf.Tensor]:
        """Returns the factor of each spectrum: 1, or the product of the inverse windows."""
        unwindowed = _outer(inverse)
        return [unwindowed if d else tf.ones_like(unwindowed) for d in self.deconvolved]


def _vectors(box: Box) -> tuple[Axes, Axes, Axes]:
    """Returns wavenumbers, multiplicities and inverse windows, float64.

    Their graph is the same on every rank.
    """

    def fenced(along: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Axes:
        x, y, z = (fence(tf.constant(a, tf.float64)) for a in along)
        return x, y, z

    return (
        fenced(relative_wavenumbers(box)),
        fenced(multiplicities(box)),
        fenced(inverse_windows(box)),
    )


def _outer(along: Axes) -> tf.Tensor:
    x, y, z = along
    return x * y * z


def mode_sums(spectra: Sequence[Any], box: Box, weights: Weights) -> Any:
    """Returns the sums over the modes of each bin of (2 l + 1) L_l(mu) times products of spectra.

    The result is the mtf tensor [..., product, order, bin], complete on every rank that shares the
    universe. Each rank sums its modes, plane by plane in float64, and one small allreduce follows.

    Args:
        spectra: one or two mtf tensors [..., kz, ky, kx, pair].
        box: the box of both.
        weights: the bins and the weights of the modes.
    """
    dtype, pencil = spectra[0].dtype, mtf.Shape(spectra[0].shape.dims[-4:])
    sizes = {"product": weights.products, "order": len(weights.orders), "bin": weights.bins.size}
    shape = mtf.Shape([*box.number_shape.dims, *(mtf.Dimension(*size) for size in sizes.items())])

    def lower(impl: HvdSimdMeshImpl, *slices: tf.Tensor) -> tf.Tensor:
        sums = tf.reshape(_local_sums(box, weights, slices), impl.slice_shape(shape))
        axes = sorted(axis for axis in impl.tensor_layout(pencil) if axis is not None)
        total = impl.allreduce(LaidOutTensor([sums]), axes, "SUM").one_slice
        return tf.cast(total, dtype)

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        spread = functools.partial(_local_cotangents, box, weights)
        outputs = [(x.shape, x.dtype) for x in inputs]
        return local(spread, [*inputs, *cotangents], outputs, name="mode_sums_gradient")

    (sums,) = on_blocks(lower, spectra, [(shape, dtype)], adjoint=adjoint, name="mode_sums")
    return sums


def _local_sums(box: Box, weights: Weights, slices: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns this rank's part of the sums, float64 [batch, product, order, bin]."""
    values, count = [_batched(s, 4) for s in slices], weights.bins.size

    @tf.function(jit_compile=True, autograph=False)
    def plane(*args: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return _plane_summands(weights, *args)

    vectors = _vectors(box)

    def sums(index: tf.Tensor) -> tf.Tensor:
        here = tuple((x[0], y[0], z[index, 0, 0]) for x, y, z in vectors)
        summands, number = plane([value[:, index] for value in values], here)
        return tf.math.unsorted_segment_sum(summands, number, count + 1)

    per_plane = tf.map_fn(sums, tf.range(values[0].shape[1]), fn_output_signature=tf.float64)
    total = tf.reduce_sum(per_plane, axis=0)[:-1]
    shape = [values[0].shape[0], weights.products, len(weights.orders), count]
    return tf.reshape(tf.transpose(total, [1, 2, 0]), shape)


def _local_cotangents(box: Box, weights: Weights, *slices: tf.Tensor) -> list[tf.Tensor]:
    """Returns the cotangents of this rank's spectra: each bin's cotangent spread over its modes."""

    @tf.function(jit_compile=True, autograph=False)
    def spread(*args: Any) -> list[tf.Tensor]:
        return _mode_cotangents(weights, *args)

    return spread([_batched(s, 4) for s in slices[:-1]], _batched(slices[-1], 3), _vectors(box))


def _plane_summands(
    weights: Weights, planes: list[tf.Tensor], vectors: tuple[Axes, Axes, Axes]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the summands of the modes of one kz, and their bins.

    The summands are [ky, kx, batch, product * order], the bins [ky, kx].
    """
    along, counts, inverse = vectors
    k = relative_wavenumber(*along)
    modes = [
        tf.cast(value, tf.float64) * scale[..., tf.newaxis]
        for value, scale in zip(planes, weights.scales(inverse), strict=True)
    ]
    pairs = [(0, 0)] if len(modes) == 1 else [(0, 0), (1, 1), (0, 1)]
    summands = [
        tf.reduce_sum(modes[i] * modes[j], axis=-1) * _outer(counts) * l_mu
        for i, j in pairs
        for l_mu in weights.legendre(along, k)
    ]
    # [summand, batch, ky, kx] -> [ky, kx, batch, summand]
    return tf.transpose(tf.stack(summands), [2, 3, 1, 0]), weights.bins.number(along, k)


def _mode_cotangents(
    weights: Weights,
    values: list[tf.Tensor],
    dy: tf.Tensor,
    vectors: tuple[Axes, Axes, Axes],
) -> list[tf.Tensor]:
    """Returns the cotangents of the spectra.

    The derivative of |a|^2 is 2 a. Re(a b*) has the derivative b with respect to a, and a with
    respect to b. Each is multiplied by its bin's cotangent and by the weights.

    Args:
        weights: the bins and the weights of the modes, see `Weights`.
        values: the spectra [batch, kz, ky, kx, pair].
        dy: the cotangent of the sums [batch, product, order, bin].
        vectors: see `_vectors`.
    """
    along, counts, inverse = vectors
    k = relative_wavenumber(*along)
    number, legendre = weights.bins.number(along, k), weights.legendre(along, k)
    padded = tf.pad(tf.cast(dy, tf.float64), [[0, 0]] * 3 + [[0, 1]])

    def of_product(product: int) -> tf.Tensor:
        terms = [
            tf.gather(padded[:, product, order], number, axis=1) * l_mu
            for order, l_mu in enumerate(legendre)
        ]
        return tf.add_n(terms) * _outer(counts)

    def times(value: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        return value * tf.cast(factor, value.dtype)[..., tf.newaxis]

    scales = weights.scales(inverse)
    found = [
        times(value, 2 * scale**2 * of_product(product))
        for product, (value, scale) in enumerate(zip(values, scales, strict=True))
    ]
    if len(values) == 1:
        return found
    cross = scales[0] * scales[1] * of_product(2)
    return [found[0] + times(values[1], cross), found[1] + times(values[0], cross)]


def _batched(x: tf.Tensor, rank: int) -> tf.Tensor:
    """Returns a slice with a batch dimension, which has size 1 if there was none."""
    return tf.reshape(x, [-1, *x.shape[-rank:]])
