"""The sources of the Poisson equations of second and third order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import inverse_square, to_field, without_nyquist
from meshimpl.operations.local import local
from meshimpl.operations.pointwise import after, pointwise

Hessian = dict[tuple[int, int], Any]
"""A map from (i, j), i <= j, to d^2 phi / dx_i dx_j, mtf [..., x, y, z]."""

PAIRS = tuple(itertools.combinations_with_replacement(range(3), 2))


class SequentialFFT:
    """Transforms from spectra to fields, one after another.

    Each begins when the one before it is complete. So few fields, and few of the transforms'
    buffers, are in memory at once.
    """

    def __init__(self, box: Box) -> None:
        self.box = box
        self._last: Any = None

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


def derivative(spectrum: Any, box: Box, axes: Sequence[int], sign: float = 1.0) -> Any:
    """Returns the spectrum of a derivative of the potential phi, where laplacian phi = source.

    Args:
        spectrum: the spectrum of the source, mtf [..., kz, ky, kx, pair].
        box: its grid and size.
        axes: one axis, for i k_i / k^2 and so -d phi / dx_i; or two, for d^2 phi / dx_i dx_j.
        sign: the sign of the result.
    """
    odd = len(axes) == 1

    def apply(pairs: tf.Tensor) -> tf.Tensor:
        k = box.graph_wavenumbers()
        if axes[0] == axes[-1] and not odd:
            along = [k[axes[0]], k[axes[0]]]
        else:
            along = [without_nyquist(k[i], i, box) for i in axes]
        return (_first if odd else _second)(pairs, *k, sign * along[0], *along[1:])

    def adjoint(_: list[Any], dys: list[Any]) -> list[Any]:
        return [derivative(dys[0], box, axes, -sign if odd else sign)]

    outputs = [(spectrum.shape, spectrum.dtype)]
    return local(apply, [spectrum], outputs, adjoint=adjoint, name="derivative")[0]


@tf.function(jit_compile=True, autograph=False)
def _first(
    pairs: tf.Tensor, kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, along: tf.Tensor
) -> tf.Tensor:
    factor = along * inverse_square(kx, ky, kz)
    return tf.stack([-factor * pairs[..., 1], factor * pairs[..., 0]], axis=-1)


@tf.function(jit_compile=True, autograph=False)
def _second(
    pairs: tf.Tensor,
    kx: tf.Tensor,
    ky: tf.Tensor,
    kz: tf.Tensor,
    along: tf.Tensor,
    other: tf.Tensor,
) -> tf.Tensor:
    return (along * other * inverse_square(kx, ky, kz))[..., tf.newaxis] * pairs


def second_order_source(
    linear: Any, delta: Any, in_turn: SequentialFFT, keep: bool = False
) -> tuple[Hessian, Any]:
    """Returns sum_{i<j} (phi_ii phi_jj - phi_ij^2) of the linear potential.

    Args:
        linear: the spectrum of the linear overdensity, without a mean.
        delta: its field, which is the trace: phi_zz = delta - phi_xx - phi_yy.
        in_turn: the transforms from spectra to fields.
        keep: whether to return all phi_ij; otherwise each is used before the next is computed.

    Returns:
        phi_ij or an empty dict, and the source, mtf [..., x, y, z].
    """
    hessian: Hessian = {}

    def second(i: int, j: int) -> Any:
        found = in_turn(linear, i, j)
        if keep:
            hessian[i, j] = found
        return found

    xx, yy = second(0, 0), second(1, 1)
    if keep:
        hessian[2, 2] = delta - xx - yy
    source = pointwise(_diagonal_minors, delta, xx, yy)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        source = pointwise(_minus_square, source, second(i, j))
    return hessian, source


def _diagonal_minors(delta: tf.Tensor, xx: tf.Tensor, yy: tf.Tensor) -> tf.Tensor:
    return xx * yy + (xx + yy) * (delta - xx - yy)


def _minus_square(total: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return total - x * x


def third_order_sources(hessian: Hessian, second: Any, in_turn: SequentialFFT) -> list[Any]:
    """Returns laplacian phi_3a, laplacian phi_3b and the components x, y, z of curl psi_3c.

    Args:
        hessian: phi_ij.
        second: the spectrum of the second-order source; its mean has no effect.
        in_turn: the transforms from spectra to fields.

    Returns:
        Five mtf fields [..., x, y, z].
    """
    other = [in_turn(second, i, j) for i, j in PAIRS]
    first = [hessian[pair] for pair in PAIRS]
    return list(pointwise(_third_order, *first, *other, outputs=[first[0].shape] * 5))


def _third_order(*blocks: tf.Tensor) -> list[tf.Tensor]:
    a, b = (_matrix(blocks[:6]), _matrix(blocks[6:]))
    cross = [a[1][i] * a[2][j] - a[1][j] * a[2][i] for i, j in ((1, 2), (2, 0), (0, 1))]
    determinant = sum(a[0][i] * cross[i] for i in range(3))
    mixed = sum(
        a[i][i] * b[j][j] + a[j][j] * b[i][i] - 2 * a[i][j] * b[i][j]
        for i, j in ((0, 1), (0, 2), (1, 2))
    )
    curl = [
        sum(a[m][j] * b[m][k] - a[m][k] * b[m][j] for m in range(3))
        for j, k in ((1, 2), (2, 0), (0, 1))
    ]
    return [-determinant, 0.5 * mixed, *curl]


def _matrix(blocks: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    xx, xy, xz, yy, yz, zz = blocks
    return [[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]
