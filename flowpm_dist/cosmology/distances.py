"""Distances in a flat universe of matter and w0-wa dark energy, without radiation.

Also the integrals along the line of sight: the lensing weight and Limber's approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import (
    as_array,
    as_float64,
    gives_tensor,
    sqrt,
    stop_gradient,
    total,
    zeros_like,
)
from flowpm_dist.cosmology.options import A_MAX
from flowpm_dist.cosmology.parameters import Background, Cosmology

HUBBLE_DISTANCE = 2997.92458
"""c/H0 [Mpc/h]."""

Power = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""k [h/Mpc] and a [1], which broadcast, to the matter power [(Mpc/h)^3]: a `LinearPower`, say."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)

_ROOTS = np.linspace(0.0, 1.0, 129)  # of scale factors
_NEWTON = 10  # steps; each doubles the number of right digits, and the third has six


class Distances:
    """The comoving distance of a scale factor, and the scale factor of a comoving distance.

    chi(a) = c/H0 int_a^1 da / (a^2 E), without radiation. With u = sqrt(a) the integrand is
    2 / sqrt(a^3 E^2), which is smooth down to a = 0, and is integrated by Gauss-Legendre
    quadrature to 1e-12 or better.

    Both methods take numbers, arrays or tensors of any shape, and return a float64 tensor of that
    shape, differentiable by their argument and by the parameters (`scale_factor` up to the third
    derivative).

    Args:
        cosmology: the parameters.
    """

    def __init__(self, cosmology: Cosmology) -> None:
        self.cosmology = cosmology
        self.background = Background(cosmology)

    @gives_tensor
    def comoving(self, a: Any) -> Any:
        """Returns the comoving distance chi [Mpc/h] of scale factors a [1].

        Raises:
            ValueError: a scale factor that is not above 0, or is above 2.
        """
        a = as_array(a, "a")
        known = tf.get_static_value(a)
        if known is not None and not np.all((known > 0) & (known <= A_MAX)):
            raise ValueError(f"scale factors must lie above 0 and not above {A_MAX:g}, got {known}")
        return self._of_root(sqrt(a))

    @gives_tensor
    def scale_factor(self, chi: Any) -> Any:
        """Returns the scale factor a [1] at which light left a comoving distance chi [Mpc/h].

        Newton's method in sqrt(a): chi is convex in it, so that a start at a = 0 converges too.

        Raises:
            ValueError: a distance that is negative, or from which light has not yet arrived.
        """
        chi = as_array(chi, "chi", "Mpc/h")
        horizon = self._of_root(np.zeros([]))
        known, limit = tf.get_static_value(chi), tf.get_static_value(horizon)
        if known is not None and limit is not None and not np.all((known >= 0) & (known < limit)):
            raise ValueError(
                f"distances must lie between 0 and the horizon at {limit:.0f} Mpc/h, got {known}"
            )
        if known is None or limit is None:
            root, steps = zeros_like(chi), _NEWTON
        else:
            # A table gives five or more right digits, two steps from there give all.
            reached = np.asarray(self._of_root(_ROOTS))
            root, steps = np.interp(known, reached[::-1], _ROOTS[::-1]), 2
        for _ in range(steps):
            root = stop_gradient(self._newton(root, chi))
        # Two more steps hardly change the solution; they provide its derivatives.
        return self._newton(self._newton(root, chi), chi) ** 2

    @gives_tensor
    def redshift(self, chi: Any) -> Any:
        """Returns the redshift z [1] of a comoving distance [Mpc/h], as `scale_factor` does."""
        return 1.0 / self.scale_factor(chi) - 1.0

    def _of_root(self, root: Any) -> Any:
        """Returns the distance [Mpc/h] of root = sqrt(a)."""
        half = 0.5 * (1.0 - root)
        nodes = root[..., np.newaxis] + half[..., np.newaxis] * (1.0 + _NODES)
        slopes = 2.0 / sqrt(self.background.a3_e2(nodes**2))
        return HUBBLE_DISTANCE * half * total(_WEIGHTS * slopes)

    def _newton(self, root: Any, chi: Any) -> Any:
        slope = 2.0 * HUBBLE_DISTANCE / sqrt(self.background.a3_e2(root**2))
        return root + (self._of_root(root) - chi) / slope


def lensing_weight(cosmology: Cosmology, chi: Any, a: Any | None = None) -> tf.Tensor:
    """Returns W(chi) = 3/2 Omega_m (H0/c)^2 chi / a [h/Mpc], float64.

    The convergence of a source at chi_s is the integral of W (1 - chi / chi_s)+ delta over chi
    (Bartelmann and Schneider 2001, astro-ph/9912508, equation 6.17), in a flat universe.
    Differentiable.

    Args:
        cosmology: the parameters.
        chi: comoving distances [Mpc/h].
        a: the scale factors [1] at `chi`; by default computed from the cosmology.
    """
    chi = as_float64(chi, "chi", "Mpc/h")
    a = Distances(cosmology).scale_factor(chi) if a is None else as_float64(a, "a")
    return 1.5 * as_float64(cosmology.Omega_m) / HUBBLE_DISTANCE**2 * chi / a


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
