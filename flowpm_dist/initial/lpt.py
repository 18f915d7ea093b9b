"""Lagrangian perturbation theory to third order: from white noise to the particles' first state.

x = q + sum_n D_n psi_n over the terms n = 1, 2, 3a, 3b, 3c (Bouchet and others 1995,
astro-ph/9406013; Catelan 1995, astro-ph/9406016; Rampf and Buchert 2012, arXiv:1203.4260; in the
form of Michaux and others 2021, arXiv:2008.09588). All but the last are gradients, psi_n = -grad
phi_n; with the linear overdensity before growth delta and phi_ij = d^2 phi_1 / dx_i dx_j,

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

from collections.abc import Sequence
from typing import Any, get_args

import tensorflow as tf

from flowpm_dist.cosmology.growth import TERMS, GrowthFunctions, Term, order_of
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import to_spectrum
from flowpm_dist.initial.lpt_sources import SequentialFFT, second_order_source, third_order_sources
from flowpm_dist.initial.options import LptOrder
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.pointwise import combine, pointwise, vector

ORDERS = get_args(LptOrder)


def terms_of(order: int) -> tuple[Term, ...]:
    """Returns the terms up to an order: 1, 2 or 5 of them.

    Raises:
        ValueError: if the order is not 1, 2 or 3.
    """
    if order not in ORDERS:
        raise ValueError(f"lpt_order {order} is not one of {', '.join(map(str, ORDERS))}")
    return tuple(term for term in TERMS if order_of(term) <= order)


def growth_terms(growth: GrowthFunctions, a: Any, order: int) -> tf.Tensor:
    """Returns D_n and dD_n/dlna of each term at scale factor a, float64 [2, n_terms]."""
    terms = terms_of(order)
    return tf.stack([[growth.factor(a, term, n) for term in terms] for n in (0, 1)])


def growth_terms_by_d1(growth: GrowthFunctions, a: Any, order: int) -> tf.Tensor:
    """Returns D_n and dD_n/dD1 of each term at scale factor a, float64 [2, n_terms].

    They are finite at a = 0.
    """
    terms = terms_of(order)
    return tf.stack(
        [[growth.factor(a, term) for term in terms], [growth.by_d1(a, term) for term in terms]]
    )


def lpt_function(box: Box, order: int, fields: bool = False) -> MeshFunction:
    """Returns `f(white_noise, amplitude, factors)`, which gives the particles' first state.

    Args:
        box: the box of one universe, or of a batch.
        order: 1, 2 or 3.
        fields: whether f also returns psi_1 and, from second order on, psi_2.

    Args of f:
        white_noise: [..., x, y, z].
        amplitude: the amplitude of each mode [..., kz, ky, kx], 0 for the mean; see
            `linear_amplitude`.
        factors: [..., 2, n_terms] of the box's dtype: for each of `terms_of(order)`, the factor of
            the displacement and that of the velocity; see `growth_terms`.

    Returns of f:
        The linear overdensity before growth [..., x, y, z]; the displacement [Mpc/h] and the
        velocity, in the units of the second factors, both [..., x, y, z, component]; with `fields`,
        psi_1 and psi_2 likewise [Mpc/h].

    Raises:
        ValueError: if the order is not 1, 2 or 3.
    """
    n_terms = len(terms_of(order))
    row, term = mtf.Dimension("row", 2), mtf.Dimension("term", n_terms)

    def build(_: Any, noise: Any, amplitude: Any, factors: Any) -> tuple[Any, ...]:
        in_turn = SequentialFFT(box)
        linear = pointwise(_scale_modes, to_spectrum(noise), amplitude)
        delta = in_turn(linear)
        sources, transverse = [linear], []
        if order > 1:
            hessian, source = second_order_source(linear, delta, in_turn, keep=order > 2)
            sources.append(to_spectrum(source))
        if order > 2:
            *scalars, x, y, z = third_order_sources(hessian, sources[1], in_turn)
            sources += [to_spectrum(s) for s in scalars]
            transverse = [to_spectrum(s) for s in (x, y, z)]
        state = [
            _displacement(mtf.unstack(f, term), sources, transverse, in_turn)
            for f in mtf.unstack(factors, row)
        ]
        extra = [_displacement([None], [s], [], in_turn) for s in sources[:2]] if fields else []
        return delta, *state, *extra

    return box.function(
        build,
        white_noise=box.shape,
        amplitude=box.mode_shape,
        factors=mtf.Shape([*box.number_shape.dims, row, term]),
    )


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
    return vector([_component(axis, scalar, curl, in_turn) for axis in range(3)])


def _component(axis: int, scalar: Any, curl: Sequence[Any], in_turn: SequentialFFT) -> Any:
    """Returns one component of -grad laplacian^-1 of a scalar plus curl^-1 of a vector.

    The vector has no divergence.
    """
    terms = [(scalar, axis)]
    if curl:
        following, last = (axis + 1) % 3, (axis + 2) % 3
        terms += [(curl[last], following), (-curl[following], last)]
    return in_turn.sum_of(terms)
