"""How a grid is cut into the blocks of a mesh of ranks: `row` cuts x, `col` cuts y.

A batch of volumes is cut by `replica`. `StepTraffic` has the messages of a step by formula;
`simulation.profile` counts them while a step runs.

Nothing here imports TensorFlow: it is asked before a job starts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from flowpm_dist.options import nearest
from meshimpl import traffic
from meshimpl.mesh_shape import parse_mesh_shape
from meshimpl.traffic import Tally, Traffic, added

MESH_AXES = ("replica", "row", "col")
HALO = 8
"""Halo for which a mesh is chosen where no particles are to move [particle spacings]."""
HALO_MARGIN = 1.2
"""How much further than the largest displacement of LPT a suggested halo reaches."""
LARGEST_DISPLACEMENT = {
    32: 15.0,
    64: 20.0,
    128: 25.5,
    256: 29.0,
    512: 32.0,
    1024: 34.0,
    2048: 35.0,
    4096: 36.0,
}
"""Side of a box, and the largest displacement along an axis at a = 1 [Mpc/h], with the parameters
of Planck 2018: of 2LPT up to 256 Mpc/h, beyond it six times the rms of linear theory."""
COLLECTIVE = 2**20
"""What a collective costs, however small: as long as so many bytes take."""
PADDED_CELL = 1
"""What a cell of a block with its halo costs: as long as so many bytes take."""

Grid = tuple[int, int, int]


def parse_mesh(shape: str, *, batched: bool = False) -> dict[str, int]:
    """Axis sizes of a text such as `"row:2,col:2"`, in its order.

    Args:
        shape: the text.
        batched: whether there is a batch for a replica axis to cut.

    Raises:
        ValueError: not such a text, an unknown axis or one named twice, a size below 1, or a
            replica axis with more than one place, which a single simulation cannot use.
    """
    axes = dict(parse_mesh_shape(shape))
    if not axes:
        raise ValueError(f"{shape!r} names no axis; a mesh has the form row:2,col:2")
    for name in axes:
        if name not in MESH_AXES:
            raise ValueError(f"there is no axis {name!r}{nearest(name, MESH_AXES)}")
    if axes.get("replica", 1) != 1 and not batched:
        raise ValueError(f"replica:{axes['replica']} runs a batch, and this is one simulation")
    return axes


TOLERANCE = 1e-4
"""How far a number of mesh cells may be from a whole one: factors such as 4/3 are rounded."""


def finer_grid(grid: Grid, factor: float) -> Grid:
    """Returns the cells of a mesh `factor` times as fine as a grid that allows this factor."""
    x, y, z = (round(factor * n) for n in grid)
    return x, y, z


def _whole_as_integer(factor: float) -> float:
    return int(factor) if factor.is_integer() else factor


MeshFactor = Annotated[float, Field(ge=1, le=4), AfterValidator(_whole_as_integer)]
"""Cells of a force mesh per particle spacing."""


def parts_of(axes: Mapping[str, int]) -> Grid:
    """Returns the number of ranks that share each side of a box, whose z is whole on each rank.

    Args:
        axes: the axes of the mesh of ranks, whose row and col split x and y.
    """
    return axes.get("row", 1), axes.get("col", 1), 1


def reach_problem(size: Sequence[float], parts: Sequence[int], length: float) -> str | None:
    """Returns why only neighbours do not hold all within a length of a block; None if they do.

    Args:
        size: the sides of the box [Mpc/h].
        parts: the number of blocks along each side.
        length: [Mpc/h].
    """
    for axis, side, count in zip("xyz", size, parts, strict=True):
        if length >= side / count:
            fits = math.ceil(side / length) - 1
            remedy = f"at most {fits} ranks along {axis}" if fits else "a larger box"
            return (
                f"{length:.4g} Mpc/h spans a rank's block of the box, {side / count:.4g} Mpc/h "
                f"along {axis}: it needs {remedy}"
            )
    return None


def mesh_factor_problem(factor: float, grid: Grid, axes: Mapping[str, int]) -> str | None:
    """Returns why a force mesh cannot be `factor` times as fine as a grid; None if it can be.

    The mesh must have an even number of cells along each side. The ranks must divide it as they
    divide the grid, so that each rank has the mesh cells of its own particles.

    Args:
        factor: the number of mesh cells per particle spacing.
        grid: particles [nx, ny, nz].
        axes: the axes of the mesh of ranks, whose row and col split x and y.
    """
    if not 1 <= factor < math.inf:
        return f"= {factor:g}: must be at least 1"
    parts = parts_of(axes)
    sides = [n * factor for n in grid]
    if all(
        abs(side - round(side)) <= TOLERANCE and round(side) % math.lcm(2, part) == 0
        for side, part in zip(sides, parts, strict=True)
    ):
        return None
    # The allowed factors are the multiples of a fraction.
    steps = [Fraction(math.lcm(2, part), n) for part, n in zip(parts, grid, strict=True)]
    numerator = math.lcm(*(step.numerator for step in steps))
    unit = Fraction(numerator, math.gcd(*(step.denominator for step in steps)))
    least = math.floor(Fraction(factor) / unit)
    near = " and ".join(f"{float(n * unit):.12g}" for n in (least, least + 1) if n * unit >= 1)
    cut = [f"{axis}:{axes[axis]}" for axis in ("row", "col") if axes.get(axis, 1) > 1]
    divided = f" that {' and '.join(cut)} can divide" if cut else ""
    cells = " x ".join(f"{side:.6g}" for side in sides)
    return (
        f"= {factor:.12g}: the force mesh of {' x '.join(map(str, grid))} particles would have "
        f"{cells} cells; it needs an even number along each side{divided}. The nearest factors "
        f"that give one are {near}"
    )


PyramidChoice = Literal["off", "1%", "0.1%"]
"""The error of the pyramid force [rms of the force]; "off" for the transform of the whole mesh."""

CUBIC = 1e-6
"""Relative difference up to which the sides of a cell are the same."""
ORDER = 6
"""Order of the B-spline that joins the meshes: a sum over `factor` cells, as often as this."""


@dataclass(frozen=True)
class Pyramid:
    """A coarse mesh, and how the pyramid force is split between it and the blocks of ranks.

    The potential of a mesh is the sum of a smooth and a short-range part (Modi, Lanusse and Seljak
    2021, arXiv:2010.11847, section 3). A coarse mesh of the whole box can hold the smooth part.
    Each rank can compute the short-range part from the density in its block and a halo.
    `particle_mesh.pyramid` has the operations.

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

    def coarse(self, grid: Grid) -> Grid:
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
    grid: Grid,
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
    parts = parts_of(axes)
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


def misfits(
    axes: dict[str, int],
    grid: Grid,
    ranks: int,
    batch: int = 1,
    mesh_factor: float = 1,
    pyramid: str = "off",
) -> list[str]:
    """Returns the reasons why a mesh does not fit, in words; empty if it fits.

    Args:
        axes: sizes by name.
        grid: cells [nx, ny, nz].
        ranks: the number of ranks of the job.
        batch: volumes worked on together.
        mesh_factor: see `mesh_factor_problem`.
        pyramid: see `pyramid_problem`.
    """
    wrong = []
    places = math.prod(axes.values())
    if places != ranks:
        job = "1 rank" if ranks == 1 else f"{ranks} ranks"
        wrong.append(
            f"{places} places, but the job has {job}; use --ranks {places}, or sizes that "
            f"multiply to {ranks}"
        )
    cut = {
        "replica": (batch, "volumes of the batch"),
        "row": (grid[0], "cells of x"),
        "col": (grid[1], "cells of y"),
    }
    for axis, (count, noun) in cut.items():
        size = axes.get(axis, 1)
        if count % size:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            wrong.append(f"{axis}:{size} does not divide the {count} {noun}; sizes that do: {fits}")
    if not wrong and (problem := mesh_factor_problem(mesh_factor, grid, axes)):
        wrong.append(f"mesh_factor {problem}")
    if not wrong and (problem := pyramid_problem(pyramid, finer_grid(grid, mesh_factor), axes)):
        wrong.append(f"pyramid {problem}")
    return wrong


def default_mesh(
    ranks: int,
    grid: Grid,
    mesh_factor: float = 1,
    pyramid: str = "off",
    halo: int = HALO,
) -> str:
    """The mesh for a number of ranks: the one whose ranks have the least to send and to pad.

    What counts are bytes, the number of collectives and the cells of a block with its halo. So
    slabs, which have half as many bytes and collectives in a transform, are taken while they are
    thick, and pencils where halos outweigh thin slabs.

    Args:
        ranks: the number of ranks.
        grid: particles [nx, ny, nz].
        mesh_factor: mesh cells per particle spacing; the ranks must divide the mesh as well.
        pyramid: the choice of the pyramid force, whose coarse mesh they must divide as well.
        halo: the halo of the run [particle spacings]; see `usual_halo`.

    Returns:
        Such as "row:2,col:1".

    Raises:
        ValueError: no mesh of that many ranks divides the grid.
    """
    finer, coarse, (x, y, z) = _divisible(grid, mesh_factor, pyramid)
    fits = fitting_shapes(ranks, (x, y, z))
    if not fits:
        both = "" if finer == grid else f" and the force mesh {list(finer)}"
        both += "" if coarse == finer else f" and its coarse mesh {list(coarse)}"
        problem = f"no mesh of {ranks} ranks divides the grid {list(grid)}{both} along x and y"
        fitting = {row * col for row in _divisors(x) for col in _divisors(y)}
        would = sorted(fitting, key=lambda n: (abs(n - ranks), n))[:2]
        raise ValueError(f"{problem}; {' or '.join(map(str, sorted(would)))} ranks would do")
    row, col = _by_cost(fits, grid, pyramid, halo)[0] if len(fits) > 1 else fits[0]
    return f"row:{row},col:{col}"


def _divisible(grid: Grid, mesh_factor: float, pyramid: str) -> tuple[Grid, Grid, Grid]:
    """Returns the force mesh, its coarse mesh, and a grid that ranks divide if they divide all."""
    finer = finer_grid(grid, mesh_factor)
    coarse = finer if pyramid == "off" else PYRAMIDS[pyramid].coarse(finer)
    x, y, z = map(math.gcd, grid, finer, coarse)
    return finer, coarse, (x, y, z)


def why_default_mesh(ranks: int, grid: Grid, pyramid: str = "off", halo: int = HALO) -> str:
    """Returns a sentence that says why `default_mesh` is the mesh it is."""
    fits = fitting_shapes(ranks, _divisible(grid, 1, pyramid)[2])
    if ranks == 1:
        return "one rank has the whole box"
    if len(fits) == 1:
        return f"it is the only mesh of {ranks} ranks that divides the grid"
    least, other = _by_cost(fits, grid, pyramid, halo)[:2]
    steps = [_step(grid, *fit, pyramid, halo) for fit in (least, other)]
    sent = [step.total for step in steps]
    mib = [f"{total.sent / 2**20:,.2f} MiB" for total in sent]
    return (
        f"{len(fits)} meshes divide the grid, and this one needs the least exchange in a step of a "
        f"simulation: {sent[0].collectives} collectives and {mib[0]} from each rank with a halo of "
        f"{steps[0].halo} cells; row:{other[0]},col:{other[1]} needs {sent[1].collectives} and "
        f"{mib[1]}"
    )


def fitting_shapes(ranks: int, grid: Grid) -> list[tuple[int, int]]:
    """Returns the rows and columns of all meshes of a number of ranks that divide a grid."""
    rows = (row for row in _divisors(grid[0]) if ranks % row == 0)
    return [(row, ranks // row) for row in rows if grid[1] % (ranks // row) == 0]


@functools.cache
def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number, the largest first."""
    return [n for n in range(number, 0, -1) if number % n == 0]


def needed_halo(reach: float) -> int:
    """Returns the smallest halo [particle spacings] for particles that stray `reach` cells."""
    return math.floor(reach) + 1


def suggested_halo(reach: float, growth: float = 1.0) -> int:
    """Returns a halo [particle spacings] that should do for a whole run.

    Args:
        reach: largest displacement now [particle spacings].
        growth: of linear displacements from now to the end of the run.
    """
    return needed_halo(HALO_MARGIN * reach * growth) + 1


def usual_halo(grid: Grid, size: Sequence[float], a: float = 1.0) -> int:
    """Returns the halo that a run usually suggests, before there are particles.

    Displacements grow as in a universe with Omega_m = 0.31 and sigma8 = 0.81.

    Args:
        grid: particles [nx, ny, nz], whose x and y ranks split.
        size: sides of the box [Mpc/h].
        a: scale factor at the end of the run.
    """
    sides, displacements = zip(*LARGEST_DISPLACEMENT.items(), strict=True)
    largest = float(np.interp(math.log(max(size)), np.log(sides), displacements))
    largest *= min(1.0, max(size) / sides[0]) * 1.3 * a / (1 + 0.3 * a**3)
    return suggested_halo(largest / min(size[0] / grid[0], size[1] / grid[1]))


def _step(grid: Grid, row: int, col: int, pyramid: str, halo: int) -> StepTraffic:
    return StepTraffic(grid, row, col, halo, pyramid=pyramid)


def _by_cost(
    fits: list[tuple[int, int]], grid: Grid, pyramid: str, halo: int
) -> list[tuple[int, int]]:
    """Returns rows and columns of meshes, those that cost least first."""

    def cost(fit: tuple[int, int]) -> int:
        step = _step(grid, *fit, pyramid, halo)
        total = step.total
        padding = PADDED_CELL * step.padded_cells
        return total.sent + COLLECTIVE * total.collectives + padding

    return sorted(fits, key=cost)


MARGIN = {"finite-difference": 2, "spectral": 0}
"""Planes of halo beyond the particles' own, which the difference of a potential needs."""
COMPONENTS = {"finite-difference": 1, "spectral": 3}
"""Fields that are transformed back and read."""
REACH_COMPONENTS = 3
"""Numbers whose maximum over all ranks is the reach of the particles."""


@dataclass(frozen=True)
class StepTraffic:
    """The messages of a step with one force.

    Attributes:
        grid: cells of the force mesh [nx, ny, nz].
        rows, cols: ranks along x and y, which divide them.
        halo: the width of the particles' halo [cells of the force mesh].
        force_gradient: see `Gravity`.
        itemsize: the size of a number [bytes].
        half: whether all but the reach of the particles travels as float16, each piece with its
            scale.
        pyramid: the choice of the pyramid force, in whose step the density has a wider halo, the
            potential of the coarse mesh one instead of the potential's, and the coarse mesh alone
            is transformed.
    """

    grid: tuple[int, int, int]
    rows: int
    cols: int
    halo: int
    force_gradient: str = "finite-difference"
    itemsize: int = 4
    half: bool = False
    pyramid: str = "off"

    @property
    def _carried(self) -> int:
        return 2 if self.half else self.itemsize

    @property
    def _scale(self) -> int:
        return 4 if self.half else 0

    @property
    def padded_cells(self) -> int:
        """Cells of the force mesh on a rank with the widest of its halos."""
        width = self.halo + MARGIN[self.force_gradient]
        if self.pyramid != "off":
            width = PYRAMIDS[self.pyramid].density_halo(width)
        parts = (self.rows, self.cols, 1)
        return math.prod(
            n // p + 2 * width * (p > 1) for n, p in zip(self.grid, parts, strict=True)
        )

    @property
    def tally(self) -> Tally:
        """What the rank sends, by kind of collective."""
        width, fields = self.halo + MARGIN[self.force_gradient], COMPONENTS[self.force_gradient]
        total = self.halos(self.halo, 1)
        if self.pyramid == "off":
            total = added(total, self.transform, 1 + fields)
            total = added(total, self.halos(width, fields))
        else:
            pyramid = PYRAMIDS[self.pyramid]
            coarse = dataclasses.replace(self, grid=pyramid.coarse(self.grid), pyramid="off")
            total = added(total, self.halos(pyramid.density_halo(width), 1))
            total = added(total, coarse.transform, 2)
            total = added(total, coarse.halos(pyramid.coarse_halo(width), 1))
        ranks = self.rows * self.cols
        reach = traffic.allreduce(REACH_COMPONENTS * self.itemsize, ranks)
        return added(total, {"allreduce": reach} if ranks > 1 else {})

    @property
    def total(self) -> Traffic:
        """What the rank sends, of all kinds together."""
        total = Traffic()
        for sent in self.tally.values():
            total = total.plus(sent, 1)
        return total

    def halos(self, width: int, fields: int) -> Tally:
        """Returns the exchange of halos of a number of planes, or their way back: y with x's."""
        nx, ny, nz = self.grid
        x, y = nx // self.rows, ny // self.cols
        wide = x + (2 * width if self.rows > 1 else 0)
        total: Tally = {}
        for sent in (
            *self._hops(width, x, self.rows, y * nz * fields),
            *self._hops(width, y, self.cols, wide * nz * fields),
        ):
            total = added(total, sent)
        return total

    def _hops(self, width: int, block: int, ranks: int, plane: int) -> Iterator[Tally]:
        for distance in range(1, -(-width // block) + 1) if ranks > 1 else ():
            planes = min(block, width - (distance - 1) * block)
            sizes = [0] * ranks
            for other in (distance % ranks, -distance % ranks):
                sizes[other] += planes * plane * self._carried + self._scale if other else 0
            if any(sizes):
                yield {"neighbours": traffic.to_each(sizes, 0)}

    @property
    def transform(self) -> Tally:
        """One real-to-complex transform: an all-to-all along each axis that is split."""
        nx, ny, nz = self.grid
        modes = _padded(nz // 2 + 1, self.cols)
        total: Tally = {}
        if self.cols > 1:
            size = 2 * self._carried * math.prod((nx // self.rows, ny // self.cols, modes))
            size += self.cols * self._scale
            total = added(total, {"alltoall": traffic.alltoall(size, self.cols)})
        if self.rows > 1:
            lines = nx // self.rows * (modes // self.cols) * _padded(ny, self.rows)
            size = 2 * self._carried * lines + self.rows * self._scale
            total = added(total, {"alltoall": traffic.alltoall(size, self.rows)})
        return total


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts
