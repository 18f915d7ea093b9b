"""Lagrangian perturbation theory to third order: from white noise to the particles' first state.

x = q + sum_n D_n psi_n over the terms n = 1, 2, 3a, 3b, 3c, in the form of Michaux and others
(2021, arXiv:2008.09588). Earlier sources are Bouchet and others 1995, astro-ph/9406013; Catelan
1995, astro-ph/9406016; Rampf and Buchert 2012, arXiv:1203.4260. All but the last term are
gradients, psi_n = -grad phi_n. With the linear overdensity before growth delta and
phi_ij = d^2 phi_1 / dx_i dx_j,

    laplacian phi_1  = delta
    laplacian phi_2  = sum_{i<j} (phi_ii phi_jj - phi_ij^2)
    laplacian phi_3a = -det phi_ij
    laplacian phi_3b = 1/2 sum_{i!=j} (phi_ii phi2_jj - phi_ij phi2_ij)
    curl psi_3c      = sum_l grad phi_l x grad phi2_l,    div psi_3c = 0

`flowpm_dist.cosmology.growth` has the D_n, all positive. The products are taken on the grid, as is
usual: modes beyond two thirds of the Nyquist frequency receive aliases at second order, and modes
beyond one half at third order. The Nyquist planes of odd derivatives are set to 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import tensorflow as tf

from flowpm_dist.cosmology.arrays import arrays_within, as_float64, stacked, zeros_like
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.cosmology.growth_equations import TERMS, Term, order_of
from flowpm_dist.grid.box import Box, cached_for_all_sizes
from flowpm_dist.grid.fourier import to_spectrum
from flowpm_dist.initial.options import LptOrder
from flowpm_dist.initial.transforms import SequentialFFT
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import (
    after,
    combine,
    one_component,
    pointwise,
    vector,
)

Hessian = dict[tuple[int, int], Any]
"""A map from (i, j), i <= j, to d^2 phi / dx_i dx_j, mtf [..., x, y, z]."""

PAIRS = tuple(itertools.combinations_with_replacement(range(3), 2))


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
        component = in_turn(linear, i, j)
        if keep:
            hessian[i, j] = component
        return component

    xx, yy = second(0, 0), second(1, 1)
    if keep:
        hessian[2, 2] = delta - xx - yy
    source = pointwise(_diagonal_minors, delta, xx, yy)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        source = pointwise(_minus_square, source, second(i, j))
    return hessian, source


def _source_alone(in_turn: SequentialFFT, linear: Any, delta: Any) -> Any:
    return second_order_source(linear, delta, in_turn)[1]


def _by_source_alone(
    in_turn: SequentialFFT, _: list[Any], inputs: list[Any], source: Any, dy: Any
) -> list[Any]:
    """Returns the cotangents of `_source_alone`, which computes its fields again."""
    waiting = [after(x, dy) for x in inputs]
    again, operations = dy.graph.capture_operations(lambda: _source_alone(in_turn, *waiting))
    return list(mtf.gradients([again], waiting, [dy], operations=operations))


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


ORDERS = get_args(LptOrder)


def terms_of(order: int) -> tuple[Term, ...]:
    """Returns the terms up to an order: 1, 2 or 5 of them.

    Raises:
        ValueError: if the order is not 1, 2 or 3.
    """
    if order not in ORDERS:
        raise ValueError(f"lpt_order {order} is not one of {', '.join(map(str, ORDERS))}")
    return tuple(term for term in TERMS if order_of(term) <= order)


def growth_terms(growth: Growth, a: Any, order: int) -> tf.Tensor:
    """Returns D_n and dD_n/dlna of each term at scale factor a, float64 [2, n_terms].

    Where growth depends on the wavenumber, the first column is for the excess of the first
    velocity, see `lpt_function`.
    """
    terms = terms_of(order)
    with arrays_within():
        rows = [[growth.factor(a, term, n) for term in terms] for n in (0, 1)]
        return _by_scale(growth, rows)


def growth_terms_by_d1(growth: Growth, a: Any, order: int) -> tf.Tensor:
    """Returns D_n and dD_n/dD1 of each term at scale factor a, float64 [2, n_terms].

    They are finite at a = 0. Otherwise they are as `growth_terms`.
    """
    terms = terms_of(order)
    with arrays_within():
        rows = [[f(a, term) for term in terms] for f in (growth.factor, growth.by_d1)]
        return _by_scale(growth, rows)


def _by_scale(growth: Growth, rows: list[list[Any]]) -> tf.Tensor:
    """Returns rows of factors, after the column of the excess if growth is by scale."""
    if growth.by_scale:
        rows = [[zeros_like(rows[0][0]), *rows[0]], [rows[1][0], *rows[1]]]
    return as_float64(stacked([stacked(row, 0) for row in rows], 0))


@cached_for_all_sizes(16)
def lpt_function(
    box: Box, order: int, fields: bool = False, by_scale: bool = False
) -> MeshFunction:
    """Returns `f(white_noise, amplitude, factors)`, which gives the particles' first state.

    Args:
        box: the box of one universe, or of a batch.
        order: 1, 2 or 3.
        fields: whether f also returns psi_1 and, from second order on, psi_2.
        by_scale: whether f also takes the excess of the first velocity.

    Args of f:
        white_noise: [..., x, y, z].
        amplitude: the amplitude of each mode [..., kz, ky, kx], 0 for the mean; see
            `linear_amplitude`.
        factors: [..., 2, n_terms] of the box's dtype: for each of `terms_of(order)`, the factors
            of the displacement and of the velocity; see `growth_terms`. One column more with
            `by_scale`, before the others.
        excess: with `by_scale`, the growth rate of each mode over that without a wavenumber, less
            1, [..., kz, ky, kx].

    Returns of f:
        The linear overdensity before growth [..., x, y, z]. The displacement [Mpc/h] and the
        velocity in the units of the second factors, both [..., x, y, z, component]. With `fields`,
        also psi_1 and psi_2, of the same shape [Mpc/h].

    Raises:
        ValueError: if the order is not 1, 2 or 3.
    """
    n_terms = len(terms_of(order)) + by_scale
    row, term = mtf.Dimension("row", 2), mtf.Dimension("term", n_terms)

    def build(_: Any, noise: Any, amplitude: Any, factors: Any, *excess: Any) -> tuple[Any, ...]:
        in_turn = SequentialFFT(box)
        white = to_spectrum(noise, in_order=True)
        linear = pointwise(_scale_modes, white, _of_modes(white, amplitude))
        delta = in_turn(linear)
        sources, transverse = [linear], []
        if order > 1:
            if order > 2:
                hessian, source = second_order_source(linear, delta, in_turn, keep=True)
            else:
                source = in_turn.apart(_source_alone, _by_source_alone, linear, delta)
            sources.append(to_spectrum(source, in_order=True))
        if order > 2:
            *others, x, y, z = third_order_sources(hessian, sources[1], in_turn)
            sources += [to_spectrum(s, in_order=True) for s in others]
            transverse = [to_spectrum(s, in_order=True) for s in (x, y, z)]
        scalars = [
            *(pointwise(_scale_modes, linear, _of_modes(white, each)) for each in excess),
            *sources,
        ]
        state = [
            _displacement(mtf.unstack(f, term), scalars, transverse, in_turn)
            for f in mtf.unstack(factors, row)
        ]
        extra = [_displacement([None], [s], [], in_turn) for s in sources[:2]] if fields else []
        return delta, *state, *extra

    return box.function(
        build,
        white_noise=box.shape,
        amplitude=box.mode_shape,
        factors=mtf.Shape([*box.number_shape.dims, row, term]),
        **({"excess": box.mode_shape} if by_scale else {}),
    )


def _of_modes(spectrum: Any, numbers: Any) -> Any:
    """Returns a number for each mode [..., kz, ky, kx] in the order of a spectrum."""
    modes = mtf.Shape(spectrum.shape.dims[:-1])
    return numbers if numbers.shape == modes else mtf.transpose(numbers, modes)


def _scale_modes(pairs: tf.Tensor, amplitude: tf.Tensor) -> tf.Tensor:
    return pairs * amplitude[..., tf.newaxis]


def _displacement(
    factors: Sequence[Any],
    sources: Sequence[Any],
    transverse: Sequence[Any],
    in_turn: SequentialFFT,
) -> Any:
    """Returns sum_n factors[n] psi_n from the spectra of the sources.

    Returns:
        mtf tensor [..., x, y, z, component].
    """
    scalar = sources[0] if factors[0] is None else combine(factors[: len(sources)], sources)
    curl = [combine(factors[len(sources) :], [spectrum]) for spectrum in transverse]
    return in_turn.apart(_vector, _by_vector, scalar, *curl)


def _vector(in_turn: SequentialFFT, scalar: Any, *curl: Any) -> Any:
    return vector([_component(axis, scalar, curl, in_turn) for axis in range(3)])


def _by_vector(
    _: SequentialFFT, operations: list[Any], spectra: list[Any], field: Any, dy: Any
) -> list[Any]:
    """Returns the cotangents of the spectra of `_vector`, one component after the other."""
    totals: list[Any] = [None] * len(spectra)
    for axis, component in enumerate(field.operation.inputs):
        part = one_component(dy if axis == 0 else after(dy, totals[0]), axis)
        slopes = mtf.gradients([component], spectra, [part], operations=operations)
        totals = [
            slope if total is None else total if slope is None else total + slope
            for total, slope in zip(totals, slopes, strict=True)
        ]
    return totals


def _component(axis: int, scalar: Any, curl: Sequence[Any], in_turn: SequentialFFT) -> Any:
    """Returns one component of -grad laplacian^-1 of a scalar plus curl^-1 of a vector.

    The vector has no divergence.
    """
    terms = [(scalar, axis)]
    if curl:
        following, last = (axis + 1) % 3, (axis + 2) % 3
        terms += [(curl[last], following), (-curl[following], last)]
    return in_turn.sum_of(terms)
