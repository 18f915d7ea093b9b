"""Growth of structure to third order, from spectral collocation of its equations.

The terms of Lagrangian perturbation theory are x = q + sum_n D_n psi_n, n = 1, 2, 3a, 3b and 3c.
Sources: Bouchet and others 1995, astro-ph/9406013; Rampf and Buchert 2012, arXiv:1203.4260; Michaux
and others 2021, arXiv:2008.09588. With T = d^2/dlna^2 + (2 + dlnE/dlna) d/dlna, s = 1.5 Omega_m(a),

    T D1  = s D1                          T D3a = s (D3a + 2 D1^3)
    T D2  = s (D2 + D1^2)                 T D3b = s (D3b + 2 D1 (D2 + D1^2))
                                          T D3c = s D1^3

All five functions are positive. At early times, and at all times in an Einstein-de Sitter universe,
D1 = a, D2 = 3/7 a^2, D3a = 1/3 a^3, D3b = 10/21 a^3 and D3c = 1/7 a^3. `flowpm_dist.initial.lpt`
computes the field of each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.polynomial import chebyshev

from flowpm_dist.cosmology.arrays import (
    arccos,
    arrays_within,
    as_array,
    as_float64,
    clip,
    cos,
    gives_tensor,
    is_tensor,
    known,
    log,
    maximum,
    product,
    solve,
    sqrt,
    stacked,
    total,
    zeros_like,
)
from flowpm_dist.cosmology.background import A_MAX, GROWTH, Background, Fluid, background_of
from flowpm_dist.cosmology.parameters import Cosmology, is_compiled
from flowpm_dist.options import in_unit

Term = Literal[1, 2, "3a", "3b", "3c"]

A_MIN = 1e-6
"""Scale factor at which the equations start, from their early-time series. Below, D ~ a^order."""

EINSTEIN_DE_SITTER: dict[Term, float] = {1: 1.0, 2: 3 / 7, "3a": 1 / 3, "3b": 10 / 21, "3c": 1 / 7}
"""D over a^order of each term in a universe of matter alone, and early in any."""

TERMS: tuple[Term, ...] = tuple(EINSTEIN_DE_SITTER)
"""The terms of Lagrangian perturbation theory, by order; 3c is the transverse one."""

NODES = (128, 256)
"""Numbers of Chebyshev nodes that are tried in turn. The first does for w near -1."""

CONVERGED = 1e-9
"""Size of the last Chebyshev coefficients, over the largest, at which no more nodes are tried."""

RESOLVED = 1e-5
"""The same, beyond which the solution is refused; growth rates are then good to about 1e-6."""

_TAIL = 8  # coefficients


class Growth:
    """The growth functions D1, D2, D3a, D3b and D3c of a cosmology, for any 0 <= a <= 2.

    Each method takes `a` [1] of any shape (number, array or tensor) and returns a float64 tensor
    of that shape. The equations are solved once, at construction.

    The equations are solved for g = D/a^n, where n is the order, because g hardly varies. They read
    g'' + (2 n + 2 + e) g' + q g = source, with e = dlnE/dlna and the prime for d/dlna. The unknowns
    are the second derivatives at Chebyshev nodes in ln a, which keeps the linear system well
    conditioned (Greengard 1991). The solution can be differentiated with respect to the parameters
    any number of times.

    Growth factors and rates are accurate to 1e-11 for dark energy near w = -1; otherwise factors
    are accurate to 1e-7 and rates to 1e-6. The steeper dark energy rises, the more nodes are
    needed. The last Chebyshev coefficients measure the accuracy. More nodes are tried until these
    coefficients are small enough. If they stay too large, a ValueError is raised.

    Methods that take a wavenumber k [h/Mpc] return an array that broadcasts with it. Here growth
    does not depend on it; where it does, a subclass replaces these methods and sets `by_scale`.

    Attributes:
        by_scale: whether growth depends on the wavenumber.

    Args:
        universe: the parameters, or the background.

    Raises:
        ValueError: dark energy that rises too steeply to be resolved (not checked inside a
            tf.function, which does not know the parameters); or, from the methods, a scale factor
            that is negative or above 2.
    """

    by_scale = False

    def __init__(self, universe: Cosmology | Background) -> None:
        self.background = background_of(universe)
        for nodes in NODES:
            self._grid = _collocation(nodes)
            self._coefficients = _solved(self.background, nodes)
            tail = _tail(self._coefficients)
            if tail is not None and tail <= CONVERGED:
                break
        if tail is not None and not tail <= RESOLVED:
            values = {name: float(self.background.values[name]) for name in GROWTH}
            shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
            raise ValueError(
                f"{shown}: the expansion changes too steeply before a = {A_MAX:g}, or would end, "
                "for growth functions to be resolved; w0 nearer to -1, wa and Omega_k nearer to 0 "
                "or more matter would do"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.background})"

    @gives_tensor
    def ratio(self, a: Any, term: Term, derivative: int) -> Any:
        """Returns d^derivative D_term / dlna^derivative / a^order [1], finite at a = 0.

        Args:
            a: scale factors [1], a float64 array or tensor of any shape.
            term: one of `TERMS`, of order 1, 2 or 3.
            derivative: 0, 1 or 2.
        """
        grid, a = self._grid, in_unit("a", a)
        t = (log(maximum(a, A_MIN)) - grid.start) / grid.half - 1.0
        # Slightly inside the ends, where the derivative of arccos is infinite.
        angle = arccos(clip(t, -1.0 + 1e-15, 1.0 - 1e-15))
        basis = cos(angle[..., np.newaxis] * np.arange(len(grid.x)))
        return total(basis * self._coefficients[:, 3 * TERMS.index(term) + derivative])

    @gives_tensor
    def factor(self, a: Any, term: Term, derivative: int = 0) -> Any:
        """Returns d^derivative D_term / dlna^derivative [1]; see `ratio` for the arguments."""
        a = _checked(a)
        return a ** order_of(term) * self.ratio(a, term, derivative)

    @gives_tensor
    def by_d1(self, a: Any, term: Term) -> Any:
        """Returns dD_term/dD1 [1], finite at a = 0."""
        a = _checked(a)
        rates = self.ratio(a, term, 1) / self.ratio(a, 1, 1)
        return rates if order_of(term) == 1 else a ** (order_of(term) - 1) * rates

    @gives_tensor
    def d1(self, a: Any, k: Any = None) -> Any:
        """Returns the first-order growth D1 [1]; see `Growth` for k [h/Mpc]."""
        in_unit("k", k, "h/Mpc")
        return self.factor(a, 1)

    @gives_tensor
    def d1_dlna(self, a: Any, k: Any = None) -> Any:
        """Returns dD1/dlna [1]; see `Growth` for k [h/Mpc]."""
        in_unit("k", k, "h/Mpc")
        return self.factor(a, 1, 1)

    @gives_tensor
    def d2(self, a: Any) -> Any:
        """Returns the second-order growth D2 [1], positive, about 3/7 D1^2."""
        return self.factor(a, 2)

    @gives_tensor
    def d2_dlna(self, a: Any) -> Any:
        """Returns dD2/dlna [1]."""
        return self.factor(a, 2, 1)

    @gives_tensor
    def f1(self, a: Any, k: Any = None) -> Any:
        """Returns the growth rate dlnD1/dlna [1]; see `Growth` for k [h/Mpc]."""
        in_unit("k", k, "h/Mpc")
        a = _checked(a)
        return self.ratio(a, 1, 1) / self.ratio(a, 1, 0)

    @gives_tensor
    def g_drift(self, a: Any) -> Any:
        """Returns G_D = a^2 E dD1/dlna [1], the growth of the velocity (Feng and others 2016)."""
        a = _checked(a)
        return sqrt(a * self.background.a3_e2(a)) * self.d1_dlna(a)

    @gives_tensor
    def g_kick(self, a: Any) -> Any:
        """Returns G_K = a^3 E^2 (D1'' + (2 + dlnE/dlna) D1') [1].

        It is a E dG_D/dlna (Feng and others 2016).
        """
        a = _checked(a)
        curvature = self.factor(a, 1, 2) + (2.0 + self.background.dlne_dlna(a)) * self.d1_dlna(a)
        return self.background.a3_e2(a) * curvature


def _tail(coefficients: Any) -> float | None:
    """Returns the last Chebyshev coefficients over the largest; None if they are not known yet."""
    numbers = known(coefficients)
    if numbers is None:
        return None
    sizes = np.abs(numbers)
    return float((sizes[-_TAIL:].max(axis=0) / sizes.max(axis=0)).max())


@dataclass(frozen=True)
class _Collocation:
    """The constants of collocation at Chebyshev nodes in x = ln a from A_MIN to A_MAX."""

    start: float
    half: float  # half the length of the interval in x
    x: np.ndarray  # [nodes]
    integrate: np.ndarray  # [nodes, nodes]: values -> values of the integral from A_MIN
    integrate_twice: np.ndarray  # [nodes, nodes]
    to_coefficients: np.ndarray  # [nodes, nodes]: values -> Chebyshev coefficients


@functools.cache
def _collocation(nodes: int) -> _Collocation:
    start, stop = np.log(A_MIN), np.log(A_MAX)
    half = (stop - start) / 2
    t = -np.cos(np.pi * np.arange(nodes) / (nodes - 1))
    to_coefficients = np.linalg.inv(chebyshev.chebvander(t, nodes - 1))
    antiderivatives = chebyshev.chebint(np.eye(nodes), lbnd=-1)
    integrate = half * chebyshev.chebval(t, antiderivatives).T @ to_coefficients
    return _Collocation(
        start=start,
        half=half,
        x=start + half * (t + 1),
        integrate=integrate,
        integrate_twice=integrate @ integrate,
        to_coefficients=to_coefficients,
    )


_Solution = tuple[Any, Any, Any]
"""A function of ln a and its first two derivatives at the nodes, each [nodes]."""


def _coefficients(background: Background, nodes: int) -> Any:
    """Returns the Chebyshev coefficients of D, dD/dlna and d2D/dlna2 over a^order.

    They are [nodes, 15], for all terms in order.
    """
    grid = _collocation(nodes)
    derivatives = []
    with arrays_within():
        solutions = _solve(background, grid)
    for term, (g, dg, ddg) in solutions.items():
        n = order_of(term)
        derivatives += [g, n * g + dg, n**2 * g + 2.0 * n * dg + ddg]
    return product(grid.to_coefficients, stacked(derivatives, 1))


@tf.function(autograph=False)
def _compiled_coefficients(values: Mapping[str, tf.Tensor], nodes: int) -> tf.Tensor:
    """Returns `_coefficients`; for cosmologies of tensors, which change at every evaluation."""
    return _coefficients(Background(values), nodes)


def _solved(background: Background, nodes: int) -> Any:
    """Returns the coefficients of a background; coefficients of plain numbers are kept."""
    values = {name: background.values[name] for name in GROWTH}
    if type(background) is not Background:
        return _coefficients(background, nodes)
    if not any(map(is_tensor, values.values())):
        return _of_numbers(tuple((name, float(value)) for name, value in values.items()), nodes)
    if is_compiled(values):
        tensors = {name: as_float64(value) for name, value in values.items()}
        return _compiled_coefficients(tensors, nodes)
    return _coefficients(background, nodes)


@functools.lru_cache(maxsize=64)
def _of_numbers(values: tuple[tuple[str, float], ...], nodes: int) -> np.ndarray:
    return _coefficients(Background(dict(values)), nodes)


def _solve(background: Background, grid: _Collocation) -> dict[Term, _Solution]:
    """Returns g = D/a^order of every term at the nodes, with its derivatives by ln a."""
    a = np.exp(grid.x)
    solve = functools.partial(_solve_linear, grid)
    matter, slope = background.omega_m(a), background.dlne_dlna(a)
    # 3 + e - 1.5 Omega_m(a), free of cancellation
    smooth = [1.5 * share * (1.0 - fluid.w(a)) for fluid, share in background.shares(a)]
    early = _early_times(background)
    first = solve(
        4.0 + slope,
        functools.reduce(operator.add, smooth),
        zeros_like(matter),
        *early[1],
    )
    g1 = first[0]
    second = solve(6.0 + slope, 8.0 + 2.0 * slope - 1.5 * matter, 1.5 * matter * g1**2, *early[2])
    friction, transverse = 8.0 + slope, 15.0 + 3.0 * slope
    longitudinal = transverse - 1.5 * matter
    mixed = 3.0 * matter * g1 * (second[0] + g1**2)
    return {
        1: first,
        2: second,
        "3a": solve(friction, longitudinal, 3.0 * matter * g1**3, *early["3a"]),
        "3b": solve(friction, longitudinal, mixed, *early["3b"]),
        "3c": solve(friction, transverse, 1.5 * matter * g1**3, *early["3c"]),
    }


def _early_times(background: Background) -> dict[Term, tuple[Any, Any]]:
    """Returns (g, dg/dlna) at A_MIN for every term, to first order in each fluid's Omega ~ a^s.

    g = g0 (1 + sum of c Omega), where c follows from the equation's terms that are linear in Omega.
    """
    early = [_first_order(fluid, share) for fluid, share in background.shares(np.asarray(A_MIN))]
    return {
        term: (
            g0 * functools.reduce(operator.add, (c[term] * share for c, share, _ in early), 1.0),
            functools.reduce(operator.add, (g0 * c[term] * s * share for c, share, s in early)),
        )
        for term, g0 in EINSTEIN_DE_SITTER.items()
    }


def _first_order(fluid: Fluid, share: Any) -> tuple[dict[Term, Any], Any, Any]:
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


def _solve_linear(
    grid: _Collocation, p: Any, q: Any, source: Any, start: Any, slope: Any
) -> _Solution:
    """Solves g'' + p g' + q g = source from g, g' = start, slope at A_MIN; all [nodes]."""
    once, twice = grid.integrate, grid.integrate_twice
    line = start + slope * (grid.x - grid.start)
    matrix = np.eye(len(grid.x)) + p[:, np.newaxis] * once + q[:, np.newaxis] * twice
    right = source - p * slope - q * line
    curvature = solve(matrix, right[:, np.newaxis])[:, 0]
    return line + total(twice * curvature), slope + total(once * curvature), curvature


def order_of(term: Term) -> int:
    """Returns the order of a term: 1, 2 or 3."""
    return int(str(term)[0])


def _checked(a: Any) -> Any:
    a = as_array(a, "a")
    times = known(a)
    if times is not None and not np.all((times >= 0) & (times <= A_MAX)):
        raise ValueError(f"scale factors must lie between 0 and {A_MAX:g}, got {times}")
    return a
