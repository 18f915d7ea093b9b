"""The equations of growth to third order, solved by spectral collocation.

The terms of Lagrangian perturbation theory are x = q + sum_n D_n psi_n, n = 1, 2, 3a, 3b and 3c.
Sources: Bouchet and others 1995, astro-ph/9406013; Rampf and Buchert 2012, arXiv:1203.4260; Michaux
and others 2021, arXiv:2008.09588. With T = d^2/dlna^2 + (2 + dlnE/dlna) d/dlna, s = 1.5 Omega_m(a),

    T D1  = s D1                          T D3a = s (D3a + 2 D1^3)
    T D2  = s (D2 + D1^2)                 T D3b = s (D3b + 2 D1 (D2 + D1^2))
                                          T D3c = s D1^3

All five functions are positive. At early times, and at all times in an Einstein-de Sitter universe,
D1 = a, D2 = 3/7 a^2, D3a = 1/3 a^3, D3b = 10/21 a^3 and D3c = 1/7 a^3. `flowpm_dist.initial.lpt`
computes the field of each.

With radiation, D1 = a + 2/3 a_eq while dark energy is negligible, where matter and radiation are
equal at a_eq (Meszaros 1974); so D1 = a in the era of matter up to this constant. The other
functions begin with 0 in the era of radiation. With massive neutrinos, T D1 = s F D1 at each
wavenumber, with F of `neutrinos`; what has no wavenumber is for k -> 0, where F = 1.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import (
    arrays_within,
    as_float64,
    is_tensor,
    joined,
    product,
    stacked,
    transposed,
    zeros_like,
)
from flowpm_dist.cosmology.background import A_MAX, Background, expansion_parameters
from flowpm_dist.cosmology.collocation import Collocation, Solution, collocation
from flowpm_dist.cosmology.parameters import is_compiled

Term = Literal[1, 2, "3a", "3b", "3c"]

A_MIN = 1e-6
"""Scale factor at which the equations start, from their early-time series. Below, D ~ a^order.

With radiation, growth functions are refused below it.
"""

EINSTEIN_DE_SITTER: dict[Term, float] = {1: 1.0, 2: 3 / 7, "3a": 1 / 3, "3b": 10 / 21, "3c": 1 / 7}
"""D over a^order of each term in a universe of matter alone, and early in any."""

TERMS: tuple[Term, ...] = tuple(EINSTEIN_DE_SITTER)
"""The terms of Lagrangian perturbation theory, by order; 3c is the transverse one."""

IN_RADIATION: dict[Term, tuple[float, float, float]] = {
    1: (1.0, 1.5, 0.0),
    2: (0.0, 1.5, 1.125),
    "3a": (0.0, 3.0, 3.375),
    "3b": (0.0, 3.0, 4.5),
    "3c": (0.0, 1.5, 1.125),
}
"""D over (2/3 a_eq)^order of each term at a << a_eq, as coefficients of powers of a / a_eq."""

WAVENUMBERS = 1e-5, 1e3
"""The wavenumbers [h/Mpc] between which growth depends on them; beyond, it stays the same."""

SCALES = 64
"""The number of nodes in ln k."""


def grid_of(nodes: int) -> Collocation:
    """Returns the constants of collocation in ln a."""
    return collocation(nodes, A_MIN, A_MAX)


def scales() -> Collocation:
    """Returns the constants of the series in ln k."""
    return collocation(SCALES, *WAVENUMBERS)


Coefficients = Callable[[Background, int], Any]
"""The Chebyshev coefficients of growth functions in a background, for a number of nodes."""


def coefficients(background: Background, nodes: int) -> Any:
    """Returns the Chebyshev coefficients of D, dD/dlna and d2D/dlna2 over a^order.

    They are [nodes, 6], for the terms up to second order.
    """
    with arrays_within():
        return _of_solutions(_lower_orders(background, grid_of(nodes)), nodes)


def third_order_coefficients(background: Background, nodes: int) -> Any:
    """Returns the same of the three terms of third order, [nodes, 9]."""
    with arrays_within():
        return _of_solutions(_third_order(background, grid_of(nodes)), nodes)


def _of_solutions(solutions: dict[Term, Solution], nodes: int) -> Any:
    grid, derivatives = grid_of(nodes), []
    for term, (g, dg, ddg) in solutions.items():
        n = order_of(term)
        derivatives += [g, n * g + dg, n**2 * g + 2.0 * n * dg + ddg]
    return product(grid.to_coefficients, stacked(derivatives, 1))


def coefficients_by_scale(background: Background, nodes: int) -> Any:
    """Returns the coefficients of D1 and dD1/dlna over a, in ln a and ln k, [nodes, 2 SCALES]."""
    grid, along_k = grid_of(nodes), scales()
    with arrays_within():
        (start, slope), k = _early_times(background)[1], np.exp(along_k.x)[:, np.newaxis]
        assert background.neutrinos is not None
        factor = background.neutrinos.gravity(k, np.exp(grid.x))
        p, q = _first_order_equation(background, np.exp(grid.x), factor)
        # D = 2/3 a_eq + F a, where F has hardly changed
        begun = (start + slope) * factor[:, :1] - slope
        g, dg, _ = grid.solved(p, q, zeros_like(q), begun, slope)
    values = [product(along_k.to_coefficients, each) for each in (g, g + dg)]
    along = [product(grid.to_coefficients, transposed(each)) for each in values]
    return joined(along, 1)


@tf.function(autograph=False)
def _compiled(values: Mapping[str, Any], nodes: int, function: Coefficients) -> tf.Tensor:
    """Returns a function's coefficients; for cosmologies of tensors, new at every evaluation."""
    return function(Background(values), nodes)


def solved(background: Background, nodes: int, function: Coefficients) -> Any:
    """Returns the coefficients of a background; coefficients of plain numbers are kept."""
    names = expansion_parameters(radiation=background.has_radiation)
    values = {name: background.values[name] for name in names}
    choices = {"radiation": background.has_radiation, "m_nu_shares": background.m_nu_shares}
    if type(background) is not Background:
        return function(background, nodes)
    if not any(map(is_tensor, values.values())):
        numbers = {name: float(value) for name, value in values.items()}
        return _of_numbers(tuple({**numbers, **choices}.items()), nodes, function)
    if is_compiled(values):
        tensors = {name: as_float64(value) for name, value in values.items()}
        return _compiled({**tensors, **choices}, nodes, function)
    return function(background, nodes)


@functools.lru_cache(maxsize=64)
def _of_numbers(
    values: tuple[tuple[str, Any], ...], nodes: int, function: Coefficients
) -> np.ndarray:
    return function(Background(dict(values)), nodes)


def _first_order_equation(background: Background, a: np.ndarray, factor: Any = 1.0) -> Any:
    """Returns p and q of g'' + p g' + q g = 0 for D1 = a g.

    Args:
        background: the background.
        a: scale factors [n].
        factor: F of massive neutrinos, [n] or [k, n].
    """
    # 3 + e - 1.5 Omega_m(a) F, free of cancellation
    smooth = [1.5 * share * (1.0 - fluid.w(a)) for fluid, share in background.shares(a)]
    q = functools.reduce(operator.add, smooth)
    if background.neutrinos is not None:
        rest = background.Omega_cb - background.clustering(a) * factor
        q = q + 1.5 * rest / background.a3_e2(a)
    return 4.0 + background.dlne_dlna(a), q


def _lower_orders(background: Background, grid: Collocation) -> dict[Term, Solution]:
    """Returns g = D/a^order of the first two terms at the nodes, with its derivatives by ln a."""
    a, solve = np.exp(grid.x), grid.solved
    matter, slope = background.omega_m(a), background.dlne_dlna(a)
    early = _early_times(background)
    p, q = _first_order_equation(background, a)
    first = solve(p, q, zeros_like(matter), *early[1])
    source = 1.5 * matter * first[0] ** 2
    second = solve(6.0 + slope, 8.0 + 2.0 * slope - 1.5 * matter, source, *early[2])
    return {1: first, 2: second}


def _third_order(background: Background, grid: Collocation) -> dict[Term, Solution]:
    """Returns the same of the terms of third order."""
    lower, solve = _lower_orders(background, grid), grid.solved
    (g1, *_), (g2, *_) = lower[1], lower[2]
    a = np.exp(grid.x)
    matter, slope = background.omega_m(a), background.dlne_dlna(a)
    early = _early_times(background)
    friction, transverse = 8.0 + slope, 15.0 + 3.0 * slope
    longitudinal = transverse - 1.5 * matter
    mixed = 3.0 * matter * g1 * (g2 + g1**2)
    return {
        "3a": solve(friction, longitudinal, 3.0 * matter * g1**3, *early["3a"]),
        "3b": solve(friction, longitudinal, mixed, *early["3b"]),
        "3c": solve(friction, transverse, 1.5 * matter * g1**3, *early["3c"]),
    }


def _early_times(background: Background) -> dict[Term, tuple[Any, Any]]:
    """Returns (g, dg/dlna) at A_MIN for every term, to first order in each fluid's Omega ~ a^s.

    g = g0 (1 + sum of c Omega), where c follows from the equation's terms that are linear in Omega.
    With radiation, it is the series in a / a_eq.
    """
    if background.has_radiation:
        return _in_radiation(background)
    early = [_first_order(fluid, share) for fluid, share in background.shares(np.asarray(A_MIN))]
    return {
        term: (
            g0 * functools.reduce(operator.add, (c[term] * share for c, share, _ in early), 1.0),
            functools.reduce(operator.add, (g0 * c[term] * s * share for c, share, s in early)),
        )
        for term, g0 in EINSTEIN_DE_SITTER.items()
    }


def _in_radiation(background: Background) -> dict[Term, tuple[Any, Any]]:
    """Returns (g, dg/dlna) at A_MIN for every term, from `IN_RADIATION`."""
    a = np.asarray(A_MIN)
    equality = a * (background.a3_e2(a) - background.Omega_cb) / background.Omega_cb
    y, scale = a / equality, 2.0 / 3.0 * equality / a
    early = {}
    for term, (constant, linear, quadratic) in IN_RADIATION.items():
        n = order_of(term)
        g = scale**n * (constant + y * (linear + quadratic * y))
        rate = scale**n * y * (linear + 2.0 * quadratic * y)
        early[term] = g, rate - n * g
    return early


def _first_order(fluid: Any, share: Any) -> tuple[dict[Term, Any], Any, Any]:
    """Returns c of each term, the fluid's Omega and its power s of the scale factor."""
    w = fluid.w(np.asarray(0.0))
    s = -3.0 * w
    third = s**2 + 6.5 * s
    c1 = -1.5 * (1.0 - w) / (s * (s + 2.5))
    c2 = (3.5 * (2.0 * c1 - 1.0) - 1.5 + 3.0 * w) / (s**2 + 4.5 * s + 3.5)
    c3a = (9.0 * (3.0 * c1 - 1.0) - 1.5 + 4.5 * w) / (third + 9.0)
    c3b = (9.0 * (2.4 * c1 + 0.3 * c2 - 1.0) - 1.5 + 4.5 * w) / (third + 9.0)
    c3c = (10.5 * (3.0 * c1 - 1.0) + 4.5 * w) / (third + 10.5)
    return {1: c1, 2: c2, "3a": c3a, "3b": c3b, "3c": c3c}, share, s


def order_of(term: Term) -> int:
    """Returns the order of a term: 1, 2 or 3."""
    return int(str(term)[0])
