"""Planes of matter as thin lenses: their convergence in the Born approximation, and its power."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.line_of_sight import Power, lensing_weight, limber_power
from flowpm_dist.cosmology.theory import Universe, theory_of
from flowpm_dist.observables.lensing.sources import (
    IntrinsicAlignment,
    SourcePlane,
    Sources,
    check_sources,
)
from flowpm_dist.options import in_unit

SLAB_TOLERANCE = 1e-6
"""Part of the farthest distance by which planes may lie outside their slabs, for rounding."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
MOST_EFFICIENCY_LEFT = 0.01
"""Lensing efficiency at the last edge above which a warning is given."""


@dataclass(frozen=True, eq=False)
class LensPlanes:
    """Slabs of the universe, each with its matter projected on a plane.

    Attributes:
        edges: comoving distances between which the slabs lie [plane + 1] [Mpc/h], increasing,
            from 0 on.
        chi: comoving distances of the planes [plane] [Mpc/h], each within its slab; by default the
            middle of the slabs.
        a: scale factors of the planes [plane] [1], above 0 and at most 1; by default the
            cosmology's at `chi`.

    Raises:
        ValueError: edges that do not increase, shapes that do not fit, planes outside their slabs,
            or scale factors that are not above 0 or are above 1.
    """

    edges: Any
    chi: Any = None
    a: Any = None

    def __post_init__(self) -> None:
        edges = as_float64(self.edges, "edges", "Mpc/h")
        if edges.shape.rank != 1 or edges.shape[0] < 2:
            raise ValueError("edges of lens planes: at least two distances are needed")
        ends = tf.get_static_value(edges)
        if ends is not None and not (ends[0] >= 0 and (np.diff(ends) > 0).all()):
            raise ValueError("edges of lens planes must increase from 0 or more")
        object.__setattr__(self, "edges", edges)
        if self.chi is None:
            object.__setattr__(self, "chi", 0.5 * (edges[1:] + edges[:-1]))
        chi, a = self._known("chi"), self._known("a")
        if chi is not None and not (chi[0] > 0 and (np.diff(chi) > 0).all()):
            raise ValueError("the distances of lens planes must increase from above 0")
        if chi is not None and ends is not None:
            tolerance = SLAB_TOLERANCE * ends[-1]
            for n in np.flatnonzero((chi < ends[:-1] - tolerance) | (chi > ends[1:] + tolerance)):
                raise ValueError(
                    f"chi of lens plane {n} is {chi[n]:g} Mpc/h: must be within its slab, from "
                    f"{ends[n]:g} to {ends[n + 1]:g}"
                )
        if a is not None and not ((a > 0) & (a <= 1)).all():
            n = np.flatnonzero(~((a > 0) & (a <= 1)))[0]
            raise ValueError(
                f"a of lens plane {n} is {a[n]:g}: must be a scale factor above 0, at most 1"
            )

    def _known(self, name: str) -> np.ndarray | None:
        """Makes an attribute a float64 tensor [plane]; returns its values as far as known."""
        if getattr(self, name) is None:
            return None
        unit = {"chi": "Mpc/h"}.get(name, "")
        values, planes = as_float64(getattr(self, name), name, unit), self.edges.shape[0] - 1
        if values.shape != (planes,):
            raise ValueError(
                f"{name} of lens planes has shape {tuple(values.shape)}: there are {planes} planes"
            )
        object.__setattr__(self, name, values)
        return tf.get_static_value(values)

    @classmethod
    def of_shells(cls, edges: Any) -> LensPlanes:
        """Returns shells about the observer, each at the mean distance of its volume.

        That is 3/4 (R2^4 - R1^4) / (R2^3 - R1^3), of overdensities that are means over the volume.

        Args:
            edges: as for `LensPlanes`.
        """
        edges = as_float64(edges, "edges", "Mpc/h")
        near, far = edges[:-1], edges[1:]
        return cls(edges, 0.75 * (far**4 - near**4) / (far**3 - near**3))

    @property
    def widths(self) -> tf.Tensor:
        """The widths of the slabs [plane] [Mpc/h]."""
        return self.edges[1:] - self.edges[:-1]

    def scale_factor(self, distances: Distances) -> tf.Tensor:
        """Returns the scale factors of the planes [plane] [1]."""
        return distances.scale_factor(self.chi) if self.a is None else self.a

    def strength(self, cosmology: Universe) -> tf.Tensor:
        """Returns W dchi of each plane for sources at infinity [plane] [1].

        Half the Laplacian of a plane's deflection potential is its strength times its overdensity.
        """
        theory = theory_of(cosmology)
        a = self.scale_factor(theory.distances)
        return lensing_weight(theory, self.chi, a=a) * self.widths

    def check(self, delta: tf.Tensor) -> None:
        """Raises ValueError if a tensor [plane, ...] has not as many planes, or is not floating."""
        if not delta.dtype.is_floating:
            raise ValueError(f"planes of matter must be floating numbers, not {delta.dtype.name}")
        if delta.shape.rank is None or delta.shape.rank < 1:
            raise ValueError("planes of matter are a tensor [plane, ...]")
        if delta.shape[0] != self.chi.shape[0]:
            raise ValueError(
                f"{delta.shape[0]} planes of matter were given, but {self.chi.shape[0]} distances"
            )


def lensing_efficiency(sources: Sequence[Sources], chi: Any, distances: Distances) -> tf.Tensor:
    """Returns the lensing efficiency of each source, see `Sources.efficiency`.

    Args:
        sources: the populations.
        chi: comoving distances [distance] [Mpc/h].
        distances: distances of the cosmology.

    Returns:
        [source, distance] [1], float64, differentiable.

    Raises:
        ValueError: no sources.
    """
    check_sources(sources)
    return tf.stack([source.efficiency(chi, distances) for source in sources])


def efficiency_of_planes(
    planes: LensPlanes, sources: Sequence[Sources], distances: Distances, *, stacklevel: int
) -> tf.Tensor:
    """Returns the lensing efficiency of planes [source, plane] [1], as `lensing_efficiency` does.

    Warns of sources behind the last edge whose light would be deflected there, too, by matter that
    is on no plane.

    Args:
        planes: the places of the planes of matter.
        sources: the populations.
        distances: distances of the cosmology.
        stacklevel: stack level of the warning, 1 for the caller.
    """
    efficiency = lensing_efficiency(sources, planes.chi, distances)
    if not tf.executing_eagerly():
        return efficiency
    last = planes.edges[-1:]
    left = tf.get_static_value(tf.stop_gradient(lensing_efficiency(sources, last, distances)))
    behind = np.flatnonzero(left[:, 0] > MOST_EFFICIENCY_LEFT)
    if behind.size:
        n = behind[0]
        warnings.warn(
            f"sources[{n}] lie behind the last edge of the lens planes, at {float(last[0]):g} "
            f"Mpc/h: matter beyond it, whose lensing efficiency is up to {left[n, 0]:.2g}, is left "
            "out",
            stacklevel=1 + stacklevel,
        )
    return efficiency


def plane_weights(
    planes: LensPlanes,
    sources: Sequence[Sources],
    cosmology: Universe,
    alignment: IntrinsicAlignment | None = None,
) -> tf.Tensor:
    """Returns the weights of planes' overdensities in the convergence of each source.

    They are W(chi) dchi with the lensing weight at the plane. Intrinsic alignments add the share of
    the sources in each slab.

    Args:
        planes: their geometry.
        sources: the populations.
        cosmology: the parameters, or the theory.
        alignment: alignment of the sources' shapes with the matter around them.

    Returns:
        [source, plane] [1], float64, differentiable.

    Warns (`UserWarning`) of sources behind the last edge, if their efficiency there is above 1 %.
    """
    theory = theory_of(cosmology)
    distances = theory.distances
    efficiency = efficiency_of_planes(planes, sources, distances, stacklevel=3)
    weights = planes.strength(theory) * efficiency
    if alignment is not None:
        shares = tf.stack([source.fractions(planes.edges, distances) for source in sources])
        weights += alignment.response(planes.scale_factor(distances), theory) * shares
    return weights


def born(
    delta: Any,
    planes: LensPlanes,
    sources: Sequence[Sources],
    cosmology: Universe,
    *,
    alignment: IntrinsicAlignment | None = None,
) -> tf.Tensor:
    """Returns the convergence of each source: the sum of W(chi_i) delta_i dchi_i over the planes.

    Warns (`UserWarning`) of sources behind the last edge, if their efficiency there is above 1 %.
    Differentiable by the planes, the cosmology, and the parameters of sources and alignment.

    Args:
        delta: overdensities [plane, ...] [1], float32 or float64, of any pixels. The mean is
            the universe's, not the map's.
        planes: their distances.
        sources: the populations.
        cosmology: the parameters, or the theory.
        alignment: intrinsic alignments, which add to what lensing does; none by default.

    Returns:
        [source, ...] [1], in the dtype of the planes.

    Raises:
        ValueError: more or fewer planes than distances; no sources.
    """
    delta = tf.convert_to_tensor(in_unit("delta", delta))
    planes.check(delta)
    weights = plane_weights(planes, sources, cosmology, alignment)
    return tf.tensordot(tf.cast(weights, delta.dtype), delta, 1)


def convergence_power(
    ell: Any,
    sources: Sequence[Sources],
    cosmology: Universe,
    power: Power | None = None,
    *,
    alignment: IntrinsicAlignment | None = None,
    panels: int = 12,
) -> tf.Tensor:
    """Returns the angular power of convergence between each two sources, by Limber's approximation.

    Differentiable with respect to the parameters of sources and alignment, and with respect to the
    cosmology if the power is.

    Args:
        ell: multipoles [ell] [1], or a number.
        sources: the populations; with alignment, none of them at one redshift.
        cosmology: the parameters, or the theory.
        power: the matter power P(k, a), by default the linear power of the theory; or
            `Halofit(theory.power)`, or a table.
        alignment: intrinsic alignments; none by default.
        panels: panels of the quadrature, with 16 nodes each, between the observer and each
            plane of sources.

    Returns:
        C_ij(l) [source, source, ell] [1], float64.

    Raises:
        ValueError: no sources, or alignment of sources at one redshift.
    """
    check_sources(sources)
    theory = theory_of(cosmology)
    distances = theory.distances
    # Narrower panels near the observer, where wavenumbers vary fast; breaks where a kernel has one.
    reaches = tf.stack([source.farthest(distances) for source in sources])
    behind = np.flatnonzero([isinstance(source, SourcePlane) for source in sources])
    grid = tf.reduce_max(reaches) * (np.arange(panels + 1) / panels) ** 1.5
    edges = tf.sort(tf.concat([grid, tf.gather(reaches, behind)], axis=0))
    half = 0.5 * (edges[1:] - edges[:-1])[:, tf.newaxis]
    chi = tf.reshape(edges[:-1, tf.newaxis] + half * (1.0 + _NODES), [-1])
    widths = tf.reshape(half * _WEIGHTS, [-1])
    a = distances.scale_factor(chi)
    power = theory.power if power is None else power
    kernels = lensing_weight(theory, chi, a=a) * lensing_efficiency(sources, chi, distances)
    if alignment is not None:
        density = tf.stack([source.density(chi, distances) for source in sources])
        kernels += alignment.response(a, theory) * density
    return limber_power(ell, distances.transverse(chi), a, widths, kernels, power)
