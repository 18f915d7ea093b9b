"""The lattice of one rank's particles in that rank's block of a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

Triple = tuple[int, int, int]

# [mesh cells]. A particle with a larger displacement, or one that is not finite, is left out.
FARTHEST = 2.0**30


@dataclass(frozen=True)
class Lattice:
    """A rank's block of the particle lattice and the padded block of the mesh around it.

    The particle of lattice cell i with displacement s lies at mesh coordinate
    halo + mesh_factor i + s / cell of the padded block.

    Attributes:
        particles: the number of this rank's particles along each axis, (nx, ny, nz).
        mesh_factor: the number of mesh cells per particle spacing.
        halo: the planes of the padded block on either side of this rank's cells along each axis
            [mesh cells]; 0 where the axis is periodic within the block.
        cell: the sides of a mesh cell [Mpc/h].

    Raises:
        ValueError: if a number is out of its range.
    """

    particles: Triple
    mesh_factor: int
    halo: Triple
    cell: tuple[float, float, float]

    def __post_init__(self) -> None:
        if min(self.particles) < 1 or self.mesh_factor < 1:
            raise ValueError(f"an empty lattice: {self.particles}, refined by {self.mesh_factor}")
        if min(self.halo) < 0:
            raise ValueError(f"halo {self.halo} is negative")
        if not all(math.isfinite(side) and side > 0 for side in self.cell):
            raise ValueError(f"cell sides {self.cell} Mpc/h are not all positive")
        if max(self.mesh_block) >= FARTHEST:
            raise ValueError(f"a padded block of {self.mesh_block} cells is too long")

    @property
    def mesh_block(self) -> Triple:
        """The number of cells of the padded block along each axis."""
        x, y, z = (
            self.mesh_factor * n + 2 * h for n, h in zip(self.particles, self.halo, strict=True)
        )
        return x, y, z

    @property
    def per_cell(self) -> tuple[float, float, float]:
        """The number of mesh cells per unit length along each axis [h/Mpc]."""
        x, y, z = (1 / side for side in self.cell)
        return x, y, z
