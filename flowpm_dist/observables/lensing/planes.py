"""Planes of matter as thin lenses, and their weights for sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances, lensing_weight
from flowpm_dist.cosmology.parameters import Cosmology, as_float64
from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
from flowpm_dist.observables.lensing.sources import Sources


@dataclass(frozen=True, eq=False)
class LensPlanes:
    """Slabs of the universe, each with its matter projected on a plane.

    Attributes:
        edges: comoving distances between which the slabs lie [plane + 1] [Mpc/h], increasing,
            from 0 on.
        chi: comoving distances of the planes [plane] [Mpc/h]; by default the middle of the slabs.
        a: scale factors of the planes [plane] [1]; by default those of the cosmology at `chi`.

    Raises:
        ValueError: edges that do not increase, or shapes that do not fit.
    """

    edges: Any
    chi: Any = None
    a: Any = None

    def __post_init__(self) -> None:
        edges = as_float64(self.edges)
        known = tf.get_static_value(edges)
        if edges.shape.rank != 1 or edges.shape[0] < 2:
            raise ValueError("edges of lens planes: at least two distances are needed")
        if known is not None and not (known[0] >= 0 and (np.diff(known) > 0).all()):
            raise ValueError("edges of lens planes must increase from 0 or more")
        chi = 0.5 * (edges[1:] + edges[:-1]) if self.chi is None else as_float64(self.chi)
        a = None if self.a is None else as_float64(self.a)
        for name, values in (("chi", chi), ("a", a)):
            if values is not None and values.shape != (edges.shape[0] - 1,):
                raise ValueError(
                    f"{name} of lens planes has shape {tuple(values.shape)}: there are "
                    f"{edges.shape[0] - 1} planes"
                )
        known = tf.get_static_value(chi)
        if known is not None and not (known[0] > 0 and (np.diff(known) > 0).all()):
            raise ValueError("the distances of lens planes must increase from above 0")
        for name, values in (("edges", edges), ("chi", chi), ("a", a)):
            object.__setattr__(self, name, values)

    @classmethod
    def of_shells(cls, edges: Any) -> LensPlanes:
        """Returns shells about the observer, each at the mean distance of its volume.

        That is 3/4 (R2^4 - R1^4) / (R2^3 - R1^3), of overdensities that are means over the volume.

        Args:
            edges: as for `LensPlanes`.
        """
        edges = as_float64(edges)
        near, far = edges[:-1], edges[1:]
        return cls(edges, 0.75 * (far**4 - near**4) / (far**3 - near**3))

    @property
    def widths(self) -> tf.Tensor:
        """The widths of the slabs [plane] [Mpc/h]."""
        return self.edges[1:] - self.edges[:-1]

    def scale_factor(self, distances: Distances) -> tf.Tensor:
        """Returns the scale factors of the planes [plane] [1]."""
        return distances.scale_factor(self.chi) if self.a is None else self.a

    def strength(self, cosmology: Cosmology) -> tf.Tensor:
        """Returns W dchi of each plane for sources at infinity [plane] [1].

        Half the Laplacian of a plane's deflection potential is its strength times its overdensity.
        """
        a = self.scale_factor(Distances(cosmology))
        return lensing_weight(cosmology, self.chi, a=a) * self.widths

    def check(self, delta: tf.Tensor) -> None:
        """Raises ValueError if a tensor [plane, ...] has not as many planes, or is not floating."""
        if not delta.dtype.is_floating:
            raise ValueError(f"planes of matter must be floating numbers, not {delta.dtype.name}")
        if delta.shape.rank is None or delta.shape.rank < 1:
            raise ValueError("planes of matter are a tensor [plane, ...]")
        if delta.shape[0] != self.chi.shape[0]:
            raise ValueError(
                f"{delta.shape[0]} planes of matter were given: {self.chi.shape[0]} have distances"
            )


def lensing_efficiency(sources: Sequence[Sources], chi: Any, distances: Distances) -> tf.Tensor:
    """Returns the lensing efficiency of each source, the mean of (1 - chi / chi_s)+ over n(z).

    Args:
        sources: the populations.
        chi: comoving distances [distance] [Mpc/h].
        distances: of the cosmology.

    Returns:
        [source, distance] [1], float64, differentiable.

    Raises:
        ValueError: no sources.
    """
    if not sources:
        raise ValueError("lensing needs at least one source")
    return tf.stack([source.efficiency(chi, distances) for source in sources])


def plane_weights(
    planes: LensPlanes,
    sources: Sequence[Sources],
    cosmology: Cosmology,
    alignment: IntrinsicAlignment | None = None,
) -> tf.Tensor:
    """Returns the weights of planes' overdensities in the convergence of each source.

    They are W(chi) dchi with the lensing weight at the plane. Intrinsic alignments add the share of
    the sources in each slab.

    Args:
        planes: their geometry.
        sources: the populations.
        cosmology: the parameters.
        alignment: of the sources' shapes with the matter around them.

    Returns:
        [source, plane] [1], float64, differentiable.
    """
    distances = Distances(cosmology)
    efficiency = lensing_efficiency(sources, planes.chi, distances)
    weights = planes.strength(cosmology) * efficiency
    if alignment is not None:
        shares = tf.stack([source.fractions(planes.edges, distances) for source in sources])
        weights += alignment.response(planes.scale_factor(distances), cosmology) * shares
    return weights
