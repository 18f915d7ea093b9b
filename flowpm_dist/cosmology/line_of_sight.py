"""Integrals along the line of sight: the lensing weight and Limber's approximation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.background import HUBBLE_DISTANCE
from flowpm_dist.cosmology.theory import Universe, theory_of

Power = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""k [h/Mpc] and a [1], which broadcast, to the matter power [(Mpc/h)^3]: a `LinearPower`, say."""


def lensing_weight(cosmology: Universe, chi: Any, a: Any | None = None) -> tf.Tensor:
    """Returns W(chi) = 3/2 Omega_m (H0/c)^2 chi / a [h/Mpc], float64.

    The convergence of a source at chi_s is the integral of W (1 - chi / chi_s)+ delta over chi
    (Bartelmann and Schneider 2001, astro-ph/9912508, equation 6.17), in a flat universe.
    Differentiable.

    Args:
        cosmology: the parameters, or the theory.
        chi: comoving distances [Mpc/h].
        a: the scale factors [1] at `chi`; by default computed from the cosmology.
    """
    chi = as_float64(chi, "chi", "Mpc/h")
    theory = theory_of(cosmology)
    distances = theory.line_of_sight
    a = distances.scale_factor(chi) if a is None else as_float64(a, "a")
    return 1.5 * as_float64(theory.background.Omega_m) / HUBBLE_DISTANCE**2 * chi / a


def limber_power(ell: Any, chi: Any, a: Any, widths: Any, kernels: Any, power: Power) -> tf.Tensor:
    """Returns C_ij(l) = int dchi W_i W_j / chi^2 P((l + 1/2) / chi, a(chi)) [1], differentiable.

    The integral is a sum over given distances (Limber 1953; Kaiser 1992; with l + 1/2 after LoVerde
    and Afshordi 2008, arXiv:0809.5112). The distances are the nodes of a quadrature, or the planes
    that maps are made of.

    Args:
        ell: multipoles [ell] [1], above 0; or a number.
        chi: comoving distances [node] [Mpc/h], above 0.
        a: scale factors at them [node] [1].
        widths: weights of the quadrature, or widths of the planes [node] [Mpc/h].
        kernels: W of each source at the distances [source, node] [h/Mpc].
        power: the matter power, see `Power`.

    Returns:
        [source, source, ell], symmetric in the sources; float64.
    """
    chi, kernels = as_float64(chi, "chi", "Mpc/h"), as_float64(kernels, "kernels", "h/Mpc")
    k = (as_float64(ell, "ell")[..., tf.newaxis] + 0.5) / chi
    matter = as_float64(power(k, as_float64(a, "a")), "power", "(Mpc/h)^3")
    weighted = matter * as_float64(widths, "widths", "Mpc/h") / chi**2
    pairs = kernels[:, tf.newaxis] * kernels
    return tf.tensordot(pairs, weighted, [[-1], [-1]])
