"""Intrinsic alignments of galaxies, proportional to the tidal field of the matter around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology, Parameter, as_float64

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

    def response(
        self, a: Any, cosmology: Cosmology, growth: GrowthFunctions | None = None
    ) -> tf.Tensor:
        """Returns F [1] at scale factors a [1] of any shape; float64, differentiable.

        Args:
            a: the scale factors.
            cosmology: the parameters.
            growth: that of the cosmology, if it exists already.
        """
        a = as_float64(a)
        growth = Growth(cosmology) if growth is None else growth
        relative = growth.d1(a) / growth.d1(1.0)
        stretch = (a * (1.0 + self.z_pivot)) ** -as_float64(self.eta)
        matter = C1_RHO_CRIT * as_float64(cosmology.Omega_m)
        return -as_float64(self.amplitude) * stretch * matter / relative
