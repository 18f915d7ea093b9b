"""Growth of structure to third order, for any scale factor and, with neutrinos, wavenumber."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from typing_extensions import override

from flowpm_dist.cosmology.arrays import (
    as_array,
    chosen,
    cos,
    gives_tensor,
    is_tensor,
    joined,
    known,
    maximum,
    product,
    reshape,
    sqrt,
    total,
)
from flowpm_dist.cosmology.background import A_MAX, GROWTH, Background, background_of
from flowpm_dist.cosmology.collocation import tail
from flowpm_dist.cosmology.growth_equations import (
    A_MIN,
    SCALES,
    TERMS,
    WAVENUMBERS,
    Coefficients,
    Term,
    coefficients,
    coefficients_by_scale,
    grid_of,
    order_of,
    scales,
    solved,
    third_order_coefficients,
)
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.options import in_unit

NODES = (128, 256)
"""Fewest and most Chebyshev nodes. The fewest do for w near -1."""

CONVERGED = 1e-9
"""Size of the last Chebyshev coefficients, over the largest, at which no more nodes are tried."""

RESOLVED = 1e-5
"""The same, beyond which the solution is refused; growth rates are then good to about 1e-6."""


class Growth:
    """The growth functions D1, D2, D3a, D3b and D3c of a cosmology, for any 0 <= a <= 2.

    Each method takes `a` [1] of any shape (number, array or tensor) and returns a float64 tensor
    of that shape. The equations are solved once, at construction. For plain numbers the equations
    of third order are solved when they are first needed.

    The equations are solved for g = D/a^n, where n is the order, because g hardly varies. They read
    g'' + (2 n + 2 + e) g' + q g = source, with e = dlnE/dlna and the prime for d/dlna. The unknowns
    are the second derivatives at Chebyshev nodes in ln a, which keeps the linear system well
    conditioned (Greengard 1991). The solution can be differentiated with respect to the parameters
    any number of times.

    Growth factors and rates are accurate to 1e-11 for dark energy near w = -1; otherwise factors
    are accurate to 1e-7 and rates to 1e-6. The steeper dark energy rises, the more nodes are
    needed. The last Chebyshev coefficients measure the accuracy. If at first or second
    order they are too large with the fewest nodes, the most nodes are taken. If they stay too
    large, a ValueError is raised.

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
        few, many = NODES[0], NODES[-1]
        series = solved(self.background, few, coefficients)
        last = tail(series)
        self._few_do = last <= CONVERGED
        self._grid = grid_of(few if self._few_do is True else many)
        self._coefficients = self._resolved(self._at_nodes(coefficients, series))
        if is_tensor(self._coefficients):  # under the tape and in the graph of the parameters
            self._third_order  # noqa: B018

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.background})"

    @functools.cached_property
    def _third_order(self) -> Any:
        return self._resolved(self._at_nodes(third_order_coefficients))

    def _resolved(self, series: Any) -> Any:
        """Returns coefficients that are resolved, or not known yet.

        Raises:
            ValueError: they are not.
        """
        last = tail(series)
        if is_tensor(last) or last <= RESOLVED:
            return series
        values = {name: float(self.background.values[name]) for name in GROWTH}
        shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        raise ValueError(
            f"{shown}: the expansion changes too steeply before a = {A_MAX:g}, or would end, for "
            "growth functions to be resolved; w0 nearer to -1, wa and Omega_k nearer to 0 or more "
            "matter would do"
        )

    def _at_nodes(self, function: Coefficients, of_few: Any = None) -> Any:
        """Returns a function's coefficients for as many nodes as growth needs.

        In a graph, where this is not known, they have as many rows as for most nodes.

        Args:
            function: see `solved`.
            of_few: what it is for fewest nodes, if known.
        """
        few, many = NODES[0], NODES[-1]

        def with_few() -> Any:
            series = solved(self.background, few, function) if of_few is None else of_few
            missing = np.zeros([len(self._grid.x) - few, series.shape[1]])
            return joined([series, missing], 0) if len(missing) else series

        return chosen(self._few_do, with_few, lambda: solved(self.background, many, function))

    @gives_tensor
    def ratio(self, a: Any, term: Term, derivative: int) -> Any:
        """Returns d^derivative D_term / dlna^derivative / a^order [1], finite at a = 0.

        Args:
            a: scale factors [1], a float64 array or tensor of any shape.
            term: one of `TERMS`, of order 1, 2 or 3.
            derivative: 0, 1 or 2.
        """
        basis = self._grid.functions(maximum(in_unit("a", a), A_MIN))
        number, series = TERMS.index(term), self._coefficients
        if order_of(term) == 3:
            number, series = number - TERMS.index("3a"), self._third_order
        return total(basis * series[:, 3 * number + derivative])

    @gives_tensor
    def factor(self, a: Any, term: Term, derivative: int = 0) -> Any:
        """Returns d^derivative D_term / dlna^derivative [1]; see `ratio` for the arguments."""
        a = self._checked(a)
        return a ** order_of(term) * self.ratio(a, term, derivative)

    @gives_tensor
    def by_d1(self, a: Any, term: Term) -> Any:
        """Returns dD_term/dD1 [1], finite at a = 0."""
        a = self._checked(a)
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
        a = self._checked(a)
        return self.ratio(a, 1, 1) / self.ratio(a, 1, 0)

    @gives_tensor
    def g_drift(self, a: Any) -> Any:
        """Returns G_D = a^2 E dD1/dlna [1], the growth of the velocity (Feng and others 2016)."""
        a = self._checked(a)
        return sqrt(a * self.background.a3_e2(a)) * self.d1_dlna(a)

    @gives_tensor
    def g_kick(self, a: Any) -> Any:
        """Returns G_K = a^3 E^2 (D1'' + (2 + dlnE/dlna) D1') [1].

        It is a E dG_D/dlna (Feng and others 2016).
        """
        a = self._checked(a)
        curvature = self.factor(a, 1, 2) + (2.0 + self.background.dlne_dlna(a)) * self.d1_dlna(a)
        return self.background.a3_e2(a) * curvature

    def _checked(self, a: Any) -> Any:
        a = as_array(a, "a")
        times, first = known(a), A_MIN if self.background.has_radiation else 0.0
        if times is not None and not np.all((times >= first) & (times <= A_MAX)):
            of = " with radiation" if first else ""
            raise ValueError(
                f"scale factors{of} must lie between {first:g} and {A_MAX:g}, got {times}"
            )
        return a


class GrowthByScale(Growth):
    """Growth with massive neutrinos, whose D1 depends on the wavenumber.

    Without a wavenumber, the methods return growth at k -> 0, where neutrinos cluster as all matter
    does. The dependence on ln k is a Chebyshev series, accurate to 1e-9.
    """

    by_scale = True

    def __init__(self, universe: Cosmology | Background) -> None:
        super().__init__(universe)
        self._scales = scales()
        self._by_scale = self._at_nodes(coefficients_by_scale)

    @override
    @gives_tensor
    def d1(self, a: Any, k: Any = None) -> Any:
        return super().d1(a) if k is None else self._at_scale(a, k, 0)

    @override
    @gives_tensor
    def d1_dlna(self, a: Any, k: Any = None) -> Any:
        return super().d1_dlna(a) if k is None else self._at_scale(a, k, 1)

    @override
    @gives_tensor
    def f1(self, a: Any, k: Any = None) -> Any:
        return super().f1(a) if k is None else self._at_scale(a, k, 1) / self._at_scale(a, k, 0)

    def _at_scale(self, a: Any, k: Any, derivative: int) -> Any:
        """Returns a derivative of D1 by ln a, by Clenshaw's sum over the series in ln k."""
        a, k = self._checked(a), as_array(k, "k", "h/Mpc")
        basis = self._grid.functions(maximum(a, A_MIN))
        columns = self._by_scale[:, derivative * SCALES : (derivative + 1) * SCALES]
        flat = product(reshape(basis, [-1, basis.shape[-1]]), columns)
        series = reshape(flat, [*a.shape, SCALES])
        t = cos(self._scales.angle(maximum(k, WAVENUMBERS[0])))
        later = latest = 0.0 * t
        for n in range(SCALES - 1, 0, -1):
            later, latest = series[..., n] + 2.0 * t * later - latest, later
        return a * (series[..., 0] + t * later - latest)


def growth_of(background: Background) -> Growth:
    """Returns the growth of structure in a background, by scale where neutrinos have a mass."""
    return Growth(background) if background.neutrinos is None else GrowthByScale(background)
