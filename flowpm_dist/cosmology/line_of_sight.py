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
    """Returns W(chi) = 3/2 Omega_m (H0/c)^2 f_K(chi) / a [h/Mpc], float64.

    The convergence of a source at chi_s is the integral of W f_K(chi_s - chi) / f_K(chi_s) delta
    over chi < chi_s (Bartelmann and Schneider 2001, astro-ph/9912508, equation 6.17). f_K is
    `Distances.transverse`; in flat space the ratio is 1 - chi / chi_s. Differentiable.

    Args:
        cosmology: the parameters, or the theory.
        chi: comoving distances [Mpc/h].
        a: the scale factors [1] at `chi`; by default computed from the cosmology.
    """
    chi = as_float64(chi, "chi", "Mpc/h")
    theory = theory_of(cosmology)
    distances = theory.distances
    a = distances.scale_factor(chi) if a is None else as_float64(a, "a")
    matter = 1.5 * as_float64(theory.background.Omega_m) / HUBBLE_DISTANCE**2
    return matter * distances.transverse(chi) / a


def limber_power(ell: Any, chi: Any, a: Any, widths: Any, kernels: Any, power: Power) -> tf.Tensor:
    """Returns C_ij(l) = int dchi W_i W_j / f_K^2 P((l + 1/2) / f_K, a(chi)) [1], differentiable.

    The integral is a sum over given distances (Limber 1953; Kaiser 1992; with l + 1/2 after LoVerde
    and Afshordi 2008, arXiv:0809.5112). The distances are the nodes of a quadrature, or the planes
    that maps are made of. In a curved universe l + 1/2 stands for sqrt(l (l + 1) - K), as far as
    Limber's approximation goes (Lesgourgues and Tram 2014, arXiv:1312.2697).

    Args:
        ell: multipoles [ell] [1], above 0; or a number.
        chi: comoving transverse distances f_K [node] [Mpc/h], above 0: `Distances.transverse` of
            the comoving distances, which they are in a flat universe.
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
