"""The sources of lensing: at one redshift, or distributed; and their intrinsic alignments."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.background import HUBBLE_DISTANCE, Distances
from flowpm_dist.cosmology.parameters import Parameter
from flowpm_dist.cosmology.theory import Universe, theory_of
from flowpm_dist.observables.lensing.distributions import (
    NODES,
    WEIGHTS,
    Z_MIN,
    check_numbers,
    check_redshifts,
    check_total,
    quadrature,
    read_distribution,
    smail_edges,
)
from flowpm_dist.options import in_unit, keep_in_units


class Sources(abc.ABC):
    """A population of sources.

    Distances are comoving [Mpc/h]. Every method returns a float64 tensor, differentiable by the
    cosmology, the distances and the parameters of the population.

    Attributes:
        shift: the shift of all redshifts [1]: n(z) becomes n(z - shift).
    """

    shift: Parameter

    @abc.abstractmethod
    def efficiency(self, chi: Any, distances: Distances) -> tf.Tensor:
        """Returns the mean of f_K(chi_s - chi) / f_K(chi_s) over the sources [1], chi of any shape.

        Sources at chi_s <= chi count 0. In a flat universe the ratio is 1 - chi / chi_s.
        """

    @abc.abstractmethod
    def density(self, chi: Any, distances: Distances) -> tf.Tensor:
        """Returns the share of the sources per distance [h/Mpc], for chi of any shape."""

    @abc.abstractmethod
    def fractions(self, edges: Any, distances: Distances) -> tf.Tensor:
        """Returns the share of the sources between edges [n + 1]: [n] [1]."""

    @abc.abstractmethod
    def farthest(self, distances: Distances) -> tf.Tensor:
        """Returns the distance beyond which there are no sources [Mpc/h]."""


def check_sources(sources: Sequence[Sources]) -> None:
    """Raises ValueError if there are no sources."""
    if not sources:
        raise ValueError("lensing needs at least one source")


class SourcePlane(Sources):
    """Sources at one redshift, or at one distance.

    Args:
        redshift: redshift of all sources [1], above 0.
        shift: see `Sources`.
        distance: their comoving distance [Mpc/h], in place of the redshift, whatever the cosmology.

    Raises:
        ValueError: not exactly one of redshift and distance, one that is not above 0, or a shift
            of a distance.
    """

    def __init__(
        self,
        redshift: Parameter | None = None,
        shift: Parameter = 0.0,
        *,
        distance: Parameter | None = None,
    ) -> None:
        redshift, shift = in_unit("redshift", redshift, "redshift"), _shift(shift)
        distance = in_unit("distance", distance, "Mpc/h")
        if (redshift is None) == (distance is None):
            raise ValueError("a source plane has either a redshift or a distance")
        if distance is None:
            _check("redshift plus shift", as_float64(redshift) + as_float64(shift), lambda z: z > 0)
        else:
            _check("distance", distance, lambda chi: chi > 0)
            if not isinstance(shift, (int, float)) or shift != 0:
                raise ValueError("a shift is one of redshift: give the plane's redshift")
        self.redshift, self.shift, self.distance = redshift, shift, distance

    @override
    def efficiency(self, chi: Any, distances: Distances) -> tf.Tensor:
        chi, source = as_float64(chi, "chi", "Mpc/h"), self.farthest(distances)
        slope, length = (f(chi) for f in (distances.transverse_slope, distances.transverse))
        return tf.nn.relu(slope - length / distances.tangent(source))

    def density(self, chi: Any, distances: Distances) -> tf.Tensor:
        """Raises ValueError: the density of a plane is infinite."""
        raise ValueError(
            "sources at one redshift have no density along the line of sight: intrinsic "
            "alignments need a distribution, or planes of matter"
        )

    def fractions(self, edges: Any, distances: Distances) -> tf.Tensor:
        """Returns the shares of the sources between edges, [n] [1]; the derivatives are 0."""
        nearer = tf.cast(
            as_float64(edges, "edges", "Mpc/h") <= self.farthest(distances), tf.float64
        )
        return nearer[:-1] - nearer[1:]

    def farthest(self, distances: Distances) -> tf.Tensor:
        """Returns the distance of the plane [Mpc/h]."""
        if self.distance is not None:
            return as_float64(self.distance)
        z = as_float64(self.redshift) + as_float64(self.shift)
        return distances.comoving(1.0 / (1.0 + z))


class SourceDistribution(Sources):
    """Sources with a distribution n(z), of any normalisation, that is smooth between edges.

    Integrals over n(z) are Gauss-Legendre quadratures between each two edges, cut at the distance
    that is asked for. What a shift moves below z = 0 is cut off, and the rest is normalised.

    A subclass must have `edges` and `unshifted`.

    Attributes:
        edges: redshifts [cell + 1] [1], increasing, before the shift.

    Raises:
        ValueError: there are no sources above z = 0, as far as the parameters are known.
    """

    edges: np.ndarray

    def __init__(self, shift: Parameter = 0.0) -> None:
        self.shift = shift = _shift(shift)
        last = float(self.edges[-1])
        _check("shift", shift, lambda moved: moved + last > 0, f"a number above {-last:g}")
        moved = tf.get_static_value(as_float64(shift))
        if moved is None:
            return
        z, weights = quadrature(self.edges, float(moved))
        cell = tf.broadcast_to(tf.range(len(z))[:, tf.newaxis], z.shape)
        known = tf.get_static_value(self.unshifted(tf.constant(z), cell))
        if known is not None:
            check_total(known, weights, float(moved))

    @abc.abstractmethod
    def unshifted(self, z: tf.Tensor, cell: tf.Tensor) -> tf.Tensor:
        """Returns n(z) before the shift and without normalisation [any unit].

        Args:
            z: redshifts of any shape, float64.
            cell: int32 of the same shape: the number of the cell between edges that holds each.
        """

    @override
    def efficiency(self, chi: Any, distances: Distances) -> tf.Tensor:
        chi = as_float64(chi, "chi", "Mpc/h")
        number, inverse = self._beyond(chi, distances)
        slope, length = (f(chi) for f in (distances.transverse_slope, distances.transverse))
        return tf.nn.relu(number * slope - length * inverse)

    @override
    def fractions(self, edges: Any, distances: Distances) -> tf.Tensor:
        number, _ = self._beyond(as_float64(edges, "edges", "Mpc/h"), distances)
        return number[:-1] - number[1:]

    def density(self, chi: Any, distances: Distances) -> tf.Tensor:
        """Returns the share of the sources per distance [h/Mpc]: normalised n(z) times dz/dchi."""
        a = distances.scale_factor(chi)
        z, limits = 1.0 / a - 1.0, self._limits()
        cell = _cell(limits, z)
        inside = (z >= limits[0]) & (z <= limits[-1])
        z = tf.clip_by_value(z, limits[0], limits[-1])
        total = tf.reduce_sum(self._cells(limits, distances)[0])
        unshifted = self.unshifted(z - as_float64(self.shift), cell) / total
        rate = distances.background.e(a) / HUBBLE_DISTANCE
        return tf.where(inside, unshifted * rate, tf.zeros_like(unshifted))

    @override
    def farthest(self, distances: Distances) -> tf.Tensor:
        return distances.comoving(1.0 / (1.0 + self._limits()[-1]))

    def _limits(self) -> tf.Tensor:
        """Returns the edges after the shift, of those above z = 0 [cell + 1]."""
        return tf.maximum(self.edges + as_float64(self.shift), Z_MIN)

    def _beyond(self, chi: tf.Tensor, distances: Distances) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the share of the sources beyond chi [1] and their sum of 1/t(chi_s) [h/Mpc]."""
        limits = self._limits()
        number, inverse = self._cells(limits, distances)
        z = distances.redshift(chi)
        cell = _cell(limits, z)
        lower, upper = tf.gather(limits, cell), tf.gather(limits, cell + 1)
        z = tf.clip_by_value(z, lower, upper)
        parts = self._integrals(z, upper, cell, distances)
        sums = [tf.cumsum(x, exclusive=True, reverse=True) for x in (number, inverse)]
        first, second = (p + tf.gather(s, cell) for p, s in zip(parts, sums, strict=True))
        total = tf.reduce_sum(number)
        return first / total, second / total

    def _cells(self, limits: tf.Tensor, distances: Distances) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the integrals of n(z) and of n(z) / t(z) over each cell [cell]."""
        cells = tf.range(len(self.edges) - 1)
        return self._integrals(limits[:-1], limits[1:], cells, distances)

    def _integrals(
        self, lower: tf.Tensor, upper: tf.Tensor, cell: tf.Tensor, distances: Distances
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the integrals of n(z) and n(z) / t(z) between limits, t = `Distances.tangent`."""
        half = 0.5 * (upper - lower)[..., tf.newaxis]
        z = lower[..., tf.newaxis] + half * (1.0 + NODES)
        cells = tf.broadcast_to(cell[..., tf.newaxis], tf.shape(z))
        weighted = half * WEIGHTS * self.unshifted(z - as_float64(self.shift), cells)
        over = weighted / distances.tangent(distances.comoving(1.0 / (1.0 + z)))
        return tf.reduce_sum(weighted, axis=-1), tf.reduce_sum(over, axis=-1)


class SmailDistribution(SourceDistribution):
    """Sources with n(z) ~ z^alpha exp(-(z / z0)^beta) up to a redshift (Smail and others 1994).

    Args:
        z0: scale of the redshifts [1], above 0.
        alpha: exponent at low redshift [1], above 0.
        beta: exponent of the cut [1], above 0.
        shift: see `Sources`.
        z_max: the redshift beyond which there are no sources [1].

    Gradients with respect to z0, alpha, beta and the shift exist if they are scalar tensors.

    Raises:
        ValueError: a parameter that is not above 0 or not finite; no sources above z = 0.
    """

    def __init__(
        self,
        z0: Parameter,
        alpha: Parameter = 2.0,
        beta: Parameter = 1.5,
        shift: Parameter = 0.0,
        z_max: float = 3.0,
    ) -> None:
        z0, z_max = in_unit("z0", z0, "redshift"), in_unit("z_max", z_max, "redshift")
        alpha, beta = in_unit("alpha", alpha), in_unit("beta", beta)
        parameters = {"z0": z0, "alpha": alpha, "beta": beta, "z_max": z_max}
        for name, value in parameters.items():
            _check(name, value, lambda number: 0 < number < np.inf, "a finite number above 0")
        self.z0, self.alpha, self.beta = z0, alpha, beta
        self.edges = smail_edges(z_max)
        super().__init__(shift)

    @override
    def unshifted(self, z: tf.Tensor, cell: tf.Tensor) -> tf.Tensor:
        x = tf.maximum(z, 1e-12) / as_float64(self.z0)
        return x ** as_float64(self.alpha) * tf.exp(-(x ** as_float64(self.beta)))


class TabulatedDistribution(SourceDistribution):
    """Sources with n(z) from a table, linear between its rows and 0 beyond them.

    Args:
        z: redshifts [row] [1], increasing, not negative.
        n: n(z) of any normalisation [row], not negative; may be a tensor to differentiate by.
        shift: see `Sources`.

    Raises:
        ValueError: redshifts that do not increase; n(z) that is negative, not finite, or 0
            everywhere above z = 0; fewer than two rows.
    """

    def __init__(self, z: Any, n: Any, shift: Parameter = 0.0) -> None:
        self.edges = np.asarray(in_unit("z", z, "redshift"), np.float64)
        self.n = as_float64(n, "n")
        if self.edges.ndim != 1 or self.edges.size < 2 or self.n.shape != self.edges.shape:
            raise ValueError(
                "z and n of a source distribution must be two columns of at least two rows: got "
                f"shapes {self.edges.shape} and {tuple(self.n.shape)}"
            )
        check_redshifts(self.edges)
        known = tf.get_static_value(self.n)
        if known is not None:
            check_numbers(known)
        super().__init__(shift)

    @classmethod
    def from_file(cls, path: str | Path, column: int = 1) -> TabulatedDistribution:
        """Reads n(z) from a text file with columns z, n; `#` begins a comment.

        Args:
            path: the file; blanks or commas separate its columns.
            column: number of the column with n(z); column 0 has z.

        Raises:
            UserError: no such file or column, or a table as for `TabulatedDistribution`.
        """
        return cls(*read_distribution(path, in_unit("column", column)))

    @override
    def unshifted(self, z: tf.Tensor, cell: tf.Tensor) -> tf.Tensor:
        lower, upper = (functools.partial(tf.gather, indices=i) for i in (cell, cell + 1))
        share = (z - lower(self.edges)) / lower(np.diff(self.edges))
        return lower(self.n) + share * (upper(self.n) - lower(self.n))


def _cell(limits: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """Returns the cells between limits that hold redshifts, or are nearest to them; int32."""
    flat = tf.searchsorted(limits, tf.reshape(z, [-1]), side="right") - 1
    return tf.reshape(tf.clip_by_value(flat, 0, limits.shape[0] - 2), tf.shape(z))


def _shift(shift: Parameter) -> Parameter:
    plain: Parameter = in_unit("shift", shift, "redshift")
    return plain


def _check(
    name: str, value: Any, holds: Callable[[Any], Any], requirement: str = "a number above 0"
) -> None:
    known = tf.get_static_value(as_float64(value))
    if known is not None and not holds(known):
        raise ValueError(f"{name} must be {requirement}: got {known:g}")


C1_RHO_CRIT = 0.0134
"""C1 times the critical density today [1] (Joachimi and others 2011, arXiv:1008.3491)."""


@dataclass(frozen=True)
class IntrinsicAlignment:
    """The non-linear alignment model, NLA, of the sources' shapes with the evolved matter.

    To the convergence it adds the integral of F(a) n(chi) delta over chi, with

        F = -A_IA ((1 + z) / (1 + z_pivot))^eta C1 rho_crit Omega_m / D(z),

    where D is the linear growth, 1 today (Hirata and Seljak 2004, astro-ph/0406275; Bridle and King
    2007, arXiv:0705.0166; with the power of redshift, Joachimi and others 2011, arXiv:1008.3491).

    Attributes:
        amplitude: A_IA [1]; positive where galaxies point to overdensities.
        eta: the power of 1 + z [1].
        z_pivot: the redshift at which A_IA is the whole amplitude [1].
    """

    amplitude: Parameter
    eta: Parameter = 0.0
    z_pivot: float = 0.62

    def __post_init__(self) -> None:
        keep_in_units(self, amplitude="", eta="", z_pivot="redshift")

    def response(self, a: Any, cosmology: Universe) -> tf.Tensor:
        """Returns F [1] at scale factors a [1] of any shape; float64, differentiable.

        Args:
            a: the scale factors.
            cosmology: the parameters, or the theory.
        """
        a = as_float64(a, "a")
        theory = theory_of(cosmology)
        relative = theory.growth.d1(a) / theory.growth.d1(1.0)
        stretch = (a * (1.0 + self.z_pivot)) ** -as_float64(self.eta)
        matter = C1_RHO_CRIT * as_float64(theory.background.Omega_m)
        return -as_float64(self.amplitude) * stretch * matter / relative
