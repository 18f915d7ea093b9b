"""Angular power spectra in the Limber approximation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.parameters import as_float64

Power = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""k [h/Mpc] and a [1], which broadcast, to the matter power [(Mpc/h)^3]: a `LinearPower`, say."""


def limber_power(ell: Any, chi: Any, a: Any, widths: Any, kernels: Any, power: Power) -> tf.Tensor:
    """Returns C_ij(l) = int dchi W_i W_j / chi^2 P((l + 1/2) / chi, a(chi)) [1], differentiable.

    The integral is a sum over given distances (Limber 1953; Kaiser 1992; with l + 1/2 after LoVerde
    and Afshordi 2008, arXiv:0809.5112). They are the nodes of a quadrature for the sky, or planes
    for the maps that are made of these.

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
    chi, kernels = as_float64(chi), as_float64(kernels)
    k = (as_float64(ell)[..., tf.newaxis] + 0.5) / chi
    weighted = power(k, as_float64(a)) * as_float64(widths) / chi**2
    pairs = kernels[:, tf.newaxis] * kernels
    return tf.tensordot(pairs, weighted, [[-1], [-1]])
