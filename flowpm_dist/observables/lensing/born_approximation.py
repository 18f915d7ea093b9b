"""The convergence in the Born approximation: along the unperturbed line of sight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
from flowpm_dist.observables.lensing.planes import LensPlanes, plane_weights
from flowpm_dist.observables.lensing.sources import Sources


def born(
    delta: Any,
    planes: LensPlanes,
    sources: Sequence[Sources],
    cosmology: Cosmology,
    *,
    alignment: IntrinsicAlignment | None = None,
) -> tf.Tensor:
    """Returns the convergence of each source: the sum of W(chi_i) delta_i dchi_i over the planes.

    Warns (`UserWarning`) of sources behind the last edge, if their efficiency there is above 1 %.
    Differentiable by the planes, the cosmology, and the parameters of sources and alignment.

    Args:
        delta: overdensities [plane, ...] [1], float32 or float64, of any pixels. They are against
            the mean of the universe, not that of the map.
        planes: their distances.
        sources: the populations.
        cosmology: the parameters.
        alignment: intrinsic alignments, which add to what lensing does; none by default.

    Returns:
        [source, ...] [1], in the dtype of the planes.

    Raises:
        ValueError: planes whose number is not that of the distances; no sources.
    """
    delta = tf.convert_to_tensor(delta)
    planes.check(delta)
    weights = plane_weights(planes, sources, cosmology, alignment)
    return tf.tensordot(tf.cast(weights, delta.dtype), delta, 1)
