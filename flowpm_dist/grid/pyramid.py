"""The two meshes of the pyramid force: how a force is split between a coarse mesh and blocks.

The potential of a mesh is the sum of a smooth part, which a coarse mesh of the whole box can hold,
and of a short-range part, which each rank can compute from the density in its block and a halo
(Modi, Lanusse and Seljak 2021, arXiv:2010.11847, section 3). `particle_mesh.pyramid` has the
operations.

Nothing here imports TensorFlow: it is asked before a job starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PyramidChoice = Literal["off", "1%", "0.1%"]
"""The error of the pyramid force [rms of the force]; "off" for the transform of the whole mesh."""

CUBIC = 1e-6
"""Relative difference up to which the sides of a cell are the same."""
ORDER = 6
"""Order of the B-spline that joins the meshes: a sum over `factor` cells, as often as this."""


@dataclass(frozen=True)
class Pyramid:
    """A coarse mesh, and how the force is split.

    Attributes:
        factor: cells of the force mesh to a cell of the coarse mesh, along each side.
        radius: the radius r of the Gaussian exp(-k^2 r^2) that splits the force [coarse cells].
        reach: the planes of density that a rank sees beyond its block, at least [cells].
        beyond: the planes of density that it sees beyond the halo of the potential, where
            particles may stray, at least [cells].
    """

    factor: int
    radius: float
    reach: int
    beyond: int

    @property
    def stencil(self) -> int:
        """The largest distance of the cells between which the B-spline acts [cells]."""
        return ORDER * (self.factor - 1) // 2

    def coarse(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Returns the cells of the coarse mesh of a force mesh."""
        x, y, z = (n // self.factor for n in grid)
        return x, y, z

    def density_halo(self, width: int) -> int:
        """Returns the planes of density around a block for a potential with `width` planes."""
        return max(width + self.beyond, self.reach, self.stencil)

    def coarse_halo(self, width: int) -> int:
        """Returns the planes of the coarse mesh for a potential with `width` planes of halo."""
        return -(-(width + self.stencil) // self.factor)


PYRAMIDS = {"1%": Pyramid(4, 0.6, 8, 0), "0.1%": Pyramid(4, 0.8, 12, 2)}
"""The measured ones, by their error; docs/measurements/pyramid.md has others."""


def pyramid_problem(
    pyramid: str,
    grid: tuple[int, int, int],
    axes: Mapping[str, int],
    size: Sequence[float] | None = None,
) -> str | None:
    """Returns why a force mesh has no such coarse mesh on a mesh of ranks; None if it has one.

    Args:
        pyramid: a `PyramidChoice`.
        grid: cells of the force mesh [nx, ny, nz].
        axes: the axes of the mesh of ranks, whose row and col split x and y.
        size: the sides of the box [Mpc/h], where they are to be checked as well.
    """
    if pyramid == "off":
        return None
    cells = [side / n for side, n in zip(size or grid, grid, strict=True)]
    if max(cells) > (1 + CUBIC) * min(cells):
        cell = " x ".join(f"{side:.6g}" for side in cells)
        return f'= "{pyramid}": needs cubic cells, but a cell of the force mesh is {cell} Mpc/h'
    factor = PYRAMIDS[pyramid].factor
    parts = axes.get("row", 1), axes.get("col", 1), 1
    units = [factor * math.lcm(2, part) for part in parts]
    sides = list(zip(grid, units, strict=True))
    if all(n % unit == 0 and n >= 4 * factor for n, unit in sides):
        return None
    return (
        f'= "{pyramid}": its coarse mesh has a cell for {factor} cells of the force mesh along '
        f"each side. So the sides of the force mesh, {' x '.join(map(str, grid))} cells, must be "
        f"multiples of {', '.join(map(str, units))} on row:{parts[0]},col:{parts[1]}, and at least "
        f"{4 * factor}"
    )
