"""What is seen on a light cone: planes and shells of matter, and maps of convergence."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from flowpm_dist.observables.lensing.kaiser_squires import shear
from flowpm_dist.observables.lensing.planes import LensPlanes


@dataclass(frozen=True)
class ConvergenceMaps:
    """Maps of the convergence in the Born approximation.

    Attributes:
        kappa: [..., source, x, y] [1], whole on every rank of a universe.
        fov: side of the field of view [rad].
    """

    kappa: tf.Tensor
    fov: float

    def shear(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns gamma1 and gamma2 [..., source, x, y] [1] of maps that are taken as periodic."""
        return shear(self.kappa, self.fov)


@dataclass(frozen=True)
class DensityPlanes:
    """The matter of slabs of the universe, projected along the lines of sight.

    Attributes:
        delta: overdensity against the mean of the universe [..., plane, x, y] [1], whole on every
            rank of a universe.
        planes: where they are.
        fov: side of the field of view [rad].
    """

    delta: tf.Tensor
    planes: LensPlanes
    fov: float


@dataclass(frozen=True)
class SphericalConvergence:
    """Maps of the convergence on the whole sky, in the Born approximation.

    Attributes:
        kappa: [..., source, pixel] [1], in HEALPix's order of rings, whole on every rank of a
            universe.
        nside: resolution.
    """

    kappa: tf.Tensor
    nside: int


@dataclass(frozen=True)
class DensityShells:
    """The matter of shells of the universe about an observer.

    Attributes:
        delta: overdensity against the mean of the universe [..., shell, pixel] [1], in HEALPix's
            order of rings, whole on every rank of a universe.
        planes: where they are, as `born` takes them.
        nside: resolution.
    """

    delta: tf.Tensor
    planes: LensPlanes
    nside: int
