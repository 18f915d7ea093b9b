"""Angular power spectra of convergence from theory, for the sources of a survey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances, Power, lensing_weight, limber_power
from flowpm_dist.cosmology.nonlinear import Halofit
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.observables.lensing.planes import lensing_efficiency
from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, SourcePlane, Sources

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def convergence_power(
    ell: Any,
    sources: Sequence[Sources],
    cosmology: Cosmology,
    power: Power | None = None,
    *,
    alignment: IntrinsicAlignment | None = None,
    panels: int = 12,
) -> tf.Tensor:
    """Returns the angular power of convergence between each two sources, by Limber's approximation.

    Differentiable by the cosmology and the parameters of sources and alignment, as far as the power
    is.

    Args:
        ell: multipoles [ell] [1], or a number.
        sources: the populations; with alignment, none of them at one redshift.
        cosmology: the parameters.
        power: the matter power P(k, a), such as `LinearPower(cosmology)`, the default, or
            `Halofit(LinearPower(cosmology))`.
        alignment: intrinsic alignments; none by default.
        panels: panels of the quadrature, with 16 nodes each, between the observer and each
            plane of sources.

    Returns:
        C_ij(l) [source, source, ell] [1], float64.

    Raises:
        ValueError: no sources, or alignment of sources at one redshift.
    """
    distances = Distances(cosmology)
    chi, widths = _quadrature(sources, distances, panels)
    a = distances.scale_factor(chi)
    power = LinearPower(cosmology) if power is None else power
    kernels = lensing_weight(cosmology, chi, a=a) * lensing_efficiency(sources, chi, distances)
    if alignment is not None:
        density = tf.stack([source.density(chi, distances) for source in sources])
        growth = power.growth if isinstance(power, (LinearPower, Halofit)) else None
        kernels += alignment.response(a, cosmology, growth) * density
    return limber_power(ell, chi, a, widths, kernels, power)


def _quadrature(
    sources: Sequence[Sources], distances: Distances, panels: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns nodes and weights up to the farthest source, with a break where a kernel has one.

    Panels are narrower near the observer, where wavenumbers vary fast along the line of sight.
    """
    if not sources:
        raise ValueError("lensing needs at least one source")
    reaches = tf.stack([source.farthest(distances) for source in sources])
    planes = np.flatnonzero([isinstance(source, SourcePlane) for source in sources])
    grid = tf.reduce_max(reaches) * (np.arange(panels + 1) / panels) ** 1.5
    edges = tf.sort(tf.concat([grid, tf.gather(reaches, planes)], axis=0))
    half = 0.5 * (edges[1:] - edges[:-1])[:, tf.newaxis]
    nodes = edges[:-1, tf.newaxis] + half * (1.0 + _NODES)
    return tf.reshape(nodes, [-1]), tf.reshape(half * _WEIGHTS, [-1])
